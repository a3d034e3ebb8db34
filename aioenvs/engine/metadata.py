"""What an env says of itself: its leaves, and the spaces behind them. Pure; sent from worker to parent once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aioenvs.engine.layout import Key, Leaf
from aioenvs.errors import SpecMismatchError

__all__ = ["ACTION", "DONE_KEYS", "NEXT", "REWARD_KEY", "ROOT", "EnvMetadata", "agree", "find_collision"]

ACTION = "action"
NEXT = "next"
ROOT = "root"
REWARD_KEY: Key = ("reward",)
DONE_KEYS: tuple[Key, ...] = (("done",), ("terminated",), ("truncated",))


@dataclass(frozen=True)
class EnvMetadata:
    """The description of one env.

    Attributes:
        name: How the env calls itself, for messages.
        leaves: Fixed-shape leaves by region: `action` goes in; `next` comes out of a step; `root` out of a reset.
        objects: Keys, by region, of values that have no fixed shape and travel pickled behind the frames.
        spaces: The non-container spaces behind observation and action leaves, by region (`root`, `action`) and key.
    """

    name: str
    leaves: dict[str, tuple[Leaf, ...]]
    objects: dict[str, tuple[Key, ...]]
    spaces: dict[str, dict[Key, Any]]


def agree(metadata: Sequence[EnvMetadata], envs: Sequence[int], expected: EnvMetadata) -> None:
    """Check that all envs of a batch say the same of themselves.

    Args:
        metadata: What some envs say.
        envs: Their indices.
        expected: What env 0 says.

    Raises:
        SpecMismatchError: If two envs differ, naming the first such env and key.
    """
    for env, found in zip(envs, metadata, strict=True):
        if found is not expected:
            for region, spaces in expected.spaces.items():
                _compare(env, region, spaces, found.spaces[region])


def _compare(env: int, region: str, expected: dict[Key, Any], found: dict[Key, Any]) -> None:
    kind = "action" if region == ACTION else "observation"
    if expected.keys() != found.keys():
        raise SpecMismatchError(
            f"env {env} has the {kind} keys {sorted(found)!r}, while env 0 has {sorted(expected)!r}; "
            "all envs of a batch must have the same spaces"
        )
    for key, space in expected.items():
        if space != found[key]:
            raise SpecMismatchError(
                f"env {env} has {found[key]!r} at the {kind} key {key!r}, while env 0 has {space!r}; "
                "all envs of a batch must have the same spaces"
            )


def find_collision(observation: Sequence[Key], reserved: Sequence[Key]) -> Key | None:
    """The first observation key that hides, or is hidden by, a reserved one."""
    for key in observation:
        for other in reserved:
            if key[: len(other)] == other or other[: len(key)] == key:
                return key
    return None
