"""Which modules the envs' factories will need, so that the process behind the workers imports them once for all."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

__all__ = ["modules_to_preload"]

TORCH = ("torch", "tensordict", "aioenvs.envs.through")
PRELOADED = {  # what comes with which package
    **dict.fromkeys(("torch", "tensordict", "torchrl"), TORCH),
    "stable_baselines3": ("torch", "stable_baselines3"),
}
PLAIN_PACKAGES = frozenset(("gymnasium", "numpy", "cloudpickle"))
TORCH_MODULES = ("aioenvs.envs", "aioenvs.specs", "aioenvs.batched", "aioenvs.testing")


def modules_to_preload(factories: Iterable[Any]) -> tuple[str, ...]:
    """What is worth importing before workers are forked; never a module of the user's own.

    It is a guess, by what the factories refer to: a worker imports what turns out to be missing.

    Args:
        factories: Callables, or what `gymnasium.make` takes.
    """
    distinct = list({id(factory): factory for factory in factories}.values())
    modules: list[str] = []
    if "gymnasium" in sys.modules or any(not callable(factory) for factory in distinct):
        modules.append("gymnasium")
    for found in dict.fromkeys(_torch_behind(factory) for factory in distinct if callable(factory)):
        modules.extend(module for module in found if module not in modules)
    return tuple(modules)


class _FoundTorch(Exception):
    """A module that needs torch: what to preload for it."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        super().__init__(modules)
        self.modules = modules


def _torch_behind(factory: Any) -> tuple[str, ...]:
    """What to preload for a factory that refers to torch; nothing for another."""
    try:
        _Scout(io.BytesIO()).dump(factory)
    except _FoundTorch as found:
        return found.modules
    except Exception:  # whoever pickles it in earnest says so
        return ()
    return ()


class _Scout(cloudpickle.Pickler):  # type: ignore[misc]
    """Goes where a pickle of the factory goes, and on through the functions that a pickle only names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._seen: set[int] = set()

    def persistent_id(self, thing: Any) -> None:
        self._examine(thing)

    def _examine(self, thing: Any) -> None:
        if isinstance(thing, ModuleType):
            _refuse_torch(thing.__name__)
        else:
            for base in (thing if isinstance(thing, type) else type(thing)).__mro__:
                _refuse_torch(base.__module__)
        if isinstance(thing, FunctionType) and id(thing) not in self._seen and not _is_plain(thing.__module__):
            self._seen.add(id(thing))
            self._examine_names(_names(thing.__code__), thing.__globals__)

    def _examine_names(self, names: set[str], known: Mapping[str, Any]) -> None:
        """Look at what a function refers to, by its global names, or imports in its body."""
        for name in names:
            _refuse_torch(name)
        for name in names:
            found = known.get(name, sys.modules.get(name))
            if isinstance(found, ModuleType):
                for attribute in names:
                    self._examine(_attribute(found, attribute))
            self._examine(found)


def _attribute(module: ModuleType, name: str) -> Any:
    """What a module has at a name; of this package, which loads late, the module that it is in."""
    if module.__name__ == "aioenvs":
        return ModuleType(module.home_of(name))
    return module.__dict__.get(name)


def _names(code: CodeType) -> set[str]:
    """The global names in a function and in those that it contains."""
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _is_plain(module: str | None) -> bool:
    """Whether functions of a module are known not to need torch, whatever they refer to."""
    return module is None or module.partition(".")[0] in PLAIN_PACKAGES


def _refuse_torch(module: str) -> None:
    """Raise `_FoundTorch` for a module that needs torch."""
    package = module.partition(".")[0]
    if package in PRELOADED:
        raise _FoundTorch(PRELOADED[package])
    if module.startswith(TORCH_MODULES):
        raise _FoundTorch(TORCH)
