"""The options of TorchRL's batches as ours, and the attributes that TorchRL's code looks at."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from aioenvs.engine.adapters.copying import Withheld
from aioenvs.faces.forwarding import Forwarding, looked_up
from aioenvs.faces.sync_envs import View

WORKERS = ("mp_start_method", "metadata_from_workers")
WITHOUT_EFFECT = ("metadata_from_workers", "auto_wrap_envs", "policy_proof")


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """TorchRL's options as those of the plain faces; what TorchRL refuses is refused with its errors and words."""
    kept = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    if kept.pop("pin_memory", False):
        raise ValueError("pin_memory for batched envs is deprecated")
    if kept.get("memmap") and kept.get("shared_memory", True):
        raise RuntimeError(
            "memmap and shared memory are mutually exclusive features; give shared_memory=False with memmap=True"
        )
    return kept


class Place:
    """Where an attribute is in the envs of a face, which is not kept alive: the end of a path of names and dots."""

    def __init__(self, face: Forwarding, path: str) -> None:
        self._whole = weakref.ref(face.whole if isinstance(face, View) else face)
        self._index = list(face.env_index) if isinstance(face, View) else None
        self._path = path

    def further(self, name: str) -> Any:
        """An attribute of what is there.

        AttributeError if it is private, as TorchRL has it; if there is none; or if the envs are gone.
        """
        path, whole = f"{self._path}.{name}", self._whole()
        if name.startswith("_") or whole is None:
            raise AttributeError(f"no {path!r} can be had {'by this way' if whole else 'of envs that are gone'}")
        face: Any = whole
        return found_at(face if self._index is None else face[self._index], path)


def found_at(face: Forwarding, path: str) -> Any:
    """Return the envs' attribute at the end of a path: `Values`, or a `Method`; AttributeError if there is none."""
    values = looked_up(face, path)
    if values is None:
        return Method(face, path)
    place = Place(face, path)
    return Remote(values, place) if isinstance(values, Withheld) else Values(values, place)


class Values(list[Any]):
    """The values of an attribute, one for each env; calling it returns them, as TorchRL's ParallelEnv has it.

    Its own attributes are those of the values in the envs, again as in TorchRL: `env.gauge.level`.
    """

    def __init__(self, values: Any = (), place: Place | None = None) -> None:
        super().__init__(values)
        self._place = place

    def __call__(self) -> list[Any]:
        """Return the values."""
        return list(self)

    def __getattr__(self, name: str) -> Any:
        place = self.__dict__.get("_place")
        if place is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return place.further(name)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return Values, (list(self),)


class Remote(Withheld):
    """Values that cannot leave their envs; their attributes may.

    Args:
        values: What says why.
        place: Where they are.
    """

    def __init__(self, values: Withheld, place: Place) -> None:
        super().__init__(values.error, len(values))
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_place"].further(name)

    def __call__(self) -> NoReturn:
        """Raise what says why there are no values."""
        raise self.error.with_traceback(None)


def _of_the_values(name: str, own: Any) -> property:
    """An attribute that sequences have: that of the values if they have it, as lists and the like do."""

    def get(self: Any) -> Any:
        try:
            return self.__getattr__(name)
        except AttributeError:
            return own.__get__(self)

    return property(get)


for _class, _base in ((Values, list), (Remote, Sequence)):
    for _name in vars(_base):
        if not _name.startswith("_"):
            setattr(_class, _name, _of_the_values(_name, vars(_base)[_name]))


class Method:
    """A method of the envs of a face, or anything else in them that can be called, at the end of a path of names."""

    def __init__(self, face: Forwarding, path: str) -> None:
        self._face = face
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it in every env, with just these arguments."""
        values: list[Any] = self._face._call_each(self._path, *args, **kwargs)
        return values

    def __iter__(self) -> Any:
        return iter(self())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return found_at(self._face, f"{self._path}.{name}")

    def __repr__(self) -> str:
        return f"<{self._path}() of the envs of {self._face!r}>"


class Worker:
    """A worker process, as far as TorchRL's code looks at one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        """Whether the process is there."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def terminate(self) -> None:
        """End the process."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        os.kill(self.pid, signal.SIGKILL)
