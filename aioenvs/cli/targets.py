"""Targets of the commands: an id of Gymnasium's, or a callable of a module or a file."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from aioenvs.cli.errors import EXIT_USAGE, CommandError, check_env_id, describe, look_here
from aioenvs.errors import shown

__all__ = ["factory_named"]


def factory_named(target: str) -> Any:
    """Find what makes the env.

    Args:
        target: A Gymnasium id, `module:id`, or `module:factory`, where the factory may be an attribute of an attribute,
            and the module may be the path of its file, `path/to/file.py`. The working directory, or that of the file,
            is the first place where modules are looked for.

    Returns:
        The callable, or the id.

    Raises:
        CommandError: If there is no such thing.
    """
    location, colon, path = target.rpartition(":")
    if (file := target.removesuffix(":")).endswith(".py"):
        raise CommandError(f"{file!r} is a file; say which factory of it, such as {file}:make_env", EXIT_USAGE)
    module = _load(Path(location).expanduser()) if location.endswith(".py") else None
    if module is not None:
        target = f"{module.__name__}:{path}"
    if not colon or not all(part.isidentifier() for part in path.split(".")):
        check_env_id(target)
        return target
    found: Any = _import(location) if module is None else module
    for part in path.split("."):
        if not hasattr(found, part):
            return _id_instead(target, found, part)
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(f"{target!r} is {shown(found)}, which cannot be called to make an env", EXIT_USAGE)
    return found


def _import(name: str) -> ModuleType:
    look_here()
    try:
        return importlib.import_module(name)
    except Exception as error:  # importing a module may raise anything
        raise CommandError(f"cannot import {name!r}: {describe(error)}", EXIT_USAGE) from error


def _load(file: Path) -> ModuleType:
    """Import a file as Python does that runs it: by its name, from its folder, which workers know as well."""
    if not file.is_file():
        raise CommandError(f"there is no file {str(file)!r}", EXIT_USAGE)
    folder = str(file.resolve().parent)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    module = _import(file.stem)
    if (origin := getattr(module, "__file__", None)) is None or Path(origin).resolve() != file.resolve():
        raise CommandError(
            f"{str(file)!r} cannot be imported, since another module is called {file.stem!r} ({origin}); rename it",
            EXIT_USAGE,
        )
    return module


def _id_instead(target: str, holder: Any, missing: str) -> str:
    """The target as an id of Gymnasium's, or an error that says what may be meant."""
    with contextlib.suppress(CommandError):
        check_env_id(target)
        return target
    near = difflib.get_close_matches(missing, [name for name in dir(holder) if not name.startswith("_")], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    where = getattr(holder, "__name__", repr(holder))
    raise CommandError(f"{where!r} has no factory {missing!r}{hint}, and Gymnasium knows no id {target!r}", EXIT_USAGE)
