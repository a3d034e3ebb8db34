"""Targets of the commands, ids of Gymnasium's or callables of a module or a file, and messages where there is none."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from aioenvs.errors import shown
from aioenvs.registry import find_spec

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for a process that SIGINT ended: 128 + 2


class CommandError(Exception):
    """The command cannot go on; the message is all the user needs to see."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE) -> None:
        """Keep the exit code that goes with the message."""
        super().__init__(message)
        self.exit_code = exit_code


def look_here() -> None:
    """Let imports find modules of the working directory, as they do for ``python -m``."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)


def check_env_id(env_id: str) -> None:
    """Check that Gymnasium knows an id, before anything is started.

    Args:
        env_id: A Gymnasium id, or ``module:id``. The module is imported; the working directory counts
            as one of the places to look for it, as it does for ``python -m``.

    Raises:
        CommandError: Gymnasium is not installed, the id is not registered or not well formed, or its
            module cannot be imported.
    """
    look_here()
    try:
        find_spec(env_id)
    except Exception as error:  # Gymnasium's own, or what importing a module raised
        code = EXIT_FAILURE if getattr(error, "name", None) == "gymnasium" else EXIT_USAGE
        raise CommandError(" ".join([one_line(error), *getattr(error, "__notes__", [])]), code) from error


def one_line(error: BaseException) -> str:
    """Return an exception's message on one line."""
    return " ".join(str(error).split())


def describe(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    return f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")


def describe_failure(error: BaseException) -> str:
    """Return what ended a run: the error, its cause if it has one, and the notes on where it happened."""
    lines = [describe(error)]
    if error.__cause__ is not None:
        lines.append(f"caused by {describe(error.__cause__)}")
    return "\n".join([*lines, *getattr(error, "__notes__", [])])


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
