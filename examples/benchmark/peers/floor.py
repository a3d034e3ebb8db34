"""The floor: bare socketpairs and shared numpy arrays, with neither checks nor errors nor TensorDicts."""

import asyncio
import contextlib
import mmap
import os
import select
import socket
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from drivers import LoopDriver
from systems import FIRST_READY, NUM_BATCHES, Driver, Job, System, sample_actions

__all__ = ["SYSTEMS"]


class Reply(asyncio.Protocol):
    """Wakes whoever waits for a process."""

    waiter: "asyncio.Future[None]"
    transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Wake."""
        self.waiter.set_result(None)


class Floor(LoopDriver):
    """Bare processes, one byte each way for a step, results copied out of shared arrays."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._actions, self._count = sample_actions(job), 0
        env = job.workload.make()
        space, count = env.observation_space, job.num_envs
        self.observation = shared((count, *space.shape), space.dtype)
        self.reward = shared((count,), np.float32)
        self.ends = shared((2, count), np.bool_)
        self.action = shared(self._actions.shape[1:], self._actions.dtype)
        self._pids: list[int] = []
        pipes: list[socket.socket] = []
        for index in range(job.num_processes):
            first, last = (count * edge // job.num_processes for edge in (index, index + 1))
            pipes.append(self._fork([job.workload.make() for _ in range(first, last)], first, pipes))
        self._replies = self._runner.run(connect(pipes))

    def _fork(self, envs: list[gym.Env], first: int, others: Sequence[socket.socket]) -> socket.socket:
        ours, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            for pipe in (ours, *others):
                pipe.close()
            with contextlib.suppress(BaseException):
                self._serve(theirs, envs, first)
            os._exit(0)
        self._pids.append(pid)
        theirs.close()
        return ours

    def _serve(self, pipe: socket.socket, envs: list[gym.Env], first: int) -> None:
        for env in envs:
            env.reset()
        actions = self.action[first : first + len(envs)]
        while pipe.recv(1):
            chosen = actions.tolist() if actions.ndim == 1 else actions
            for row, (env, action) in enumerate(zip(envs, chosen, strict=True), first):
                observation, self.reward[row], *ends, _ = env.step(action)
                self.ends[:, row] = ends
                self.observation[row] = env.reset()[0] if any(ends) else observation
            self._done(pipe)

    def _done(self, pipe: socket.socket) -> None:
        pipe.send(b"d")

    async def _step(self) -> int:
        loop = asyncio.get_running_loop()
        self.action[:] = self._actions[self._count % NUM_BATCHES]
        self._count += 1
        for reply in self._replies:
            reply.waiter = loop.create_future()
            reply.transport.write(b"s")
        await asyncio.gather(*(reply.waiter for reply in self._replies))
        _ = [part.copy() for part in (self.observation, self.reward, self.ends)]
        return len(self.reward)

    def close(self) -> None:
        """Close the pipes, at which the processes end."""
        for reply in self._replies:
            reply.transport.close()
        self._runner.close()
        for pid in self._pids:
            os.waitpid(pid, 0)


class OnePipe(Floor):
    """All processes say into one pipe that they are done, and the caller polls that; no event loop."""

    def __init__(self, job: Job) -> None:
        self._reading, self._writing = os.pipe()
        super().__init__(job)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)
        os.close(self._writing)

    def _done(self, pipe: socket.socket) -> None:
        os.write(self._writing, b"d")

    def _begin(self) -> None:
        self.action[:] = self._actions[self._count % NUM_BATCHES]
        self._count += 1
        for reply in self._replies:
            reply.transport.write(b"s")

    def step(self) -> int:
        """Step once."""
        self._begin()
        left = len(self._replies)
        while left:
            self._poll.poll()
            left -= len(os.read(self._reading, 4096))
        _ = [part.copy() for part in (self.observation, self.reward, self.ends)]
        return len(self.reward)

    def turn(self, seconds: float) -> tuple[int, float]:
        """Step in a plain loop."""
        return Driver.turn(self, seconds)

    def close(self) -> None:
        """Close the pipes."""
        super().close()
        os.close(self._reading)


class AwaitedPipe(OnePipe):
    """The same pipe, read by the event loop, one future for a batch, and results as two TensorDicts, unchecked."""

    _left = 0
    _waiter: "asyncio.Future[None]"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import torch
        from tensordict import TensorDict

        self._tensor, self._make = torch.from_numpy, TensorDict._new_unsafe
        self._size, self._false = torch.Size([job.num_envs]), torch.zeros(job.num_envs, 1, dtype=torch.bool)

    def _take(self) -> None:
        self._left -= len(os.read(self._reading, 4096))
        if not self._left:
            self._waiter.set_result(None)

    async def _step(self) -> int:
        self._waiter, self._left = asyncio.get_running_loop().create_future(), len(self._replies)
        self._begin()
        await self._waiter
        observation, reward, ends = (self._tensor(part.copy()) for part in (self.observation, self.reward, self.ends))
        terminated, truncated = ends[0, :, None], ends[1, :, None]
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        never = dict.fromkeys(flags, self._false)
        options = {"batch_size": self._size, "device": None, "names": None}
        self._make({"observation": observation, "reward": reward[:, None], **flags}, **options)
        self._make({"observation": observation, **never}, **options)
        return len(self.reward)

    def step(self) -> int:
        """Step once."""
        return self._runner.run(self._listening())

    async def _listening(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._reading, self._take)
        try:
            return await self._step()
        finally:
            loop.remove_reader(self._reading)

    def turn(self, seconds: float) -> tuple[int, float]:
        """Step within one run of the event loop."""
        loop = self._runner.get_loop()
        loop.add_reader(self._reading, self._take)
        try:
            return LoopDriver.turn(self, seconds)
        finally:
            loop.remove_reader(self._reading)


class Alone(Driver):
    """The envs in a bare loop: the time that they themselves take."""

    def __init__(self, job: Job) -> None:
        self._actions, self._count = sample_actions(job), 0
        self._envs = [job.workload.make() for _ in range(job.num_envs)]
        for env in self._envs:
            env.reset()

    def step(self) -> int:
        """Step once."""
        actions = self._actions[self._count % NUM_BATCHES]
        self._count += 1
        for env, action in zip(self._envs, actions.tolist() if actions.ndim == 1 else actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return len(self._envs)

    def close(self) -> None:
        """Close the envs."""
        for env in self._envs:
            env.close()


class VectorAlone(Driver):
    """A vector env stepped by hand in this process; its arrays are what comes out."""

    def __init__(self, job: Job) -> None:
        self._actions, self._count = sample_actions(job), 0
        self._env = job.workload.make(job.num_envs)
        self._env.reset()

    def step(self) -> int:
        """Step once."""
        self._take(*self._env.step(self._actions[self._count % NUM_BATCHES])[:4])
        self._count += 1
        return self._actions.shape[1]

    def _take(self, *arrays: np.ndarray) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Close the vector env."""
        self._env.close()


class VectorTensors(VectorAlone):
    """The same, and the TensorDicts that `step_and_maybe_reset` returns, made of copies, unchecked."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import torch
        from tensordict import TensorDict

        self._tensor, self._make = torch.tensor, TensorDict._new_unsafe
        self._size, self._float = torch.Size([job.num_envs]), torch.float32

    def _take(self, *arrays: np.ndarray) -> None:
        observation, reward, terminated, truncated = map(self._tensor, arrays)
        flags = {"terminated": terminated[:, None], "truncated": truncated[:, None]}
        flags["done"] = flags["terminated"] | flags["truncated"]
        options = {"batch_size": self._size, "device": None, "names": None}
        self._make({"observation": observation, "reward": reward.to(self._float)[:, None], **flags}, **options)
        never = {key: flag.new_zeros(flag.shape) for key, flag in flags.items()}
        self._make({"observation": observation.clone(), **never}, **options)


class RoundTrip(Floor):
    """One byte to the process of one env, and one back; all envs get their turn."""

    async def _step(self) -> int:
        index = self._count % len(self._replies)
        self.action[index] = self._actions[self._count % NUM_BATCHES][index]
        self._count += 1
        reply = self._replies[index]
        reply.waiter = asyncio.get_running_loop().create_future()
        reply.transport.write(b"s")
        await reply.waiter
        _ = self.observation[index].copy(), self.reward[index], self.ends[:, index].copy()
        return 1


class FirstReady(Floor):
    """Goes on with those envs that were ready first."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._ready: list[int] = []
        self._enough: asyncio.Future[None] | None = None
        for index, reply in enumerate(self._replies):
            reply.waiter = self._waiter(index)
            reply.transport.write(b"s")

    def _waiter(self, index: int) -> "asyncio.Future[None]":
        waiter = self._runner.get_loop().create_future()
        waiter.add_done_callback(lambda _: self._settle(index))
        return waiter

    def _settle(self, index: int) -> None:
        self._ready.append(index)
        if self._enough is not None and len(self._ready) >= FIRST_READY:
            self._enough.set_result(None)
            self._enough = None

    async def _step(self) -> int:
        if len(self._ready) < FIRST_READY:
            self._enough = asyncio.get_running_loop().create_future()
            await self._enough
        ready, self._ready = self._ready, []
        _ = self.observation[ready], self.reward[ready], self.ends[:, ready]
        self.action[ready] = self._actions[self._count % NUM_BATCHES][: len(ready)]
        self._count += 1
        for index in ready:
            reply = self._replies[index]
            reply.waiter = self._waiter(index)
            reply.transport.write(b"s")
        return len(ready)


def shared(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array that forks have in common."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(1, size)), dtype, int(np.prod(shape))).reshape(shape)


async def connect(pipes: Sequence[socket.socket]) -> list[Reply]:
    """Hand the pipes to the event loop."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_unix_connection(Reply, sock=pipe))[1] for pipe in pipes]


SYSTEMS = (
    System("floor", "packed", Floor),
    System("floor", "each", Floor),
    System("envs alone", "inline", Alone),
    System("pipe", "packed", OnePipe),
    System("pipe", "each", OnePipe),
    System("asyncio pipe + td", "packed", AwaitedPipe),
    System("asyncio pipe + td", "each", AwaitedPipe),
    System("floor recv", "each", FirstReady, first_ready=True),
    System("floor", "each", RoundTrip, ("one",)),
    System("by hand, arrays", "inline", VectorAlone, ("vector",)),
    System("by hand, TensorDicts", "inline", VectorTensors, ("vector",)),
)
