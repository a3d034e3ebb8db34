"""The requests of chaos.py, and whether what comes of them is what the models allow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from chaos_envs import UNTOLD, bulk_of, length_of, reward_of
from chaos_model import MANY, SETTLED, Mismatch, Model, State, require
from tensordict import TensorDict, TensorDictBase

from aioenvs.errors import (
    AioEnvsError,
    ClosedError,
    ResetNeededError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)

if TYPE_CHECKING:
    from chaos import Round

__all__ = ["Receipt", "Request"]

CLOCK = 0.02  # seconds by which a loop's own clock may be behind
RESOLUTION = 0.001  # seconds by which time may be up too early by uvloop's clock, which counts milliseconds
KILL_DELAY = 5.0  # seconds that it may take until a process that was to be killed is dead


class Request:
    """One request, and whether what came of it is what the models allow.

    Args:
        round_: Where.
        kind: What is asked.
        chosen: Of which envs.
        by_view: Whether of a view of them, or of the whole with a mask.
        options: The timeout, if there is one of its own.
    """

    def __init__(
        self, round_: Round, kind: str, chosen: list[int], by_view: bool, options: dict[str, float] | None = None
    ) -> None:
        self.round, self.kind, self.chosen, self.by_view = round_, kind, chosen, by_view
        self.options = options or {}
        self.limit = self.options.get("timeout", round_.options.step_timeout)
        self.told = {env: round_.tell() for env in chosen}
        self.payload = round_.rng.randbytes(round_.rng.choice([0, 100, 100_000, 1_000_000])) if kind == "echo" else b""
        self.envs = chosen if by_view else list(range(round_.options.count))
        self.lends = kind.startswith("step") and self.told[chosen[0]] % 2 == 0
        self.began = time.monotonic()
        self.took = 0.0

    def __repr__(self) -> str:
        how = "view" if self.by_view else "mask"
        return f"{self.kind} of {how} {self.chosen} {self.options or ''}, telling {list(self.told.values())}"

    @property
    def is_slow(self) -> bool:
        """Whether the time for it may be exceeded, without anybody's doing."""
        return self.limit is not None and time.monotonic() - self.began > 0.8 * self.limit

    @property
    def models(self) -> list[Model]:
        return [self.round.models[env] for env in self.chosen]

    # -- asking -----------------------------------------------------------------------------------------

    async def perform(self) -> Any:
        try:
            return await self._ask()
        finally:
            self.took = time.monotonic() - self.began

    async def _ask(self) -> Any:
        view = self.chosen if self.by_view else None
        first = self.told[self.chosen[0]]
        arguments: tuple[Any, ...] = {
            "echo": ("echo", first, self.payload),
            "look": ("mark",),
            "seed": (first % 2**31,),
        }.get(self.kind, ())
        name = {"echo": "call", "look": "get_attr", "seed": "set_seed"}.get(self.kind, self.kind)
        kwargs: dict[str, Any] = dict(self.options)
        if self.lends:
            kwargs["copy"] = False
        if self.kind == "reset" or self.kind.startswith("step"):
            self._count()
        if self.kind == "reset":
            kwargs["list_of_kwargs"] = [{"options": {"told": self.told.get(index, UNTOLD)}} for index in self.envs]
            arguments = (TensorDict({"_reset": self._mask.unsqueeze(-1)}, [len(self.envs)]),)
        elif not arguments:
            actions = torch.tensor([self.told.get(index, 1) for index in self.envs])
            arguments = (TensorDict({"action": actions, "_step": self._mask}, [len(self.envs)]),)
        return await self.round.ask(view, name, *arguments, **kwargs)

    @property
    def _mask(self) -> torch.Tensor:
        return torch.tensor([each in self.told for each in self.envs])

    async def send(self, by_view: list[int] | None) -> None:
        """Send the step rather than wait for it; the envs in any order, and what is sent is spoilt afterwards."""
        self._count()
        order = self.round.rng.sample(self.chosen, len(self.chosen))
        td = TensorDict(
            {"action": torch.tensor([self.told[env] for env in order]), "env_index": torch.tensor(order)}, [len(order)]
        )
        try:
            await self.round.ask(by_view, "send", td, **self.options)
        finally:
            td["action"].fill_(1)

    def _count(self) -> None:
        for model in self.models:
            model.asked += 1

    def alone(self, env: int) -> Request:
        """The part of it that is one env's."""
        own = object.__new__(Request)
        own.__dict__.update(self.__dict__, chosen=[env], envs=[env], told={env: self.told[env]}, by_view=True)
        return own

    # -- judging ----------------------------------------------------------------------------------------

    def judge(self, error: BaseException | None, result: Any) -> None:
        """Compare with the models, and bring them up to date.

        Raises:
            Mismatch: If it cannot be.
        """
        self._judge_loans()
        self.round.notice_late()
        if self._was_slow:
            self.notice_late()
        self.round.flying.discard(self)
        try:
            if error is not None:
                self._judge_error(error)
            elif result is None:
                self.round.counts["cancelled"] += 1
                self._open_all()
            else:
                getattr(self, f"_judge_{self.kind}")(result)
        except Mismatch as mismatch:
            raise Mismatch(f"{self}: {mismatch}; known were {self.models}") from error

    def notice_late(self) -> None:
        """Its workers may have been killed for it, even now."""
        if self._restarts:
            for env in {sibling for own in self.chosen for sibling in self.round.group(own)}:
                self.round.models[env].die(time.monotonic() + KILL_DELAY)

    @property
    def _was_slow(self) -> bool:
        """Whether the time for it may have been exceeded, without anybody's doing."""
        return self.limit is not None and self.took > 0.8 * self.limit - RESOLUTION

    @property
    def _restarts(self) -> bool:
        return self.round.options.policy == "restart"

    def _after(self, model: Model, state: State) -> State:
        if self.kind == "reset":
            return state.was_reset(self.told[model.index])
        if self.kind.startswith("step"):
            return state.stepped(model.index, self.told[model.index], self.kind != "step")
        return state

    def _open_all(self) -> None:
        """Each env may have done it, or not."""
        for model in self.models:
            model.states |= {self._after(model, state) for state in model.states}
            may_be_dead, model.owed = model.may_be_dead, model.owed and self.kind != "reset"  # which needs no excuse
            if may_be_dead:
                for sibling in self.round.group(model.index):
                    self.round.models[sibling].vague = True

    def _judge_error(self, error: BaseException) -> None:
        self.round.counts[type(error).__name__] += 1
        failed = tuple(getattr(error, "env_index", ()))
        if isinstance(error, ValueError) and "was told" in str(error):
            first = failed[0]
            require(first in self.told, f"the error {error!r} is of another env")
            require(f"env {first} was told {self.told[first]}" in str(error), f"{error!r} is of another request")
            self._require_own(error, failed)
            self._failed_some(failed)
        elif isinstance(error, ResetNeededError):
            self._require_own(error, failed)
            self._failed_some(failed)
        elif isinstance(error, WorkerTimeoutError):
            killed = self._restarts and self.kind in ("echo", "look")  # whatever it asked for, nobody repeats it
            require(self._was_slow and (killed or not self._restarts), f"{error!r} without cause")
            self._open_all()
            for env in error.env_index if killed else ():
                for sibling in self.round.group(env):
                    self.round.models[sibling].vague = True
        elif isinstance(error, WorkerDiedError | WorkerStartError):
            envs = [self.round.models[env] for env in error.env_index if env in self.told]
            require(any(model.may_be_dead for model in envs), f"{error!r} without cause")
            excused = self.kind in ("echo", "look", "seed") or self.round.options.max_restarts < MANY
            require(not self._restarts or excused, f"{error!r} was not restarted")
            self._open_all()
            for env in error.env_index:
                self.round.models[env].vague = True
        elif isinstance(error, ClosedError):
            require(any("close" in each for each in self.round.history), f"{error!r} without cause")
            self._open_all()
        else:
            raise Mismatch(f"an unexpected {error!r}")

    def _require_own(self, error: BaseException, failed: Sequence[int]) -> None:
        """No env may be named that was not asked, but one whose worker died with that of another.

        The death may be old, where what was sent is received later: a reset may have replaced the worker since.
        """
        strangers = [self.round.models[env] for env in failed if env not in self.told]
        excused = (model.may_be_dead or model.last_death > self.began - KILL_DELAY for model in strangers)
        require(all(excused), f"{error!r} is of another env")

    def _failed_some(self, failed: Sequence[int]) -> None:
        """Some envs failed, and the others have stepped."""
        for model in self.models:
            after = {self._after(model, state) for state in model.states}
            could_fail = {state for state in after if not state.can_step}
            if model.may_be_dead:
                model.states, model.vague, model.owed = after | model.states, True, False  # the error told of the loss
            elif model.index in failed and not could_fail and self._was_slow:
                model.states = after | model.states  # late, while another one raised
            elif model.index in failed:
                require(bool(could_fail), f"env {model.index} failed without cause")
                model.states = could_fail
            else:
                require(after != could_fail, f"env {model.index} did not fail")
                model.states = after - could_fail

    # -- judging results --------------------------------------------------------------------------------

    def _rows(self, td: TensorDictBase) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The mark of each env in a result, whose bulk fits it."""
        options = self.round.options
        bulk = td.get("bulk")
        for row, (env, mark) in enumerate(zip(self.envs, td["mark"].tolist(), strict=True)):
            require(mark[0] == env or not any(mark), f"env {env} got the row {mark}")
            expected = bulk_of(mark, options.size, options.loose)
            model = self.round.models[env]
            certain = any(mark) and env in self.told and len(model.states) == 1 and not model.vague
            if options.loose:
                found = bulk.tolist()[row]
                require(found == expected or not certain, f"env {env}: {str(found)[:9]} does not fit {mark}")
            else:
                same = bool((bulk[row].numpy() == expected).all())
                require(same or not certain, f"env {env}: the bulk does not fit {mark}")
            yield env, tuple(mark)

    def _judge_loans(self) -> None:
        """What was lent stands until the second next command is asked for."""
        for model in self.models:
            if model.lent is not None and model.asked - model.lent[0] < 2:
                _, looked_at, was = model.lent
                same = all(torch.equal(value, was[key]) for key, value in looked_at.items())
                require(same, f"env {model.index}: what was lent changed before its time")

    def _judge_step(self, td: TensorDictBase, root: TensorDictBase | None = None) -> None:
        following = td["next"]
        for row, env in enumerate(self.envs):
            if self.lends and env in self.told:
                values = {key: following.get(key) for key in ("mark", "bulk", "reward", "done")}
                own = {key: value[row] for key, value in values.items() if isinstance(value, torch.Tensor)}
                model = self.round.models[env]
                model.lent = (model.asked, own, {key: value.clone() for key, value in own.items()})
        roots = dict(self._rows(root)) if root is not None else {}
        for row, (env, mark) in enumerate(self._rows(following)):
            if env not in self.told:
                continue
            model = self.round.models[env]
            flags = {name: bool(following[name][row]) for name in ("done", "terminated", "truncated")}
            reward = float(following["reward"][row])
            if flags["truncated"]:
                self._lost(model, mark, reward, flags, roots.get(env))
            else:
                self._stepped(model, mark, reward, flags, roots.get(env))

    def _judge_step_and_maybe_reset(self, result: tuple[TensorDictBase, TensorDictBase]) -> None:
        self._judge_step(*result)

    def _lost(
        self, model: Model, mark: tuple[int, ...], reward: float, flags: dict[str, bool], root: tuple[int, ...] | None
    ) -> None:
        self.round.counts["lost"] += 1
        require(self._restarts and model.may_be_dead, f"env {model.index} was lost without cause")
        require(flags == {"done": True, "terminated": False, "truncated": True}, f"a lost step has {flags}")
        require(reward == 0, f"a lost step has the reward {reward}")
        had_ended = any(state.steps >= length_of(model.index) for state in model.states)  # and should not have stepped
        # A worker that died over a step which was cancelled may have written a part of it.
        is_certain = len(model.states) == 1 and not model.vague and not had_ended
        if is_certain and model.generation is not None:
            known = {(model.index, model.generation, *state[:3]) for state in model.states}
            require(mark in known, f"a lost step observes {mark}")
        if root is not None:
            require(root[2:] == SETTLED[:3], f"the root after a loss is {root}")
            require(root[1] not in self.round.seen, f"the generation {root[1]} after a loss is an old one")
            self.round.seen.add(root[1])
        model.deaths = model.deaths[1:]
        model.settle(None if root is None else root[1], SETTLED)

    def _stepped(
        self, model: Model, mark: tuple[int, ...], reward: float, flags: dict[str, bool], root: tuple[int, ...] | None
    ) -> None:
        action = self.told[model.index]
        require(not model.owed, f"env {model.index} stepped before its loss was told")
        require(mark[4] == action, f"env {model.index} was told {action} and observes {mark}")
        self._belongs(model, mark)
        before = [state.stepped(model.index, action, False) for state in model.states]
        require(State(*mark[2:]) in before or model.vague, f"env {model.index} observes {mark}")
        over = mark[3] >= length_of(model.index)
        require(flags == {"done": over, "terminated": over, "truncated": False}, f"{mark} has {flags}")
        require(reward == reward_of(action), f"the reward for {action} is {reward}")
        state = State(*mark[2:])
        if root is not None:
            state = state.was_reset(UNTOLD) if over else state
            require(root == (model.index, mark[1], *state[:3]), f"the root after {mark} is {root}")
        self._is_alive(model)
        model.settle(mark[1], state)

    def _belongs(self, model: Model, mark: tuple[int, ...]) -> None:
        """Whether a generation is the one that is known, or a new one where there may be one."""
        generation = mark[1]
        if generation == model.generation:
            return
        require(model.generation is None or model.vague, f"{mark} comes from an env that nobody heard of")
        require(generation not in self.round.seen or model.vague, f"{mark} comes from an old env")
        self.round.seen.add(generation)

    def _is_alive(self, model: Model) -> None:
        """It answered as if nothing was: it survived what was done to it before it was asked."""
        model.deaths = [death for death in model.deaths if death >= self.began]

    def _judge_reset(self, td: TensorDictBase) -> None:
        for env, mark in self._rows(td):
            if env in self.told:
                self._was_reset(self.round.models[env], mark)

    def _was_reset(self, model: Model, mark: tuple[int, ...]) -> None:
        told = self.told[model.index]
        require(mark[3:] == (0, told), f"env {model.index} was reset with {told} and observes {mark}")
        if mark[1] == model.generation:
            known = {state.was_reset(told)[:3] for state in model.states}
            require(mark[2:] in known or model.vague, f"env {model.index} was reset and observes {mark}")
            require(not model.owed, f"{mark} comes from an env that is dead")
        else:
            fresh = 2 if self._restarts else 1
            expected = {state.was_reset(told).episode for state in model.states} if model.generation is None else set()
            require(model.generation is None or model.may_be_dead, f"{mark} comes from nowhere")
            require(mark[1] not in self.round.seen or model.vague, f"{mark} comes from an old env")
            require(mark[2] in expected | {fresh} or model.vague, f"{mark} has had another number of episodes")
            self.round.seen.add(mark[1])
            if not self._restarts and model.generation is not None:
                for sibling in set(self.round.group(model.index)) - {model.index}:
                    self.round.models[sibling].vague = True
        self._is_alive(model)
        model.settle(mark[1], State(*mark[2:]))

    def _judge_echo(self, result: list[Any]) -> None:
        told = self.told[self.chosen[0]]
        for env, (mark, number, payload) in zip(self.envs, result, strict=True):
            require(number == told and payload == self.payload[::-1], f"env {env} answered to another call")
            self._looked(self.round.models[env], mark)

    def _judge_look(self, result: list[Any]) -> None:
        for env, mark in zip(self.envs, result, strict=True):
            self._looked(self.round.models[env], mark)

    def _judge_seed(self, result: int) -> None:
        require(isinstance(result, int), f"set_seed returned {result!r}")

    def _looked(self, model: Model, mark: tuple[int, ...]) -> None:
        require(mark[0] == model.index, f"env {model.index} says that it is {mark}")
        if model.vague:
            return
        if mark[1] == model.generation or model.generation is None:
            known = {state[:3] for state in model.states}
            fresh = {SETTLED[:3]} if model.may_be_dead else set()
            require(mark[2:] in known | fresh, f"env {model.index} says that it is {mark}")
            return
        require(self._restarts and model.may_be_dead, f"env {model.index} is another one: {mark}")
        require(mark[2:] == SETTLED[:3], f"env {model.index} was restarted and says that it is {mark}")
        model.owed = True


class Receipt:
    """One `recv`, and whether what came of it is what the models of the envs that were sent steps allow.

    Args:
        round_: Where.
        view: Of which envs; None for the whole.
        least: How many at least.
        most: How many at most.
        timeout: Seconds that it may take.
    """

    def __init__(self, round_: Round, view: list[int] | None, least: int, most: int | None, timeout: float | None):
        self.round, self.view, self.least, self.most, self.timeout = round_, view, least, most, timeout
        envs = range(round_.options.count) if view is None else view
        self.before = {env: round_.sent[env] for env in round_.sent if env in envs}
        self.began = time.monotonic()

    def __repr__(self) -> str:
        return (
            f"recv({self.least}, {self.most}, {self.timeout}) of {self.view or 'all'} while {[*self.before]} were sent"
        )

    async def perform(self) -> Any:
        return await self.round.ask(self.view, "recv", self.least, self.most, self.timeout)

    def judge(self, error: BaseException | None, result: Any) -> None:
        """Compare with the models, and bring them up to date.

        Raises:
            Mismatch: If it cannot be.
        """
        self.round.notice_late()
        now = time.monotonic()
        for request in self.before.values():
            request.took = max(request.took, now - request.began)
        try:
            self._judge(error, result)
        except Mismatch as mismatch:
            models = [self.round.models[env] for env in self.before]
            raise Mismatch(f"{self}: {mismatch}; known were {models}") from error

    def _judge(self, error: BaseException | None, result: Any) -> None:
        if isinstance(error, ClosedError | AioEnvsError) and self.round.is_closing:
            self.round.counts["recv closed"] += 1
            return
        left = self.round.outstanding
        if self.round.is_closing and error is not None:
            return
        if self.round.is_closing:  # which came after what came here
            left = [env for env in self.round.sent if env not in (result[0]["env_index"].tolist() if result else ())]
        taken = [env for env in self.before if env not in left]
        others = [env for env in self.round.sent if env not in taken]
        require(left == others, f"{left} are outstanding, and not {others}")
        for env in taken:
            del self.round.sent[env]
        if error is None and result is None:
            self.round.counts["recv cancelled"] += 1
            require(not taken, f"a cancelled recv took {taken}")
        elif error is None:
            self._judge_rows(taken, *result)
        elif isinstance(error, WorkerTimeoutError) and str(error).startswith("recv:"):
            self.round.counts["recv timeout"] += 1
            require(not taken, f"a late recv took {taken}")
            took = time.monotonic() - self.began
            require(self.timeout is not None and took > self.timeout - CLOCK, f"it was not late after {took} s")
            require(set(error.env_index) <= set(self.before), f"{error!r} names others")
        else:
            self._judge_failure(taken, error)

    def _judge_rows(self, taken: list[int], td: TensorDictBase, root: TensorDictBase) -> None:
        envs = td["env_index"].tolist()
        require(sorted(envs) == sorted(taken), f"{envs} were received and {taken} taken")
        require(root["env_index"].tolist() == envs, "the roots are of other envs")
        most = len(self.before) if self.most is None else self.most
        require(self.least <= len(envs) <= most, f"{len(envs)} were received")
        for row, env in enumerate(envs):
            self.round.counts["received"] += 1
            request = self.before[env].alone(env)
            require(int(td["action"][row]) == request.told[env], "what was sent is not what came back")
            request.judge(None, (td[row : row + 1], root[row : row + 1]))
            model = self.round.models[env]
            model.vague = bool(model.deaths)  # since, it may have been built anew for a sibling

    def _judge_failure(self, taken: list[int], error: BaseException | None) -> None:
        require(bool(taken), f"{error!r} took nothing away, and would come again")
        named = set(getattr(error, "env_index", ()))
        require(named >= set(taken), f"{error!r} names {named} and took {taken}")
        whole = object.__new__(Request)
        requests = [self.before[env] for env in taken]
        whole.__dict__.update(
            requests[0].__dict__,
            chosen=taken,
            envs=taken,
            told={env: request.told[env] for env, request in zip(taken, requests, strict=True)},
            limit=min((request.limit for request in requests if request.limit is not None), default=None),
            took=max(request.took for request in requests),
            began=min(request.began for request in requests),
        )
        whole.judge(error, None)
