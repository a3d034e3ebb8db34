"""Errors of the commands: exit codes, and messages for a user whose wish cannot be fulfilled."""

from __future__ import annotations

import os
import sys

from aioenvs.registry import find_spec

__all__ = ["EXIT_FAILURE", "EXIT_INTERRUPTED", "EXIT_USAGE", "CommandError", "check_env_id", "describe_failure"]

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
