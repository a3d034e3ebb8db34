"""Which modules the envs' factories will need, so that the process behind the workers imports them once for all."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

__all__ = ["modules_to_preload"]

TORCH = ("torch", "tensordict", "aioenvs.envs.unwrapping")
PRELOADED = {  # what comes with which package, the one that brings most first
    "torchrl": (*TORCH, "aioenvs.integrations.torchrl.worker"),
    "stable_baselines3": ("torch", "stable_baselines3"),
    "torch": TORCH,
    "tensordict": TORCH,
}
OWN = {"aioenvs.integrations.torchrl": "torchrl"} | dict.fromkeys(
    ("aioenvs.envs", "aioenvs.faces", "aioenvs.specs", "aioenvs.tensors", "aioenvs.testing"), "torch"
)
PLAIN_PACKAGES = frozenset(("gymnasium", "numpy", "cloudpickle"))


def modules_to_preload(factories: Iterable[Any]) -> tuple[str, ...]:
    """Return the modules worth importing before workers are forked; never one of the user's own.

    It is a guess, by what the factories refer to: a worker imports what turns out to be missing.

    Args:
        factories: Callables, or what `gymnasium.make` takes.
    """
    distinct = list({id(factory): factory for factory in factories}.values())
    modules: dict[str, None] = {}
    if "gymnasium" in sys.modules or any(not callable(factory) for factory in distinct):
        modules["gymnasium"] = None
    found = set().union(*(_references(factory) for factory in distinct if callable(factory)))
    for package, preloaded in PRELOADED.items():
        if package in found:
            modules |= dict.fromkeys(preloaded)
    return tuple(modules)


class _FoundMost(Exception):
    """There is nothing that could bring more."""


def _references(factory: Any) -> set[str]:
    """Which packages that need torch a factory refers to; the first one may stand for others."""
    scout = _Scout(io.BytesIO())
    try:
        scout.dump(factory)
    except Exception:  # whoever pickles it in earnest says so
        return scout.found
    return scout.found


class _Scout(cloudpickle.Pickler):  # type: ignore[misc]
    """Goes where a pickle of the factory goes, and on through the functions that a pickle only names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._seen: set[int] = set()
        self.found: set[str] = set()

    def persistent_id(self, thing: Any) -> str | None:
        """Return the stand-in for a thing in the pickle, which is thrown away: nothing of torch needs to be in it."""
        return "torch" if self._examine(thing) else None

    def _examine(self, thing: Any) -> bool:
        """Look at a thing, and at what it refers to; whether it is torch's."""
        if isinstance(thing, ModuleType):
            homes = [thing.__name__]
        else:
            homes = [base.__module__ for base in (thing if isinstance(thing, type) else type(thing)).__mro__]
        is_torch = self._note(homes)
        if isinstance(thing, FunctionType) and id(thing) not in self._seen and not _is_plain(thing.__module__):
            self._seen.add(id(thing))
            self._examine_names(_names(thing.__code__), thing.__globals__)
        return is_torch

    def _note(self, modules: Iterable[str]) -> bool:
        """Whether one of these modules is torch's, or needs it."""
        found = {package for name in modules if isinstance(name, str) and (package := _package_of(name)) is not None}
        self.found |= found
        if next(iter(PRELOADED)) in found:
            raise _FoundMost
        return bool(found)

    def _examine_names(self, names: set[str], known: Mapping[str, Any]) -> None:
        """Look at what a function refers to, by its global names, or imports in its body."""
        self._note(names)
        for name in names:
            found = known.get(name, sys.modules.get(name))
            if isinstance(found, ModuleType):
                for attribute in names:
                    self._examine(_attribute(found, attribute))
            self._examine(found)


def _attribute(module: ModuleType, name: str) -> Any:
    """Return the value of a module's name; of this package, which loads late, the module that it is in."""
    if module.__name__ == "aioenvs":
        return ModuleType(module.home_of(name))
    return module.__dict__.get(name)


def _names(code: CodeType) -> set[str]:
    """The global names in a function and in those that it contains."""
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _is_plain(module: str | None) -> bool:
    """Whether functions of a module are known not to need torch, whatever they refer to."""
    return module is None or module.partition(".")[0] in PLAIN_PACKAGES


def _package_of(module: str) -> str | None:
    """The package on account of which a module needs torch; None if it does not."""
    package = module.partition(".")[0]
    if package in PRELOADED:
        return package
    return next((behind for prefix, behind in OWN.items() if module.startswith(prefix)), None)
