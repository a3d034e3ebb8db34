"""The adapter for vector envs: Gymnasium's, those of EnvPool, and whatever else has their interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import PLAIN_RULES, GymRules, ResetArguments
from aioenvs.engine.adapters.copying import received
from aioenvs.engine.adapters.gymnasium import ACTION, DONE_KEYS, REWARD_KEY, GymAdapter, refuse_collisions
from aioenvs.engine.adapters.spaces import (
    Alike,
    Numbers,
    SpaceLeaf,
    children,
    conform,
    flatten,
    observation_key,
    reader,
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
)
from aioenvs.engine.worker.random_streams import Generators, seed_chain
from aioenvs.errors import SpecMismatchError, reset_needed, shown

__all__ = ["VectorAdapter", "VectorReset", "is_vector_env"]

RESET_MASK = "reset_mask"  # Gymnasium's name of the option that says which parts a reset is for
FINAL_OBSERVATIONS = ("final_obs", "final_observation")


class VectorReset(StrEnum):
    """The treatment of parts whose episode is over by a vector env itself; the words are Gymnasium's."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"


def is_vector_env(env: Any) -> bool:
    """Whether an env is a pool of EnvPool, or has the interface of Gymnasium's vector envs."""
    return _is_pool(env) or (hasattr(env, "num_envs") and hasattr(env, "single_observation_space"))


def _is_pool(env: Any) -> bool:
    """Whether an env is a pool of EnvPool; early ones have not got all of Gymnasium's interface."""
    return _is_from(env, "envpool")


class _Target(NamedTuple):
    """One leaf of the observations, in each region of one half.

    Attributes:
        key: Its key.
        path: The keys and indices that lead to it in the env's own observations.
        following: Its row of what comes out of a step.
        root: Its row of what the next step begins with.
    """

    key: Key
    path: tuple[Any, ...]
    following: NDArray[Any]
    root: NDArray[Any]

    def find(self, observations: Any) -> Any:
        """Return the values of this leaf among observations."""
        for name in self.path:
            observations = observations[name]
        return observations


class _Half(NamedTuple):
    """The rows of one of the two halves: leaves, the rewards `(k,)`, and flags `(k,)` of a step and of the root."""

    targets: Sequence[_Target]
    rewards: NDArray[Any]
    done: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    root_flags: Sequence[NDArray[np.bool_]]


class VectorAdapter(GymAdapter):
    """Drives a vector env as one env whose batch size is its number of parts.

    Each leaf is written to its row at once. With `step_and_maybe_reset` parts whose episode is over begin the next one
    in the same command, and `next` keeps their true final observations, in each of Gymnasium's modes: with `SAME_STEP`
    the env has done so itself, with the others it is asked to, by the option `reset_mask`. An env that does neither
    takes no part in that command: its steps reset such parts as it sees fit.

    Args:
        env: The env.
        env_index: Its index.
        generators: See `GymRows`.
        rules: See `GymRows`.
    """

    def __init__(
        self, env: Any, env_index: int, *, generators: Generators = Generators.LEFT, rules: GymRules = PLAIN_RULES
    ) -> None:
        self._is_pool = _is_pool(env)
        self._count = len(env) if self._is_pool else int(env.num_envs)
        of = "" if self._is_pool else "single_"
        self._space, self._action_space = (
            getattr(env, f"{of}{kind}_space", None) for kind in ("observation", "action")
        )
        base = getattr(env, "unwrapped", env)
        self._lists_seeds = _is_from(base, "gymnasium.vector")  # SyncVectorEnv and AsyncVectorEnv
        self._mode = _mode_of(env)
        self._takes_masks = self._is_pool or self._lists_seeds or self._mode is VectorReset.DISABLED
        super().__init__(env, env_index, generators=generators, rules=rules)
        if self._is_pool and getattr(base, "is_async", False):
            raise self._refusal(
                "gives the results of some of its parts at a time (batch_size < num_envs), so that single ones may "
                "never come: make it with batch_size=num_envs"
            )
        # Observations of episodes that the env began by itself, of parts that were not asked to by a command yet.
        self._unclaimed: dict[Key, NDArray[Any]] = {}
        self._is_unclaimed = np.zeros(self._count, np.bool_)

    def _refusal(self, why: str) -> SpecMismatchError:
        return SpecMismatchError(f"{self._who} ({type(self.env).__name__}, num_envs={self._count}) {why}")

    # -- what it is -------------------------------------------------------------------------------------

    def _described(self) -> EnvMetadata:
        env, count = self.env, self._count
        for name, found in (("single_observation_space", self._space), ("single_action_space", self._action_space)):
            if not hasattr(found, "sample"):
                raise self._refusal(f"must have a Gymnasium space as its {name}, found {shown(found)}")
        if count < 1:
            raise self._refusal(f"must have at least one part, found num_envs={count}")
        observation = flatten(self._space, observation_key(self._space))
        action = flatten(self._action_space, ACTION)
        for leaf in (*observation, *action):
            if leaf.leaf is None:
                raise self._refusal(
                    f"has values of {shown(leaf.space)} at {leaf.key!r}, which have no fixed shape; expected Box, "
                    "Discrete, MultiDiscrete and MultiBinary, in Dict and Tuple, of vector envs"
                )
        outcome = [
            Leaf(REWARD_KEY, self._rules.reward, (count, 1)),
            *(Leaf(key, "|b1", (count, 1)) for key in DONE_KEYS),
        ]
        refuse_collisions(self._who, observation, [leaf.key for leaf in outcome])
        fixed = tuple(self._all(observation))
        nothing: dict[Key, Any] = {}
        return EnvMetadata(
            name=f"{type(env).__name__}(num_envs={count})",
            leaves={
                INPUT: tuple(self._all(action)),
                NEXT: (*fixed, *outcome),
                ROOT: (*fixed, *outcome[1:]),
            },
            objects={INPUT: nothing, NEXT: nothing, ROOT: nothing},
            reward_keys=(REWARD_KEY,),
            done_keys=DONE_KEYS[:1],
            specs={
                "observation": {leaf.key: Alike((leaf.space,) * count) for leaf in observation},
                "action": {leaf.key: Alike((leaf.space,) * count) for leaf in action},
                "reward": {REWARD_KEY: Numbers(self._rules.reward, (count, 1))},
                "done": {key: Numbers("|b1", (count, 1)) for key in DONE_KEYS},
                "batch_size": (count,),
                "autoreset": (self._mode, self._takes_masks),
            },
            takes_root=True,
            num_seeds=count if self._lists_seeds else 1,
        )

    def _all(self, leaves: Sequence[SpaceLeaf]) -> Iterator[Leaf]:
        for found in leaves:
            assert found.leaf is not None
            yield Leaf(found.key, found.leaf.dtype, (self._count, *found.leaf.shape))

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        self._row = row
        self._where = arrays[STATUS][LATEST].data
        self._read_action = reader(self._action_space, ACTION, arrays[INPUT], self._objects[INPUT], row)
        self._vector_halves = [self._vector_half(half, arrays) for half in HALVES]
        self.take_half(0)

    def _vector_half(self, half: Mapping[str, str], arrays: Mapping[str, Arrays]) -> _Half:
        following, root = arrays[half[NEXT]], arrays[half[ROOT]]
        space = self._space
        targets = [
            _Target(key, path, following[key][self._row], root[key][self._row])
            for key, path in _paths(space, observation_key(space))
        ]
        flags, root_flags = ([region[key][self._row, :, 0] for key in DONE_KEYS] for region in (following, root))
        return _Half(targets, following[REWARD_KEY][self._row, :, 0], flags[0], flags[1], flags[2], root_flags)

    def take_half(self, write_half: int) -> None:
        self._number, self._is_whole = write_half & 1, bool(write_half & WRITE_ROOT)
        self._half = self._vector_halves[self._number]

    # -- resets -----------------------------------------------------------------------------------------

    def reset(self, arguments: ResetArguments) -> None:
        kwargs = received(dict(arguments.kwargs))
        mask = self._mask_of(arguments)
        if mask is None:
            self._begin_all(kwargs)
        else:
            self._keep_others(arguments.given)
            if any(value is not None for value in kwargs.values()) or self._seed is not None:
                self._begin_some(mask, kwargs)
            elif (self._is_unclaimed >= mask).all():
                self._take_begun(mask)
            else:
                self._begin_some(mask, {})
        self._where[self._row] = IN_ROOT + 2 * self._number
        self._seed = None
        self.needs_reset = False

    def _keep_others(self, given: Sequence[Key]) -> None:
        """Have the root say what the env said last, but for the keys that the caller has given."""
        where = int(self._where[self._row])
        latest, in_next = self._vector_halves[where >> 1], where & 1 == IN_NEXT
        for target, known in zip(self._half.targets, latest.targets, strict=True):
            if target.key not in given:
                target.root[...] = known.following if in_next else known.root
        flags = (latest.done, latest.terminated, latest.truncated) if in_next else latest.root_flags
        for key, root, known_flags in zip(DONE_KEYS, self._half.root_flags, flags, strict=True):
            if key not in given:
                root[...] = known_flags

    def _mask_of(self, arguments: ResetArguments) -> NDArray[np.bool_] | None:
        """Return which parts a reset is for; None for all."""
        for value in arguments.objects.values():
            mask = np.asarray(value, np.bool_).reshape(-1)
            if mask.size == self._count and not mask.all():
                return mask
        return None

    def _seeded(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the env's own reset, with a seed for each part where it takes a list."""
        seed = kwargs.get("seed")
        if isinstance(seed, list):
            kwargs = {**kwargs, "seed": next(each for each in seed if each is not None)}
        given = dict(self._before_reset(kwargs))
        if self._is_pool:
            if given.get("seed") is not None:
                raise ValueError(
                    f"{self._who} is a pool of EnvPool, whose seeds are fixed when it is made; expected none in a "
                    f"reset, found {given['seed']!r}: give it to the factory, as in envpool.make_gymnasium(..., seed=7)"
                )
            return {}
        if self._lists_seeds and given.get("seed") is not None:
            given["seed"] = seed if isinstance(seed, list) else seed_chain(given["seed"], self._count)[0]
        elif isinstance(seed, list) and seed != list(range(given["seed"], given["seed"] + self._count)):
            raise ValueError(
                f"{self._who} ({type(self.env).__name__}) takes one seed for all of its parts; expected the seeds n, "
                f"n + 1, n + 2, ..., which is how vector envs understand a seed n, found {shown(seed)}"
            )
        return given

    def _begin_all(self, kwargs: Mapping[str, Any]) -> None:
        observations, infos = self._begun_by(self._seeded(kwargs))
        for target in self._half.targets:
            self._write(target.root, target, observations)
        for flags in self._half.root_flags:
            flags[...] = False
        self._is_unclaimed[:] = False
        self._note_infos(ROOT, infos)

    def _begin_some(self, mask: NDArray[np.bool_], kwargs: Mapping[str, Any]) -> None:
        """Reset these parts; in the root, the others have what their caller knows of them."""
        if not self._takes_masks:
            raise self._refusal(
                "cannot reset single parts, since it does not know the option 'reset_mask'; reset all of them, or make "
                "it with Gymnasium's SyncVectorEnv or AsyncVectorEnv (vectorization_mode='sync' or 'async')"
            )
        given = self._seeded(kwargs)
        if isinstance(given.get("seed"), list):
            given["seed"] = [seed if own else None for seed, own in zip(given["seed"], mask.tolist(), strict=True)]
        if self._is_pool:
            given["env_id"] = np.flatnonzero(mask).astype(np.int32)
        else:
            given["options"] = {**(given.get("options") or {}), RESET_MASK: mask}
        observations, infos = self._begun_by(given)
        self._write_some(ROOT, observations, mask)
        for flags in self._half.root_flags:
            flags[mask] = False
        self._is_unclaimed &= ~mask
        self._note_infos(ROOT, _scattered(infos, mask) if self._is_pool else infos)

    def _begun_by(self, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        result = self.env.reset(**kwargs) if self._streams is None else self._streams.run(self.env.reset, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._bad_result("reset must return (observations, infos)", result)
        return result

    def _take_begun(self, mask: NDArray[np.bool_]) -> None:
        """Begin, for the caller, episodes that the env has begun by itself."""
        for target in self._half.targets:
            target.root[mask] = self._unclaimed[target.key][mask]
        for flags in self._half.root_flags:
            flags[mask] = False
        self._is_unclaimed &= ~mask

    # -- steps ------------------------------------------------------------------------------------------

    def step(self, maybe_reset: bool) -> bool:
        if maybe_reset and not (self._takes_masks or self._mode is VectorReset.SAME_STEP):
            raise self._refusal(
                "begins the next episode of a part with the step after its end, and cannot be told to do so at once; "
                "take plain steps, of which that one is the reset of the part, or make the env with "
                "autoreset_mode=SAME_STEP or DISABLED"
            )
        if self.needs_reset:
            raise reset_needed(self._who)
        self.needs_reset = True  # until the outcome has come
        action = self._read_action()
        if self._streams is None or self.generator is not None:
            result = self.env.step(action)
        else:
            result = self._streams.run(self.env.step, action)
            if self._streams is self._trial:
                self._settle()
        done = self._take_step(result, maybe_reset)
        self.needs_reset = False
        return done

    def _take_step(self, result: Any, maybe_reset: bool) -> bool:
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._bad_result("step must return (observations, rewards, terminations, truncations, infos)", result)
        observations, rewards, terminated, truncated, infos = result
        half = self._half
        self._is_unclaimed[:] = False
        for target in half.targets:
            self._write(target.following, target, observations)
        if type(rewards) is np.ndarray and rewards.dtype == self._reward_type and rewards.shape == (self._count,):
            half.rewards[...] = rewards
        else:
            half.rewards[...] = conform(rewards, self._reward_type, (self._count,), REWARD_KEY, self._who)
        half.terminated[...] = self._flags("terminations", terminated)
        half.truncated[...] = self._flags("truncations", truncated)
        done = np.logical_or(half.terminated, half.truncated, out=half.done)
        any_done = bool(done.any())
        if any_done and self._mode is VectorReset.SAME_STEP:
            self._keep_begun(observations, infos, done.copy())
        self._where[self._row] = IN_NEXT + 2 * self._number
        self._note_infos(NEXT, infos)
        if any_done and maybe_reset:
            self._begin_finished(done.copy())
        elif self._is_whole:
            for target in half.targets:
                target.root[...] = target.following
        return any_done

    def _keep_begun(self, observations: Any, infos: Any, done: NDArray[np.bool_]) -> None:
        """Set apart what the env has begun by itself, and give `next` the true final observations."""
        finals = next((infos[name] for name in FINAL_OBSERVATIONS if name in infos), None)
        if finals is None:
            raise self._refusal(
                "resets parts within the step that ends their episode, and says nothing of their final observations; "
                f"expected these in its infos at {FINAL_OBSERVATIONS[0]!r}, found {sorted(map(str, infos))}"
            )
        self._unclaimed = {target.key: target.following.copy() for target in self._half.targets}
        self._is_unclaimed = done
        if isinstance(finals, np.ndarray) and finals.dtype == object:
            for part in np.flatnonzero(done).tolist():
                for target in self._half.targets:
                    value, row = target.find(finals[part]), target.following
                    row[part] = conform(value, row.dtype, row.shape[1:], target.key, self._who)
        else:
            self._write_some(NEXT, finals, done)

    def _begin_finished(self, done: NDArray[np.bool_]) -> None:
        """Begin the next episode of parts whose episode is over; the others go on in the root."""
        for target in self._half.targets:
            target.root[...] = target.following
        for flags in self._half.root_flags:
            flags[...] = False
        if self._mode is VectorReset.SAME_STEP:
            self._take_begun(done)
            self._note_infos(ROOT, {})  # they are among those of the step
        elif done.all():
            self._begin_all({})
        else:
            self._begin_some(done, {})
        self._where[self._row] = IN_ROOT + 2 * self._number

    # -- values -----------------------------------------------------------------------------------------

    def _write(self, row: NDArray[Any], target: _Target, observations: Any) -> None:
        """Write the values of a leaf to all parts."""
        value = self._found(target, observations)
        if type(value) is not np.ndarray or value.shape != row.shape or value.dtype != row.dtype:
            value = conform(value, row.dtype, row.shape, target.key, self._who)
        row[...] = value

    def _write_some(self, region: str, observations: Any, mask: NDArray[np.bool_]) -> None:
        """Write the values of some parts, of observations of all parts or of just these."""
        count = int(mask.sum())
        for target in self._half.targets:
            row = target.root if region == ROOT else target.following
            value = np.asarray(self._found(target, observations))
            if len(value) == self._count:
                value = value[mask]
            row[mask] = conform(value, row.dtype, (count, *row.shape[1:]), target.key, self._who)

    def _found(self, target: _Target, observations: Any) -> Any:
        try:
            return target.find(observations)
        except (KeyError, IndexError, TypeError) as error:
            raise SpecMismatchError(
                f"{self._who}: expected observations with a value at {target.path!r}, found {shown(observations)}"
            ) from error

    def _flags(self, name: str, values: Any) -> NDArray[np.bool_]:
        flags = np.asarray(values)
        if flags.shape != (self._count,) or flags.dtype.kind not in "biu":
            raise SpecMismatchError(
                f"{self._who}: expected {self._count} bools as {name}, found {flags.dtype} of shape {flags.shape}"
            )
        return flags.astype(np.bool_, copy=False)

    def _note_infos(self, region: str, infos: Any) -> None:
        if self._reports_infos:
            self._note(region, infos)


def _is_from(env: Any, package: str) -> bool:
    """Whether a class of an env is one of a package's."""
    return any(
        f"{cls.__module__}.".startswith(f"{package}.") and cls.__name__ != "VectorEnv" for cls in type(env).__mro__
    )


def _mode_of(env: Any) -> VectorReset:
    """Return the mode of a vector env; one that says nothing has that which was the only one once."""
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode", VectorReset.NEXT_STEP)
    return VectorReset(getattr(mode, "value", mode))


def _scattered(infos: Mapping[str, Any], mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return infos of some parts, as EnvPool has them, as infos of all with a mask, as Gymnasium has them."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        if isinstance(value, Mapping):
            found[key] = _scattered(value, mask)
        elif isinstance(value, np.ndarray) and len(value) == mask.sum():
            found[key] = np.zeros((len(mask), *value.shape[1:]), value.dtype)
            found[key][mask] = value
        else:
            found[key] = value
        found[f"_{key}"] = mask
    return found


def _paths(space: Any, key: Key, path: tuple[Any, ...] = ()) -> Iterator[tuple[Key, tuple[Any, ...]]]:
    """The leaves of a space that stands at a key, each with the path to its values."""
    members = children(space)
    if members is None:
        yield key, path
        return
    for name, child in members:
        yield from _paths(child, (*key, str(name)), (*path, name))
