"""What a keyword argument may stand for that a function does not take. Pure."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["OWN", "check_keywords", "hints_at_keywords", "keywords_of", "meant", "passed_on", "signed_as"]

P = ParamSpec("P")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])

OWN = "{given!r} was passed on to what makes the env; did you mean {meant!r}?"
SIMILAR = 0.7  # the ratio of `difflib` from which on one name may be a slip of the other
SAME = (  # what this library and others call the same thing
    frozenset(("num_workers", "num_envs", "n_envs", "n_workers")),
    frozenset(("create_env_fn", "env_fns", "env_fn", "make_env")),
    frozenset(("create_env_kwargs", "env_kwargs")),
    frozenset(("mp_start_method", "start_method", "context")),
    frozenset(("num_processes", "num_procs", "n_procs")),
)


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that another stands for: what others call the same, or a similar one; None if there is none."""
    names = list(known)
    for group in SAME:
        if name in group and (synonyms := group.intersection(names)):
            return min(synonyms)
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=SIMILAR)), None)


def check_keywords(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keywords that a function does not take.

    Args:
        what: The function, or class, as the caller knows it.
        given: The keywords of the call.
        known: Those that it takes.

    Raises:
        TypeError: If there is another one; the message says what it may stand for.
    """
    names = dict.fromkeys(known)
    for keyword in given:
        if keyword not in names:
            hint = _hint(what, keyword, names)
            raise TypeError(f"{what}() got an unexpected keyword argument {keyword!r}; {hint}")


def _hint(what: str, keyword: str, names: Iterable[str]) -> str:
    if (near := meant(keyword, names)) is not None:
        return f"did you mean {near!r}?"
    if "create_env_kwargs" in names:
        return f"what the envs take goes into create_env_kwargs={{{keyword!r}: ...}}, and help({what}) lists the others"
    return f"help({what}) lists those that there are"


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """The names of what a function, or constructor, takes by keyword."""
    parameters = inspect.signature(function).parameters.values()
    either = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return [name for name in either if name != "self"]


@contextlib.contextmanager
def passed_on(given: Iterable[str], names: Iterable[str], hint: str) -> Iterator[None]:
    """Where what was called by these keywords fails, note which of them may have been meant for somebody else.

    Args:
        given: The keywords.
        names: Those that somebody else takes.
        hint: What to say, with `{given}` and `{meant}`.
    """
    try:
        yield
    except Exception as error:
        for keyword in given:
            if (near := meant(keyword, names)) is not None:
                error.add_note(hint.format(given=keyword, meant=near))
        raise


def hints_at_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function, or a constructor, say what a keyword that it does not take may stand for.

    Python does so for names and attributes, but not for arguments. For `help`, `inspect` and type checkers the function
    is what it was.

    Raises:
        TypeError: If the function takes any keyword.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise TypeError(f"expected a function that does not take any keyword, found {function!r}")
    names = keywords_of(function)
    known = frozenset(names)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not known.issuperset(kwargs):
            check_keywords(_called(function, args), kwargs, names)
        return function(*args, **kwargs)

    if not inspect.iscoroutinefunction(function):
        return checked

    @functools.wraps(function)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await cast(Any, checked(*args, **kwargs))

    return cast(Callable[P, R], awaited)


def signed_as(model: Callable[..., Any]) -> Callable[[Function], Function]:
    """Let a function that passes everything on show the arguments of another to `help` and `inspect`.

    They ask the `__new__` of a class first; one that takes anything would hide the arguments of the constructor.
    """

    def sign(function: Function) -> Function:
        cast(Any, function).__signature__ = inspect.signature(model)
        return function

    return sign


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """What the caller knows: of a constructor, the class; of a method, the class, too."""
    if function.__name__ == "__init__" and args:
        return type(args[0]).__name__
    _, dot, _ = function.__qualname__.rpartition(".")
    return f"{type(args[0]).__name__}.{function.__name__}" if dot and args else function.__name__
