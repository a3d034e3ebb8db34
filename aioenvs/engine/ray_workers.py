"""One host in a Ray cluster, from the parent's side: its actor, how its end is noticed, and what is said to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from aioenvs.engine.cargo import NOTHING, Bytes, Cargo
from aioenvs.engine.channel import Answered, Correspondence
from aioenvs.engine.process import Exit
from aioenvs.engine.protocol import MAX_BODY, Frame, Opcode
from aioenvs.engine.ray_cluster import connected_ray
from aioenvs.errors import ProtocolError

__all__ = ["RayActor", "RayChannel", "ray_words"]

CHATTER = " Some common causes include"


def ray_words(error: BaseException) -> str:
    """What Ray says of a death, without what it always says."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return lines[-1].partition(CHATTER)[0] if lines else type(error).__name__


class RayActor:
    """The actor, as the process of a worker.

    Args:
        handle: Of the actor, which nobody else holds.
    """

    def __init__(self, handle: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.handle = handle
        self.pid: int | None = None
        self.machine = ""
        self.abandoned = False
        self.cause: Exception | None = None
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        self.listen(handle.watch.remote(), self._seen)

    def listen(self, ref: Any, deliver: Callable[[Any, Exception | None], None]) -> None:
        """Have what comes of a call delivered in the loop: its result, or an exception."""

        def done(future: Any) -> None:
            with contextlib.suppress(RuntimeError):  # of a loop that is closed, where nobody waits for anything
                self._loop.call_soon_threadsafe(_deliver, future, deliver)

        ref.future().add_done_callback(done)

    def _seen(self, code: int | None, error: Exception | None) -> None:
        if error is not None:
            self.died(error)
            return
        self._kill()
        self._finish(Exit(code))

    def died(self, error: Exception) -> None:
        """It is gone, or as good as that."""
        if not self.exited.done():
            self.cause = error
            self._finish(Exit(None, cause=f"died; Ray says: {ray_words(error)}"))

    def _finish(self, how: Exit) -> None:
        if not self.exited.done() and not self._loop.is_closed():
            self.exited.set_result(how)

    def signal(self, number: int) -> None:
        if not self.exited.done():
            self._kill()

    def kill(self) -> None:
        self._kill()

    def abandon(self) -> None:
        self.abandoned = True
        self._kill()
        self._finish(Exit(None))

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone, or Ray is
            connected_ray().kill(self.handle, no_restart=True)


class RayChannel(Correspondence):
    """Frames to and from an actor: a call for each, which comes back with the reply.

    Args:
        generation: As for `Correspondence`.
        answered: Likewise.
        actor: Which.

    Attributes:
        cargo: Packs what goes along with commands; None until the envs have rows.
    """

    def __init__(self, generation: int, answered: Answered, actor: RayActor) -> None:
        super().__init__(generation, answered)
        self.cargo: Cargo | None = None
        self._actor = actor
        self._asked: dict[int, tuple[Opcode, Sequence[int]]] = {}
        actor.exited.add_done_callback(self._ended)

    @property
    def connected(self) -> bool:
        return not self._actor.exited.done()

    def _dispatch(self, frame: Frame) -> None:
        opcode, sequence, generation, positions, body = frame
        if len(body) > MAX_BODY:
            raise ProtocolError(f"a {opcode.name} frame may carry at most {MAX_BODY} bytes, got {len(body)}")
        try:
            connected_ray()
            if opcode is Opcode.CANCEL:
                self._actor.handle.cancel.remote(sequence)
                return
            rows = NOTHING if self.cargo is None else self.cargo.pack_command(opcode, positions)
            ref = self._actor.handle.answer.remote((int(opcode), sequence, generation, tuple(positions), body), rows)
        except Exception as error:  # Ray was shut down, or knows already that the actor is gone
            self._loop.call_soon(self._actor.died, error)
            return
        self._asked[sequence] = opcode, positions
        self._actor.listen(ref, self._arrived)

    def _arrived(self, answer: tuple[Any, Bytes] | None, error: Exception | None) -> None:
        if answer is None:
            assert error is not None
            self._actor.died(error)
            return
        (code, sequence, generation, counts, body), rows = answer
        asked = self._asked.pop(sequence, None)
        if asked is not None and sequence in self._pending and generation == self._generation:
            if self.cargo is not None:
                self.cargo.unpack_answer(*asked, rows)
            self._reply(Frame(Opcode(code), sequence, generation, counts, body))

    def _ended(self, _: asyncio.Future[Exit]) -> None:
        if not self.lost.done():
            self.lost.set_result(self._actor.cause)

    def close(self) -> None:
        self._asked.clear()


def _deliver(future: Any, deliver: Callable[[Any, Exception | None], None]) -> None:
    error = future.exception()
    deliver(None if error is not None else future.result(), error)
