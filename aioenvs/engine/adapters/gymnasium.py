"""Adapters for envs with Gymnasium's `reset` and `step`, plain ones and coroutine functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from aioenvs.engine.adapters.base import FINAL, INFO, PLAIN_RULES, Attribute, Call, GymRules, ResetArguments, at_path
from aioenvs.engine.adapters.copying import copied, received, received_dict
from aioenvs.engine.adapters.spaces import (
    Objects,
    Reader,
    SpaceLeaf,
    Writer,
    flatten,
    is_as_read,
    observation_key,
    reader,
    writer,
)
from aioenvs.engine.layout import (
    HALVES,
    IN_NEXT,
    IN_ROOT,
    INPUT,
    LATEST,
    NEXT,
    ROOT,
    STATUS,
    WRITE_ROOT,
    Arrays,
    EnvMetadata,
    Key,
    Leaf,
    find_collision,
)
from aioenvs.engine.worker.random_streams import Generators, NumpyStream, TrialStreams, as_python
from aioenvs.errors import SpecMismatchError, reset_needed, shown

__all__ = [
    "ACTION",
    "DONE_KEYS",
    "MAX_DEPTH",
    "METHODS",
    "REWARD_KEY",
    "CoroutineAdapter",
    "GymAdapter",
    "GymRows",
    "check_ends",
    "endless_info",
    "has_coroutines",
    "refuse_collisions",
    "refuse_coroutines",
    "refuse_generators",
]


MAX_DEPTH = 100  # of dicts within dicts
SHOWN = 8  # how many keys of a path


def check_ends(info: Mapping[Any, Any], who: str) -> None:
    """Refuse an info in which a dict contains itself.

    Args:
        info: What an env returned.
        who: The env, in messages.

    Raises:
        SpecMismatchError: If one does, or they are nested deeper than `MAX_DEPTH`.
    """
    left: list[tuple[Mapping[Any, Any], tuple[Any, ...], tuple[int, ...]]] = [(info, (), ())]
    while left:
        part, path, around = left.pop()
        if id(part) in around or len(path) > MAX_DEPTH:
            raise endless_info(who, path)
        around = (*around, id(part))
        left += [(value, (*path, key), around) for key, value in part.items() if isinstance(value, Mapping)]


def endless_info(who: str, path: Sequence[Any]) -> SpecMismatchError:
    """Return the error for an info in which the keys of this path lead to a dict around itself."""
    shown = ", ".join(map(repr, path[:SHOWN])) + (", ..." if len(path) > SHOWN else "")
    return SpecMismatchError(
        f"{who}: expected an info of dicts that end, found one that contains itself, or more than {MAX_DEPTH} others, "
        f"at ({shown}); leave that entry out, or make it an object that is no dict"
    )


ACTION: Key = ("action",)
REWARD_KEY: Key = ("reward",)
METHODS = ("reset", "step")
WRAPPING = ("gymnasium", "pettingzoo", "aioenvs")
DONE_KEYS: tuple[Key, ...] = (("done",), ("terminated",), ("truncated",))


class _Half(NamedTuple):
    """Where one of the two halves has what comes out of an env."""

    in_root: int
    in_next: int
    write_root: Writer
    write_next: Writer
    reward: memoryview[Any]
    done: memoryview[Any]
    terminated: memoryview[Any]
    truncated: memoryview[Any]


class GymRows:
    """The values of an env with Gymnasium's signatures, on their way from and to its rows.

    Whoever calls the env itself does so between the two halves of a reset or a step.

    Args:
        env: The env.
        env_index: Its index.
        generators: What becomes of the process's random generators, besides the one that Gymnasium gives it, when it is
            seeded.
        who: What it is called in messages; None for "env" and its index.
        rules: What is agreed about it.
    """

    def __init__(
        self,
        env: Any,
        env_index: int,
        *,
        generators: Generators = Generators.LEFT,
        who: str | None = None,
        rules: GymRules = PLAIN_RULES,
    ) -> None:
        self.env = env
        self._trial = TrialStreams(use=generators)
        self._streams = self._trial.settled()
        self.generator: Any = None
        self._who = f"env {env_index}" if who is None else who
        self._rules = rules
        self._reports_infos, self._resets_next = rules.reports_infos, rules.resets_next
        self._keeps_finals = rules.keeps_finals
        self._reward_type = np.dtype(rules.reward)
        self._reward_max = float(np.finfo(self._reward_type).max)
        self.metadata = self._described()
        self._seed: int | None = None
        self.needs_reset = False
        self._resets_now = False  # in place of the next step
        self._outcome: Objects = {}
        self._objects: dict[str, Objects] = {INPUT: {}, NEXT: self._outcome, ROOT: {}}

    @property
    def core(self) -> Any:
        """See `EnvAdapter`; what is no env of Gymnasium or PettingZoo may mean something else by `unwrapped`."""
        is_theirs = any(cls.__module__.partition(".")[0] in WRAPPING for cls in type(self.env).__mro__)
        return getattr(self.env, "unwrapped", self.env) if is_theirs else self.env

    def _described(self) -> EnvMetadata:
        """Return the metadata of the env."""
        return _describe(self.env, self._who, self._rules.reward)

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        self._row = row
        self._where = arrays[STATUS][LATEST].data
        self._read_action: Reader = reader(
            self.env.action_space, ACTION, arrays[INPUT], self._objects[INPUT], row, scalars=self._rules.scalars
        )
        self._halves = [self._half_of(number, arrays) for number in range(len(HALVES))]
        self.take_half(0)

    def _half_of(self, number: int, arrays: Mapping[str, Arrays]) -> _Half:
        space, outputs = self.env.observation_space, {region: arrays[name] for region, name in HALVES[number].items()}
        write_root, write_next = (
            writer(space, observation_key(space), outputs[region], self._objects[region], self._row, self._who)
            for region in (ROOT, NEXT)
        )
        # Views of memory take and give single numbers twice as quickly as arrays do.
        flat = (outputs[NEXT][key].reshape(-1).data for key in (REWARD_KEY, *DONE_KEYS))
        return _Half(IN_ROOT + 2 * number, IN_NEXT + 2 * number, write_root, write_next, *flat)

    def take_half(self, write_half: int) -> None:
        self._is_whole = bool(write_half & WRITE_ROOT)
        half = self._halves[write_half & 1]
        self._in_root, self._in_next, self._write_root, self._write_next = half[:4]
        self._reward, self._done, self._terminated, self._truncated = half[4:]

    def seed(self, seed: int) -> None:
        self._seed = seed
        self.generator = None  # the streams are about to begin anew

    def _before_reset(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of the env's own reset."""
        self.needs_reset, self._resets_now = True, False  # until its result has come
        if "seed" in kwargs and type(kwargs["seed"]) is not int:
            kwargs = {**kwargs, "seed": as_python(kwargs["seed"])}
        if self._seed is not None and "seed" not in kwargs:
            kwargs = {**kwargs, "seed": self._seed}
        if kwargs.get("seed") is not None:
            self._trial.seed(kwargs["seed"])
            self._settle()
        return kwargs

    def _settle(self) -> None:
        """Exchange from now on only what the env has been seen to use, if that is known by now."""
        self._streams = streams = self._trial.settled()
        self.generator = streams.own if isinstance(streams, NumpyStream) else None

    def _after_reset(self, result: Any) -> None:
        """Take what the env's own reset returned."""
        observation, info = self._begun(result)
        self._write_root(observation)
        self._where[self._row] = self._in_root
        self._in_new_episode(ROOT, info)

    def _after_renewal(self, result: Any) -> None:
        """Take the same in place of a step's outcome."""
        observation, info = self._begun(result)
        self._write_next(observation)
        for array in (self._reward, self._done, self._terminated, self._truncated):
            array[self._row] = 0
        if self._is_whole:
            self._write_root(observation)
        self._where[self._row] = self._in_next
        self._in_new_episode(NEXT, info)

    def _begun(self, result: Any) -> tuple[Any, Any]:
        """The observation and the info of a reset."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._bad_result("reset must return (observation, info)", result)
        return result

    def _in_new_episode(self, region: str, info: Any) -> None:
        if self._reports_infos:
            self._note(region, info)
        self._seed = None
        self.needs_reset = False
        if self.generator is None and isinstance(self._streams, NumpyStream):
            self.generator = self._streams.own  # of an env that began a new episode instead of one with the new seed

    def _after_step(self, result: Any) -> bool:
        """Take what the env's own step returned; True at the end of the episode."""
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._bad_result("step must return (observation, reward, terminated, truncated, info)", result)
        observation, reward, terminated, truncated, info = result
        row = self._row
        self._write_next(observation)
        fits = isinstance(reward, float) and abs(reward) <= self._reward_max
        self._reward[row] = reward if fits else self._scalar(reward)
        if type(terminated) is not bool:
            terminated = self._flag("terminated", terminated)
        if type(truncated) is not bool:
            truncated = self._flag("truncated", truncated)
        self._terminated[row] = terminated
        self._truncated[row] = truncated
        self._done[row] = done = terminated or truncated
        if self._is_whole and not done:
            self._write_root(observation)  # where no step writes the flags, which are those of a reset
        self._where[row] = self._in_next
        if self._reports_infos and (type(info) is not dict or info or self._outcome):
            self._note(NEXT, info)
        if self._keeps_finals and (done or self._outcome):
            self._keep_final(observation, done)
        self.needs_reset = False
        if done:
            self._resets_now = self._resets_next
        return done

    def _note(self, region: str, info: Any) -> None:
        """Keep an info, if there is anything in it, until the outcome goes out."""
        if not isinstance(info, dict):
            raise SpecMismatchError(f"{self._who}: expected a dict as info, found {shown(info)}")
        if info:
            if self._rules.batches_infos:
                check_ends(info, self._who)
            self._objects[region][INFO] = received_dict(info)  # the env may reuse it
        else:
            self._objects[region].pop(INFO, None)

    def _keep_final(self, observation: Any, done: bool) -> None:
        """Keep a copy of an episode's last observation until the outcome goes out, if the rows have something else."""
        self._outcome.pop(FINAL, None)
        if done and not is_as_read(self.env.observation_space, observation):
            with contextlib.suppress(Exception):  # of what cannot be copied there is what the rows have
                self._outcome[FINAL] = copied(observation)

    def _bad_result(self, expected: str, result: Any) -> SpecMismatchError:
        hint = ""
        if inspect.iscoroutine(result):
            result.close()
            hint = "; to be awaited, it has to come from an async def of the env itself, not from within a wrapper"
        return SpecMismatchError(f"{self._who}: {expected}, found {shown(result)}{hint}")

    def _flag(self, name: str, value: Any) -> bool:
        if isinstance(value, np.bool_ | int) or (isinstance(value, np.ndarray) and value.size == 1):
            return bool(value)
        raise SpecMismatchError(f"{self._who}: expected a bool as {name}, found {shown(value)}")

    def _scalar(self, reward: Any, name: str = "reward") -> float:
        """A reward of any numeric type as a float, if there is room for it; NaN and infinity are the env's to give."""
        try:
            value = float(reward.item() if isinstance(reward, np.ndarray) else reward)
        except (TypeError, ValueError) as error:
            raise self._bad_reward("a number", name, reward) from error
        except OverflowError as error:
            raise self._bad_reward(f"a number that {self._reward_type} can hold", name, reward) from error
        if abs(value) > self._reward_max and not math.isinf(value):
            raise self._bad_reward(f"a number that {self._reward_type} can hold", name, reward)
        return value

    def _bad_reward(self, expected: str, name: str, reward: Any) -> SpecMismatchError:
        return SpecMismatchError(f"{self._who}: expected {expected} as {name}, found {shown(reward)}")

    def accept(self, objects: Objects) -> None:
        self._objects[INPUT].update(received(objects))

    def objects(self, region: str) -> Objects:
        return self._objects[region]

    def _find(self, call: Call) -> tuple[str, Any]:
        """Return the kind of a call that sets nothing, and the method or the value of the attribute."""
        kind, name = call.kind, call.name
        if kind == "apply":
            return "call", self._apply
        if kind in ("state_dict", "load_state_dict"):
            if not hasattr(self.env, kind):
                return "call", _keep_nothing  # as a plain Gymnasium env does
            kind, name = "call", kind
        own = getattr(self.env, "get_wrapper_attr", None)
        return kind, at_path(own or functools.partial(getattr, self.env), name)

    def _apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(self.env, *args, **kwargs)

    def _set(self, name: str, value: Any) -> Any:
        """Set an attribute."""
        if hasattr(self.env, "get_wrapper_attr"):
            return self.env.set_wrapper_attr(name, value)
        return setattr(self.env, name, value)


class GymAdapter(GymRows):
    """Drives an env with Gymnasium's signatures: `reset(seed=, options=)` and a five-tuple from `step`."""

    def reset(self, arguments: ResetArguments) -> None:
        self._after_reset(self._begin(received(dict(arguments.kwargs))))

    def _begin(self, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the env's own reset."""
        kwargs = self._before_reset(kwargs)
        return self.env.reset(**kwargs) if self._streams is None else self._streams.run(self.env.reset, **kwargs)

    def step(self, maybe_reset: bool) -> bool:
        if self._resets_now:
            self._after_renewal(self._begin({}))
            return False
        if self.needs_reset:
            raise reset_needed(self._who)
        self.needs_reset = True  # until the outcome has come
        if self._streams is None or self.generator is not None:
            result = self.env.step(self._read_action())
        else:
            result = self._streams.run(self.env.step, self._read_action())
            if self._streams is self._trial:
                self._settle()
        done = self._after_step(result)
        if done and maybe_reset:
            self._after_reset(self._begin({}))
        return done

    def perform(self, call: Call) -> Any:
        kind, found = self._find(call)
        if kind == "get":
            return Attribute(True) if callable(found) else Attribute(False, found)
        if kind == "call":
            return (
                found(*call.args, **call.kwargs)
                if self._streams is None
                else self._streams.run(found, *call.args, **call.kwargs)
            )
        self._set(call.name, *call.args)
        return None

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def _keep_nothing(*_: Any, **__: Any) -> dict[str, Any]:
    """The state of a plain Gymnasium env."""
    return {}


def refuse_generators(env: Any, who: str) -> None:
    """Refuse methods that would return a generator.

    Raises:
        SpecMismatchError: If the env has one.
    """
    for name in METHODS:
        method = getattr(env, name, None)
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            raise SpecMismatchError(
                f"{name} of {who} ({shown(env)}) is a generator function, as it has a yield; it must return its result"
            )


def _name(env: Any) -> str:
    """Return how an env calls itself, without the address by which Python tells apart those that do not.

    Envs of one class are of one kind to whoever compares their descriptions, and the specs of a kind are made once.
    """
    kind: Any = type(env)
    says_nothing = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    return kind.__name__ if says_nothing else shown(env, str)


def _describe(env: Any, who: str, reward: str) -> EnvMetadata:
    refuse_generators(env, who)
    name = _name(env)
    for attribute in ("observation_space", "action_space"):
        space = getattr(env, attribute, None)
        if space is None or not hasattr(space, "sample"):
            raise SpecMismatchError(
                f"{who} ({name}) must have a Gymnasium space as its {attribute}, found {shown(space)}"
            )
    observation = flatten(env.observation_space, observation_key(env.observation_space))
    action = flatten(env.action_space, ACTION)
    outcome = [Leaf(REWARD_KEY, reward, (1,)), *(Leaf(key, "|b1", (1,)) for key in DONE_KEYS)]
    refuse_collisions(who, observation, [leaf.key for leaf in outcome])
    fixed = tuple(leaf.leaf for leaf in observation if leaf.leaf is not None)
    loose = dict.fromkeys(leaf.key for leaf in observation if leaf.leaf is None)
    return EnvMetadata(
        name=name,
        leaves={
            INPUT: tuple(leaf.leaf for leaf in action if leaf.leaf is not None),
            NEXT: (*fixed, *outcome),
            ROOT: (*fixed, *outcome[1:]),
        },
        objects={INPUT: dict.fromkeys(leaf.key for leaf in action if leaf.leaf is None), NEXT: loose, ROOT: loose},
        reward_keys=(REWARD_KEY,),
        done_keys=DONE_KEYS[:1],
        specs={
            "observation": {leaf.key: leaf.space for leaf in observation},
            "action": {leaf.key: leaf.space for leaf in action},
        },
    )


def refuse_collisions(who: str, observation: list[SpaceLeaf], outcome: list[Key]) -> None:
    """Refuse an observation under a key that is something else's, or around it: SpecMismatchError."""
    taken: list[Key] = [ACTION, ("next",), ("_reset",), ("_step",), ("env_index",), *outcome]
    key = find_collision([leaf.key for leaf in observation], taken)
    if key is not None:
        raise SpecMismatchError(f"{who} has an observation at {key!r}, a key that is taken; rename it in the env")


class CoroutineAdapter(GymRows):
    """Drives an env with Gymnasium's signatures whose methods may be coroutine functions, all or some of them.

    Others run while it waits, so it leaves the process's random generators alone. Where a command is cancelled at one
    of its awaits, the env needs a reset, as after any exception.

    Args:
        env: The env.
        env_index: Its index.
        rules: What is agreed about it.
    """

    def __init__(self, env: Any, env_index: int, *, rules: GymRules = PLAIN_RULES) -> None:
        super().__init__(env, env_index, rules=rules)
        self.metadata = replace(self.metadata, has_coroutines=True)

    async def reset(self, arguments: ResetArguments) -> None:
        self._after_reset(await self._begin(received(dict(arguments.kwargs))))

    async def _begin(self, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the env's own reset."""
        return await _outcome(self.env.reset(**self._before_reset(kwargs)))

    async def step(self, maybe_reset: bool) -> bool:
        if self._resets_now:
            self._after_renewal(await self._begin({}))
            return False
        if self.needs_reset:
            raise reset_needed(self._who)
        self.needs_reset = True
        result = self.env.step(self._read_action())
        if inspect.isawaitable(result):
            result = await result
        done = self._after_step(result)
        if done and maybe_reset:
            self._after_reset(await self._begin({}))
        return done

    async def perform(self, call: Call) -> Any:
        kind, found = self._find(call)
        if kind == "call":
            return await _outcome(found(*call.args, **call.kwargs))
        if kind == "get":
            return Attribute(True) if callable(found) else Attribute(False, await _outcome(found))
        await _outcome(self._set(call.name, *call.args))
        return None

    async def close(self) -> None:
        if hasattr(self.env, "close"):
            await _outcome(self.env.close())


async def _outcome(result: Any) -> Any:
    """Return the result of a method that may be a coroutine function."""
    return await result if inspect.isawaitable(result) else result


def has_coroutines(env: Any) -> bool:
    """Whether the `reset` or `step` of an env is a coroutine function."""
    return any(_is_coroutine(env, name) for name in METHODS)


def refuse_coroutines(env: Any, env_index: int) -> None:
    """Refuse coroutine functions in an env that deals in TensorDicts.

    Raises:
        SpecMismatchError: If it has one.
    """
    for name in (*METHODS, "_reset", "_step"):
        if _is_coroutine(env, name):
            raise SpecMismatchError(
                f"{name} of env {env_index} ({shown(env)}), which deals in TensorDicts, is a coroutine function; "
                "those are for envs with Gymnasium's signatures and spaces"
            )


def _is_coroutine(env: Any, name: str) -> bool:
    method = getattr(env, name, None)
    return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(type(method).__call__)
