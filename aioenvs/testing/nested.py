"""Counting envs whose entries are nested: under one key, at several depths, and different for each agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from aioenvs.specs import Bounded, Categorical, Composite, Unbounded
from aioenvs.testing.counting import EpisodicEnv, done_leaves, end_of_episode, restarted

KINDS = ("observation", "action", "reward", "done")


class NestedCountingEnv(EpisodicEnv):
    """A counting env of which some entries are nested in a TensorDict of `nested_dim` elements.

    A nested entry has the key `(name, "observation")` and so on, and the shape `(*batch_size, nested_dim, 1)`,
    the action `(*batch_size, nested_dim)`. With nested `done`, each nested element has an episode of its own.

    Args:
        max_steps: Steps until an episode terminates.
        nest: Which of "observation", "action", "reward" and "done" are nested.
        nested_dim: Last dim of the nested batch size; None for the env's own batch size.
        name: The key under which they are.
        batch_size: Any.
        device: Where all data lives.

    Raises:
        ValueError: If `nest` has another entry.

    >>> from aioenvs.testing import NestedCountingEnv
    >>> env = NestedCountingEnv(nested_dim=3, batch_size=(2,), nest=("reward", "done"))
    >>> env.action_key, env.reward_key, env.reset_keys
    ('action', ('data', 'reward'), [('data', '_reset')])
    >>> env.rand_step(env.reset())["next", "data", "reward"].shape
    torch.Size([2, 3, 1])
    """

    def __init__(
        self,
        max_steps: int = 5,
        *,
        nest: Collection[str] = KINDS,
        nested_dim: int | None = 1,
        name: str = "data",
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        if unknown := set(nest) - set(KINDS):
            raise ValueError(f"nest must be some of {KINDS}, found {sorted(unknown)!r}")
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.max_steps, self.nest, self.name = max_steps, frozenset(nest), name
        self.nested_size = torch.Size(batch_size if nested_dim is None else (*batch_size, nested_dim))
        self.register_buffer("steps", torch.zeros(*self._size("done"), 1, dtype=torch.int64, device=device))
        count = Unbounded(shape=(*self._size("observation"), 1), dtype=torch.int64, device=device)
        reward = Unbounded(shape=(*self._size("reward"), 1), device=device)
        self.observation_spec = self._spec("observation", {"observation": count})
        self.action_spec = self._spec("action", {"action": Categorical(2, shape=self._size("action"), device=device)})
        self.reward_spec = self._spec("reward", {"reward": reward})
        self.done_spec = self._spec("done", done_leaves((*self._size("done"), 1), device))

    def _size(self, kind: str) -> torch.Size:
        return self.nested_size if kind in self.nest else self.batch_size

    def _spec(self, kind: str, leaves: Mapping[str, Any]) -> Composite:
        spec = Composite(leaves, shape=self._size(kind), device=self.device)
        return Composite({self.name: spec}, shape=self.batch_size, device=self.device) if kind in self.nest else spec

    def _fitted(self, kind: str) -> torch.Tensor:
        """The steps in the shape of an entry of this kind."""
        shape = torch.Size((*self._size(kind), 1))
        if self.steps.shape == shape:
            return self.steps
        return self.steps.unsqueeze(-2).expand(shape) if self.steps.ndim < len(shape) else self.steps.amax(-2)

    def _result(self, leaves: Mapping[str, Mapping[str, torch.Tensor]]) -> TensorDictBase:
        td = TensorDict({}, self.batch_size, device=self.device)
        if any(kind in self.nest for kind in leaves):
            td[self.name] = TensorDict({}, self.nested_size, device=self.device)
        for kind, entries in leaves.items():
            (td[self.name] if kind in self.nest else td).update(entries)
        return td

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        key = (self.name, "_reset") if "done" in self.nest else "_reset"
        self.steps = restarted(self.steps, tensordict, 0, key)
        done = end_of_episode(self.steps, None)
        return self._result({"observation": {"observation": self._fitted("observation")}, "done": done})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        reward = torch.ones(*self._size("reward"), 1, device=self.device)
        return self._result(
            {
                "observation": {"observation": self._fitted("observation")},
                "reward": {"reward": reward},
                "done": end_of_episode(self.steps, self.max_steps),
            }
        )


class _Place(NamedTuple):
    """Where a `MultiKeyCountingEnv` has entries, how many elements there are, and what the entries are called."""

    path: tuple[str, ...]
    size: tuple[int, ...]
    action: str
    reward: str

    @property
    def buffer(self) -> str:
        return "_".join(("steps", *self.path))


PLACES = (
    _Place((), (), "action", "reward"),
    _Place(("left",), (2,), "move", "prize"),
    _Place(("right", "deep"), (3,), "action", "reward"),
)


class MultiKeyCountingEnv(EpisodicEnv):
    """Three counting envs in one: at the root, under `"left"` (2 elements) and under `("right", "deep")` (3 elements).

    Observations and done are called `observation` and `done` everywhere; actions and rewards are `action` and `reward`,
    but `move` and `prize` on the left. Each reward is the action that belongs to it, as a float.

    Args:
        max_steps: Steps until an episode terminates, the same at all three places or one for each.
        root_done: Whether there is a done at the root, which hides the others.
        num_actions: How many actions there are for each element.
        batch_size: Any.
        device: Where all data lives.

    >>> from aioenvs.testing import MultiKeyCountingEnv
    >>> env = MultiKeyCountingEnv(max_steps=(4, 3, 2))
    >>> env.action_keys
    ['action', ('left', 'move'), ('right', 'deep', 'action')]
    >>> rollout = env.rollout(10)
    >>> rollout.shape, rollout["next", "right", "deep", "done"][:, 0, 0].tolist()
    (torch.Size([4]), [False, True, True, True])
    """

    def __init__(
        self,
        max_steps: int | Sequence[int] = 5,
        *,
        root_done: bool = True,
        num_actions: int = 3,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.max_steps = (max_steps,) * len(PLACES) if isinstance(max_steps, int) else tuple(max_steps)
        self.root_done = root_done
        specs: dict[str, list[tuple[_Place, Mapping[str, Any]]]] = {kind: [] for kind in KINDS}
        for place in PLACES:
            size = torch.Size((*batch_size, *place.size))
            shape = torch.Size((*size, 1))
            self.register_buffer(place.buffer, torch.zeros(shape, dtype=torch.int64, device=device))
            count = Unbounded(shape=shape, dtype=torch.int64, device=device)
            specs["observation"].append((place, {"observation": count}))
            specs["action"].append((place, {place.action: Categorical(num_actions, shape=size, device=device)}))
            specs["reward"].append((place, {place.reward: Unbounded(shape=shape, device=device)}))
            if place.path or root_done:
                specs["done"].append((place, done_leaves(shape, device)))
        self.observation_spec = self._spec(specs["observation"])
        self.action_spec = self._spec(specs["action"])
        self.reward_spec = self._spec(specs["reward"])
        self.done_spec = self._spec(specs["done"])

    def _spec(self, parts: Sequence[tuple[_Place, Mapping[str, Any]]]) -> Composite:
        spec = Composite(shape=self.batch_size, device=self.device)
        for place, leaves in parts:
            if not place.path:
                spec.update(leaves)
                continue
            inner = Composite(leaves, shape=(*self.batch_size, *place.size), device=self.device)
            for name in reversed(place.path[1:]):
                inner = Composite({name: inner}, shape=self.batch_size, device=self.device)
            spec[place.path[0]] = inner
        return spec

    def _result(self, entries: Mapping[_Place, Mapping[str, torch.Tensor]]) -> TensorDictBase:
        td = TensorDict({}, self.batch_size, device=self.device)
        for place, leaves in entries.items():
            if place.path:
                td[place.path] = TensorDict(dict(leaves), (*self.batch_size, *place.size), device=self.device)
            else:
                td.update(leaves)
        return td

    def _masks(self, tensordict: TensorDictBase | None) -> dict[_Place, torch.Tensor]:
        """Return the mask of each place; the root's stands for all, and without one all the others together do."""
        steps = {place: getattr(self, place.buffer) for place in PLACES}
        given = {
            place: None if tensordict is None else tensordict.get((*place.path, "_reset"), None) for place in PLACES
        }
        root = given[PLACES[0]]
        if all(mask is None for mask in given.values()):
            return {place: torch.ones_like(steps[place], dtype=torch.bool) for place in PLACES}
        if root is not None:
            return {place: (root.unsqueeze(-2) if place.path else root).expand_as(steps[place]) for place in PLACES}
        masks = {
            place: torch.zeros_like(steps[place], dtype=torch.bool) if mask is None else mask
            for place, mask in given.items()
        }
        masks[PLACES[0]] = torch.stack([masks[place].all(-2) for place in PLACES[1:]]).all(0)
        return masks

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        entries = {}
        for place, mask in self._masks(tensordict).items():
            steps = torch.where(mask, 0, getattr(self, place.buffer))
            setattr(self, place.buffer, steps)
            done = end_of_episode(steps, None) if place.path or self.root_done else {}
            entries[place] = {"observation": steps, **done}
        return self._result(entries)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        entries = {}
        for place, max_steps in zip(PLACES, self.max_steps, strict=True):
            steps = getattr(self, place.buffer) + 1
            setattr(self, place.buffer, steps)
            reward = tensordict[(*place.path, place.action)].float().unsqueeze(-1)
            done = end_of_episode(steps, max_steps) if place.path or self.root_done else {}
            entries[place] = {"observation": steps, place.reward: reward, **done}
        return self._result(entries)


class HeterogeneousCountingEnv(EpisodicEnv):
    """Agents that differ in what they observe and do, under the key `"lazy"`: lazily stacked TensorDicts and specs.

    Agent `i` observes the count in a tensor `(*batch_size, i + 1)`, and its action `(*batch_size, i + 1)` is between -1
    and 1; or one of `i + 2`, `(*batch_size,)`. Rewards are 1.

    Args:
        max_steps: Steps until an episode terminates.
        num_agents: How many agents.
        discrete: Whether actions are discrete.
        exclusive_keys: Whether agent `i` also observes `agent_{i}`, a key that no other agent has.
        nest_done: Whether each agent has a done of its own instead of one at the root; all end together.
        batch_size: Any.
        device: Where all data lives.

    >>> from aioenvs.testing import HeterogeneousCountingEnv
    >>> env = HeterogeneousCountingEnv(num_agents=3)
    >>> td = env.rand_step(env.reset())
    >>> [td["lazy"][i]["action"].shape for i in range(3)]
    [torch.Size([1]), torch.Size([2]), torch.Size([3])]
    >>> td["next", "lazy"][2]["observation"], td["next", "lazy", "reward"].shape
    (tensor([1., 1., 1.]), torch.Size([3, 1]))
    """

    def __init__(
        self,
        max_steps: int = 5,
        *,
        num_agents: int = 3,
        discrete: bool = False,
        exclusive_keys: bool = False,
        nest_done: bool = False,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.max_steps, self.num_agents = max_steps, num_agents
        self.discrete, self.exclusive_keys, self.nest_done = discrete, exclusive_keys, nest_done
        shape = torch.Size((*batch_size, 1))
        self.register_buffer("steps", torch.zeros(shape, dtype=torch.int64, device=device))
        done = done_leaves(shape, device)
        self.observation_spec = self._stacked([self._observation_leaves(agent) for agent in range(num_agents)])
        self.action_spec = self._stacked([{"action": self._action_leaf(agent)} for agent in range(num_agents)])
        self.reward_spec = self._stacked([{"reward": Unbounded(shape=shape, device=device)}] * num_agents)
        self.done_spec = (
            self._stacked([done] * num_agents) if nest_done else Composite(done, shape=self.batch_size, device=device)
        )

    def _stacked(self, agents: Sequence[Mapping[str, Any]]) -> Composite:
        parts: list[Any] = [Composite(dict(leaves), shape=self.batch_size, device=self.device) for leaves in agents]
        return Composite(lazy=torch.stack(parts, self.batch_dims), shape=self.batch_size, device=self.device)

    def _observation_leaves(self, agent: int) -> dict[str, Any]:
        leaves = {"observation": Unbounded(shape=(*self.batch_size, agent + 1), device=self.device)}
        if self.exclusive_keys:
            leaves[f"agent_{agent}"] = Unbounded(shape=(*self.batch_size, 1), device=self.device)
        return leaves

    def _action_leaf(self, agent: int) -> Any:
        if self.discrete:
            return Categorical(agent + 2, shape=self.batch_size, device=self.device)
        return Bounded(-1, 1, shape=(*self.batch_size, agent + 1), dtype=torch.float32, device=self.device)

    def _result(self, leaves: Mapping[str, torch.Tensor], done: Mapping[str, torch.Tensor]) -> TensorDictBase:
        count = self.steps.float()
        agents = []
        for agent in range(self.num_agents):
            entries = {"observation": count.expand(*self.batch_size, agent + 1), **leaves}
            if self.exclusive_keys:
                entries[f"agent_{agent}"] = count
            if self.nest_done:
                entries.update(done)
            agents.append(TensorDict(entries, self.batch_size, device=self.device))
        td = TensorDict({"lazy": lazy_stack(agents, self.batch_dims)}, self.batch_size, device=self.device)
        return td if self.nest_done else td.update(done)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None
        if tensordict is not None:
            mask = tensordict.get(("lazy", "_reset") if self.nest_done else "_reset", None)
        if mask is not None:
            mask = {"_reset": mask.any(-2) if self.nest_done else mask}
        masks = None if mask is None else TensorDict(mask, self.batch_size)
        self.steps = restarted(self.steps, masks, 0)
        return self._result({}, end_of_episode(self.steps, None))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        reward = torch.ones_like(self.steps, dtype=torch.float32)
        return self._result({"reward": reward}, end_of_episode(self.steps, self.max_steps))
