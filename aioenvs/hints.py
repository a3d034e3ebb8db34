"""Hints at mistakes: misspelt keyword arguments, plain calls taken for coroutines, classes of another library.

Pure: no I/O, no asyncio.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from aioenvs.errors import shown

__all__ = [
    "FOR_TORCHRL",
    "OWN",
    "Instead",
    "check_keywords",
    "describe",
    "hint_at",
    "hints_at_keywords",
    "keywords_of",
    "lacking",
    "meant",
    "no_writeback",
    "not_for_transforms",
    "passed_on",
    "signed_as",
]


CALLED = ("__iter__", "__aiter__")  # of these, the interpreter drops an error of the look-up, but not one of the call


class WrongStatementError(TypeError, AttributeError):
    """The error for a statement of the wrong kind; for `hasattr` the method is missing, but for those in `CALLED`."""


class Instead:
    """A method that a class does not have, and what to use instead of the statement that looks for it.

    Type checkers refuse the statement, since this can not be called.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> None:
        if instance is None:
            return cast(None, self)
        if self._name in CALLED:
            return cast(None, functools.partial(self._refuse, instance))
        self._refuse(instance)

    def _refuse(self, instance: Any) -> NoReturn:
        raise WrongStatementError(f"{type(instance).__name__} {self._advice}")


def describe(value: Any) -> str:
    """Return a description of a value in place of another, with a hint where it was not awaited."""
    found = f"the coroutine of {value.__qualname__}" if inspect.iscoroutine(value) else type(value).__name__
    return f"{found}, which has to be awaited" if inspect.isawaitable(value) else found


def no_writeback(env: Any, index: Any, value: Any) -> NoReturn:
    """The `__setitem__` of a batch: its envs keep their places.

    Raises:
        NotImplementedError: Always, as TorchRL's do for envs that cannot take over the state of another one.
    """
    raise NotImplementedError(
        f"{type(env).__name__}[{shown(index)}] = ...: batches do not support snapshot writeback, since envs have no "
        "state that all of them could take over; set_attr and load_state_dict change what they have"
    )


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
    """Return the name that the caller knows: of a constructor, the class; of a method, the class, too."""
    if function.__name__ == "__init__" and args:
        return type(args[0]).__name__
    _, dot, _ = function.__qualname__.rpartition(".")
    return f"{type(args[0]).__name__}.{function.__name__}" if dot and args else function.__name__


FOR_TORCHRL = (
    "TorchRL's transforms, collectors and checks take the ParallelEnv and SerialEnv of aioenvs.integrations.torchrl"
)
FOR_GYMNASIUM = "the vector env for Gymnasium is aioenvs.integrations.gymnasium.AioVectorEnv"
FOR_SB3 = "the VecEnv for stable-baselines3 is aioenvs.integrations.sb3.AioVecEnv"

ASKED_FOR = {
    FOR_TORCHRL: (
        *("_has_dynamic_specs", "_simple_done", "_step_mdp", "_supports_set_state"),
        *("append_transform", "insert_transform", "register_gym", "set_missing_tolerance", "transform"),
        *("batch_size", "device", "rand_action", "rollout", "step_and_maybe_reset"),
        *("action_spec", "input_spec", "observation_spec", "output_spec", "reward_spec"),
    ),
    FOR_GYMNASIUM: (
        *("call_async", "call_wait", "reset_async", "reset_wait", "step_async", "step_wait"),
        *("num_envs", "single_action_space", "single_observation_space"),
    ),
    FOR_SB3: (
        *("env_is_wrapped", "env_method", "get_images", "has_attr", "reset_infos", "seed", "set_options"),
        *("num_envs", "step_async", "step_wait"),
    ),
}


def hint_at(name: str) -> str:
    """Return the hint for a missing attribute that one of the libraries asks for; else nothing."""
    return "".join(f"; {hint}" for hint, names in ASKED_FOR.items() if name in names)


def lacking(owner: Any, name: str, hint: str = "") -> AttributeError:
    """The error for an attribute that an object does not have, with what there is to say of it besides."""
    return AttributeError(
        f"{type(owner).__name__!r} object has no attribute {name!r}{hint}{hint_at(name)}", name=name, obj=owner
    )


def _refuse(env: Any, value: Any) -> NoReturn:
    raise TypeError(f"{shown(env)} is no env of TorchRL's: {FOR_TORCHRL}")


not_for_transforms = property(None, _refuse)
"""The `_inplace_update` of what is no env of TorchRL's: a `TransformedEnv` sets it in what it is put around."""
