"""Batched torch envs behind one interface: aioenvs' faces in their kinds, and TorchRL's two where it is installed.

    @over_torch_faces
    async def test_reset(face: TorchFace) -> None:
        async with face.open(3, face.toys.CountingEnv, {"max_steps": 2}) as env:
            td = await env.reset()
            assert td.batch_size == env.batch_size

What `open` gives is a `Driver`: all that is a coroutine method on the async faces is one on a driver, whatever face it
drives, and everything else is the face's own. A plain face is called in a thread, where no event loop runs, with the
grad mode of the test. Of TorchRL, there is what `oracle` says.

A plain face runs the coroutine of the same name of an async one, so most tests need no face of each class in each kind:
`OWN_TORCH_FACES` has both kinds of classes, and envs in this process, in threads, packed into processes and in one of
their own; `EVERY_TORCH_FACE` has all there is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from faces import call, num_hosts
from oracle import AIOENVS, TORCHRL, TORCHRL_MARKS, Library

from aioenvs import AsyncParallelEnv

__all__ = [
    "ASYNC_TORCH_FACES",
    "EVERY_TORCH_FACE",
    "GRAD_TORCH_FACES",
    "OWN_TORCH_FACES",
    "PROCESS_TORCH_FACES",
    "TORCH_FACES",
    "Driver",
    "TorchFace",
    "faces_called",
    "over_every_torch_face",
    "over_own_torch_faces",
    "over_torch_faces",
]

PROCESS_OPTIONS = ("mp_start_method", "num_processes", "step_timeout", "start_timeout", "close_timeout")
OWN_OPTIONS = ("num_processes", "step_timeout", "start_timeout", "close_timeout", "backend")


@functools.cache
def awaited(name: str) -> bool:
    """Whether a method is a coroutine method on the async faces."""
    return inspect.iscoroutinefunction(inspect.getattr_static(AsyncParallelEnv, name, None))


class Driver:
    """A batched env whose methods that talk to envs are coroutine methods, also if its own are not.

    Attributes:
        env: The batched env.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if not awaited(name):
            return getattr(self.env, name)
        return functools.partial(_call, getattr(self.env, name))

    def __getitem__(self, index: Any) -> Driver:
        return Driver(self.env[index])

    def __len__(self) -> int:
        return len(self.env)

    def __iter__(self) -> Iterator[Driver]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return repr(self.env)

    @property
    def _is_async(self) -> bool:
        return inspect.iscoroutinefunction(getattr(type(self.env), "step", None))

    async def ask(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The result of a method of the envs, from each of them."""
        if self._is_async:
            return list(await self.env.call(name, *args, **kwargs))
        return list(await call(lambda: getattr(self.env, name)(*args, **kwargs)))

    async def read(self, name: str) -> list[Any]:
        """An attribute of the envs, from each of them."""
        if self._is_async:
            return list(await self.env.get_attr(name))
        return list(await call(lambda: getattr(self.env, name)))


async def _call(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    grad = torch.is_grad_enabled()  # which is a thread's own

    def run() -> Any:
        with torch.set_grad_enabled(grad):
            return method(*args, **kwargs)

    return await call(run)


@dataclass(frozen=True)
class TorchFace:
    """A class of batched envs, and how the tests want it.

    Attributes:
        name: "async-..." for the async ones.
        class_name: The class, by its name in `library`.
        processes: 0 for none, None for one per env; with two, one of them has several envs whatever their number.
        options: What the constructor is always given.
        library: Whose class it is.
    """

    name: str
    class_name: str
    processes: int | None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    library: Library = AIOENVS

    @property
    def cls(self) -> Any:
        """The class itself."""
        return getattr(self.library, self.class_name)

    @property
    def toys(self) -> Any:
        """The module that has `CountingEnv` and so on, of the same library."""
        return self.library.toys

    @property
    def is_async(self) -> bool:
        return self.class_name.startswith("Async")

    @property
    def in_processes(self) -> bool:
        return self.processes != 0

    @property
    def keeps_grad(self) -> bool:
        """Whether gradients flow through its envs."""
        return self.class_name in ("SerialEnv", "AsyncSerialEnv")

    def but(self, **options: Any) -> TorchFace:
        """The same face with more options."""
        return dataclasses.replace(self, options={**self.options, **options})

    def make(self, num_workers: int, create_env_fn: Any, create_env_kwargs: Any = None, **options: Any) -> Any:
        """A batched env that is not started; without the options that mean nothing to this face."""
        if self.in_processes:
            options.setdefault("num_processes", num_hosts(self.processes, num_workers))
        else:
            options = {name: value for name, value in options.items() if name not in PROCESS_OPTIONS}
        if self.library is not AIOENVS:
            options = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
        if create_env_kwargs is not None:
            options["create_env_kwargs"] = create_env_kwargs
        return self.cls(num_workers, create_env_fn, **self.options, **options)

    @asynccontextmanager
    async def open(
        self, num_workers: int, create_env_fn: Any, create_env_kwargs: Any = None, **options: Any
    ) -> AsyncIterator[Driver]:
        """A driver of a batched env that is started, and closed at the end."""
        driver = Driver(self.make(num_workers, create_env_fn, create_env_kwargs, **options))
        await driver.start()
        try:
            yield driver
        finally:
            if not driver.is_closed:
                await driver.close()

    def __repr__(self) -> str:
        return self.name


def _has_backend(backend: str) -> bool:
    """Whether there is such a backend yet."""
    try:
        AIOENVS.ParallelEnv(1, dict, backend=backend)
    except (ImportError, TypeError, ValueError):
        return False
    return True


def _params(faces: Sequence[TorchFace], *marks: Any) -> tuple[Any, ...]:
    return tuple(pytest.param(face, id=face.name, marks=marks) for face in faces)


def _only(params: Sequence[Any], condition: Callable[[TorchFace], bool]) -> tuple[Any, ...]:
    return tuple(param for param in params if condition(param.values[0]))


OWN = (
    *_params(
        [
            TorchFace("serial", "SerialEnv", 0),
            TorchFace("async-serial", "AsyncSerialEnv", 0),
            TorchFace("packed", "ParallelEnv", 2),
            TorchFace("one-each", "ParallelEnv", None),
            TorchFace("async-packed", "AsyncParallelEnv", 2),
            TorchFace("async-one-each", "AsyncParallelEnv", None),
        ]
    ),
    *_params(
        [
            TorchFace("thread", "ParallelEnv", 0, {"backend": "thread"}),
            TorchFace("async-thread", "AsyncParallelEnv", 0, {"backend": "thread"}),
        ],
        pytest.mark.skipif(not _has_backend("thread"), reason="there is no thread backend yet"),
    ),
)
TORCHRLS = _params(
    [
        TorchFace("torchrl-serial", "SerialEnv", 0, library=TORCHRL),
        TorchFace("torchrl-parallel", "ParallelEnv", None, library=TORCHRL),
    ],
    *TORCHRL_MARKS,
)
EVERY_TORCH_FACE = (*OWN, *TORCHRLS)
TWINS = ("one-each", "async-packed", "async-thread")  # what they differ in, others have too
ASYNC_TORCH_FACES = _only(OWN, lambda face: face.is_async and face.name not in TWINS)
OWN_TORCH_FACES = _only(OWN, lambda face: face.name not in (*TWINS, "async-serial"))
TORCH_FACES = (*OWN_TORCH_FACES, TORCHRLS[0])
PROCESS_TORCH_FACES = _only(OWN_TORCH_FACES, lambda face: face.in_processes)
GRAD_TORCH_FACES = _only((*OWN, TORCHRLS[0]), lambda face: face.keeps_grad)


def faces_called(*names: str) -> tuple[Any, ...]:
    """The faces of these names, as parameters."""
    return _only(EVERY_TORCH_FACE, lambda face: face.name in names)


# TorchRL's ParallelEnv takes seconds to start, and repeats its SerialEnv
over_every_torch_face = pytest.mark.parametrize("face", EVERY_TORCH_FACE[:-1])
over_torch_faces = pytest.mark.parametrize("face", TORCH_FACES)
over_own_torch_faces = pytest.mark.parametrize("face", OWN_TORCH_FACES)
