"""Two libraries behind one interface: aioenvs, and TorchRL where it is installed, so that one test body runs over both.

    @over_libraries
    def test_reset(library: Library) -> None:
        env = library.toys.CountingEnv(max_steps=3)
        assert isinstance(env, library.EnvBase)

`library.toys` has the env classes of `aioenvs.testing`. For TorchRL they are made from the same source, of which only
the imports are switched. Where the libraries differ on purpose, `library.differs("...")` says so; `DIFFERENCES` is the
one list of those.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing.heap
import multiprocessing.resource_tracker
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

import aioenvs

__all__ = [
    "AIOENVS",
    "DIFFERENCES",
    "LIBRARIES",
    "TORCHRL",
    "Library",
    "has_torchrl",
    "over_libraries",
    "start_what_torchrl_shares",
]

DIFFERENCES: Mapping[str, str] = {
    "beside a nested done": "TorchRL keeps the root's last observation where nested dones alone ask for a reset",
    "caller's dicts": "TorchRL changes the dicts given as list_of_kwargs, and what is given to all prevails over them",
    "the argument of a reset": "TorchRL's batched envs change the TensorDict that a reset is given, which others may "
    "hold; ours return a new one, while single envs update theirs, as TorchRL's do",
    "absent keys": "TorchRL fills keys that a partial reset's input lacks with zeros",
    "final observation": "TorchRL's envs, alone or in ParallelEnv, lose the last observation where they reuse tensors",
    "missing info": "TorchRL fails where the info of a reset lacks a key that the reader wants",
    "entropy": "TorchRL's workers die of set_seed(None), and its SerialEnv returns None",
    "one seeded reset": "TorchRL's set_seed resets a Gymnasium env at once, and its next reset does so again",
    "seeded workers": "TorchRL does not seed torch, numpy and random in its workers, and SerialEnv's envs share them",
    "same specs": "TorchRL takes different callables for different envs, even if their specs are the same",
    "missing attribute": "TorchRL's ParallelEnv says that it has any attribute",
    "pickling": "TorchRL's ParallelEnv cannot be pickled once it has started, and a copied SerialEnv is not closed",
    "parent's threads": "TorchRL's ParallelEnv changes how many threads torch uses in the parent",
    "with blocks": "TorchRL's envs are no context managers",
    "grad at a reset": "TorchRL's SerialEnv cannot reset envs whose observations require grad",
    "last actions": "TorchRL's root of the next step still has the actions of the last one",
    "exclusive keys": "TorchRL's batched envs drop what only some agents of an env observe",
    "some steps": "TorchRL cannot step only some envs whose values are stacked lazily or vary in size; nor can it roll "
    "out until all are done there, or where a done is nested",
    "nobody": "TorchRL takes envs with a batch dim of size 0 for envs that are never all done",
    "empty bounds": "TorchRL's Bounded cannot have a batch dim of size 0",
}

REPLACED = {"aioenvs.envs": "torchrl.envs", "aioenvs.specs": "torchrl.data", "aioenvs.testing": "torchrl_toys"}
SOURCE = Path(aioenvs.__file__).parent / "testing"
TOYS = REPLACED["aioenvs.testing"]


def has_torchrl() -> bool:
    """Whether TorchRL is installed."""
    return importlib.util.find_spec("torchrl") is not None


@dataclass(frozen=True)
class Library:
    """A library that has envs.

    Attributes:
        name: "aioenvs" or "torchrl".
        homes: Where it keeps what: the names of modules.
    """

    name: str
    homes: Mapping[str, str] = field(hash=False, compare=False)

    def differs(self, how: str) -> bool:
        """Whether this is the other library, and it differs on purpose; `how` is a key of `DIFFERENCES`."""
        return bool(DIFFERENCES[how]) and self.name != "aioenvs"

    def skip_if_differs(self, how: str) -> None:
        """Skip the test where the libraries differ on purpose, for the reason in `DIFFERENCES`."""
        if self.differs(how):
            pytest.skip(DIFFERENCES[how])

    def _module(self, which: str) -> Any:
        with _quiet():
            return importlib.import_module(self.homes[which])

    @property
    def specs(self) -> Any:
        """The module that has `Composite`, `Bounded` and so on."""
        return self._module("specs")

    @property
    def toys(self) -> Any:
        """The module that has `CountingEnv` and so on."""
        return self._module("toys")

    def __getattr__(self, name: str) -> Any:
        """A name of the library, such as `EnvBase`, `step_mdp`, `check_env_specs`, `GymEnv`, `SerialEnv`."""
        if name.startswith("_"):
            raise AttributeError(name)
        for which in ("root", "envs", "utils"):
            if which in self.homes and hasattr(module := self._module(which), name):
                return getattr(module, name)
        raise AttributeError(f"{self.name} has no {name!r}")

    def __repr__(self) -> str:
        return self.name


@contextmanager
def _quiet() -> Iterator[None]:
    """TorchRL warns of much when it is imported, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


AIOENVS = Library(
    "aioenvs", {"root": "aioenvs", "envs": "aioenvs.envs", "specs": "aioenvs.specs", "toys": "aioenvs.testing"}
)
TORCHRL = Library(
    "torchrl", {"envs": "torchrl.envs", "utils": "torchrl.envs.utils", "specs": "torchrl.data", "toys": TOYS}
)

TORCHRL_MARKS = (
    pytest.mark.skipif(not has_torchrl(), reason="TorchRL is not installed"),
    pytest.mark.filterwarnings("ignore"),
)
LIBRARIES = (pytest.param(AIOENVS, id="aioenvs"), pytest.param(TORCHRL, id="torchrl", marks=TORCHRL_MARKS))
over_libraries = pytest.mark.parametrize("library", LIBRARIES)


def switched(source: str) -> str:
    """The source of a module of `aioenvs.testing`, written for TorchRL.

    Raises:
        ImportError: If anything else of aioenvs would be imported.
    """
    pattern = "|".join(rf"\b{re.escape(name)}\b" for name in REPLACED)
    source = re.sub(pattern, lambda found: REPLACED[found.group()], source)
    for node in ast.walk(ast.parse(source)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if left := [name for name in names if name.partition(".")[0] == "aioenvs"]:
            raise ImportError(f"an env class must need nothing of aioenvs but {sorted(REPLACED)}, found {left}")
    return source


class _Switching(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Finds `torchrl_toys` and its modules in the source of `aioenvs.testing`."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != TOYS and not name.startswith(f"{TOYS}."):
            return None
        return importlib.util.spec_from_file_location(
            name,
            self.get_filename(name),
            loader=self,
            submodule_search_locations=[str(SOURCE)] if name == TOYS else None,
        )

    def get_filename(self, name: str) -> str:
        return str(SOURCE / f"{name.removeprefix(TOYS).lstrip('.') or '__init__'}.py")

    def get_data(self, path: str) -> bytes:
        return switched(Path(path).read_text()).encode()

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        cloudpickle.register_pickle_by_value(module)  # no other process can import it


def start_what_torchrl_shares() -> None:
    """Start what TorchRL's workers share, which outlives every test; not for workers that import this module."""
    if has_torchrl():
        multiprocessing.resource_tracker.ensure_running()
        multiprocessing.heap.BufferWrapper(1)


if has_torchrl():
    sys.meta_path.insert(0, _Switching())
