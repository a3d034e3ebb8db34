"""The parent's end of one worker's socket, against a peer written by hand on the other."""

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from aioenvs.engine import protocol
from aioenvs.engine.config import Timeouts
from aioenvs.engine.pools.host import Exit
from aioenvs.engine.pools.process_host import ProcessHost
from aioenvs.engine.pools.requests import Share
from aioenvs.engine.protocol import MAX_SEQUENCE, Decoder, Frame, Opcode, encode
from aioenvs.errors import ProtocolError, WorkerDiedError

GENERATION = 5


class Peer:
    """A worker by hand: it takes requests off the pipe and answers as the test likes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = Decoder()
        self._requests: list[Frame] = []

    async def request(self) -> Frame:
        """The next request."""
        while not self._requests:
            data = await asyncio.get_running_loop().sock_recv(self.sock, 4096)
            assert data, "the pipe was closed"
            self._requests += self._decoder.feed(data)
        return self._requests.pop(0)

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def reply(
        self, request: Frame, opcode: Opcode = Opcode.DONE, generation: int = GENERATION, body: bytes = b""
    ) -> None:
        await self.write(encode(Frame(opcode, request.sequence, generation, (), carried(body))))

    async def closed(self) -> bool:
        """Whether the other end of the pipe closes."""
        try:
            return await asyncio.get_running_loop().sock_recv(self.sock, 4096) == b""
        except ConnectionResetError:
            return True


def carried(value: bytes) -> bytes:
    """A body in which env 0 has answered a call with this; none if it is nothing."""
    return pickle.dumps(({}, {}, {0: pickle.dumps(value)})) if value else b""


class Asker:
    """Someone who asked for something."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, envs: Any, finished: int, waiting: float, outcome: Any) -> None:
        if not self.future.done():
            self.future.set_result(outcome.values[0] if outcome is not None else b"")

    def failed(self, envs: Any, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()


class Pipe:
    """A host and its peer, and what a pool hears of both."""

    def __init__(self) -> None:
        self.heard: list[set[int]] = []
        kind = SimpleNamespace(config=SimpleNamespace(timeouts=Timeouts()))
        self.host = ProcessHost(0, (0, 1), self, GENERATION, kind)  # type: ignore[arg-type]
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.peer = Peer(theirs)
        self.host.connect(self._ours)

    def answered(self, host: Any, sequence: int, finished: int = 0, waiting: float = 0.0, outcome: Any = None) -> None:
        share = host.pending.pop(sequence, None)
        if share is not None:
            self.heard.append(set(share.envs))
            share.request.answered(share.envs, finished, waiting, outcome)

    def failed(self, host: Any, sequence: int, error: BaseException) -> None:
        host.pending.pop(sequence).request.failed((), error)

    def died(self, host: Any, how: Any, cause: Any) -> None:
        """Nothing: tests do what is to be done."""

    def request(self, opcode: Opcode, envs: set[int], positions: Any = (), body: bytes = b"") -> asyncio.Future[Any]:
        asker = Asker()
        self.host.send(Share(asker, frozenset(envs)), opcode, positions, body)
        return asker.future

    async def settle(self) -> None:
        """Wait until all that the peer wrote has been taken in: a request and its reply pass behind it."""
        future = self.request(Opcode.SEED, {99})
        while (request := await self.peer.request()).opcode is not Opcode.SEED:
            pass
        await self.peer.reply(request)
        await future
        assert self.heard.pop() == {99}


@pytest.fixture
async def pipe() -> AsyncIterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.host.disconnect()
    pipe.host.abandon()
    await pipe.host.ended
    pipe.peer.sock.close()


async def test_a_request_on_the_wire(pipe: Pipe) -> None:
    pipe.request(Opcode.STEP, {4, 6}, (0, 2), b"actions")
    request = await pipe.peer.request()
    assert request._replace(positions=tuple(request.positions)) == Frame(Opcode.STEP, 1, GENERATION, (0, 2), b"actions")


async def test_a_reply_goes_to_whoever_awaits_its_number(pipe: Pipe) -> None:
    futures = [pipe.request(Opcode.STEP, {env}) for env in range(3)]
    requests = [await pipe.peer.request() for _ in futures]
    assert len({request.sequence for request in requests}) == 3
    for env in (2, 0, 1):
        await pipe.peer.reply(requests[env], body=b"%d" % env)
        assert await futures[env] == b"%d" % env
    assert pipe.heard == [{2}, {0}, {1}]


async def test_replies_may_come_together_or_in_pieces(pipe: Pipe) -> None:
    futures = [pipe.request(Opcode.STEP, {env}) for env in range(2)]
    stream, ends = b"", []
    for body in (b"first", b"second"):
        request = await pipe.peer.request()
        stream += encode(Frame(Opcode.DONE, request.sequence, GENERATION, (1, 0), carried(body)))
        ends.append(len(stream))
    await pipe.peer.write(stream[: ends[0] + 5])
    assert await futures[0] == b"first"
    assert not futures[1].done()
    await pipe.peer.write(stream[ends[0] + 5 :])
    assert await futures[1] == b"second"


async def test_the_late_reply_of_an_abandoned_request_is_dropped_and_reported(pipe: Pipe) -> None:
    abandoned = pipe.request(Opcode.STEP, {0})
    late = await pipe.peer.request()
    abandoned.cancel()
    following = pipe.request(Opcode.RESET, {1})
    request = await pipe.peer.request()
    assert pipe.heard == []
    await pipe.peer.reply(late, body=b"late")
    await pipe.peer.reply(request, body=b"mine")
    assert await following == b"mine"
    assert pipe.heard == [{0}, {1}]
    assert abandoned.cancelled()


@pytest.mark.parametrize("change", [{"sequence": 77}, {"sequence": 0}, {"generation": GENERATION - 1}], ids=str)
async def test_a_reply_that_nobody_awaits_is_dropped(pipe: Pipe, change: dict[str, int]) -> None:
    future = pipe.request(Opcode.STEP, {0})
    request = await pipe.peer.request()
    foreign = Frame(Opcode.DONE, request.sequence, GENERATION, (), b"foreign")._replace(**change)
    await pipe.peer.write(encode(foreign))
    await pipe.settle()
    assert not future.done()
    assert pipe.heard == []
    await pipe.peer.reply(request, body=b"mine")
    assert await future == b"mine"


async def test_a_second_reply_to_the_same_request_is_dropped(pipe: Pipe) -> None:
    future = pipe.request(Opcode.STEP, {0})
    request = await pipe.peer.request()
    await pipe.peer.reply(request, body=b"first")
    await pipe.peer.reply(request, body=b"second")
    await pipe.settle()
    assert await future == b"first"
    assert pipe.heard == [{0}]


async def test_numbers_wrap_around(pipe: Pipe) -> None:
    pipe.host._sequence = MAX_SEQUENCE - 1
    futures = [pipe.request(Opcode.STEP, {env}) for env in range(2)]
    requests = [await pipe.peer.request() for _ in futures]
    assert [request.sequence for request in requests] == [MAX_SEQUENCE, 1]
    for request in requests:
        await pipe.peer.reply(request)
    await asyncio.gather(*futures)


async def test_too_large_a_body_is_refused_and_nothing_is_sent(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_BODY", 8)
    with pytest.raises(ProtocolError, match="a STEP frame may carry at most 8 bytes, got 9"):
        pipe.request(Opcode.STEP, {0}, (), b"123456789")
    future = pipe.request(Opcode.STEP, {0})
    request = await pipe.peer.request()
    assert request.opcode is Opcode.STEP
    await pipe.peer.reply(request)
    await future
    assert pipe.host.pending == {}


async def test_large_bodies_pass_each_other(pipe: Pipe) -> None:
    body = bytes(range(256)) * 16_384
    future = pipe.request(Opcode.STEP, {0}, (), body)
    request = await pipe.peer.request()
    assert request.body == body
    await pipe.peer.reply(request, body=body)
    assert await future == body


async def test_garbage_closes_the_pipe_after_the_replies_before_it(pipe: Pipe) -> None:
    future = pipe.request(Opcode.STEP, {0})
    other = pipe.request(Opcode.STEP, {1})
    request = await pipe.peer.request()
    await pipe.peer.request()
    await pipe.peer.write(encode(Frame(Opcode.DONE, request.sequence, GENERATION)) + b"Hello from a print" * 2)
    assert await future == b""
    lost = await pipe.host.lost
    assert isinstance(lost, ProtocolError)
    assert "found 0x48" in str(lost)
    assert await pipe.peer.closed()
    assert not other.done()  # that is for whoever watches the worker to end, by `fail`


async def test_the_end_of_the_stream_is_noticed(pipe: Pipe) -> None:
    pipe.peer.sock.shutdown(socket.SHUT_WR)
    assert await pipe.host.lost is None


async def test_close_closes_the_pipe(pipe: Pipe) -> None:
    pipe.host.disconnect()
    pipe.host.disconnect()
    assert await pipe.host.lost is None
    assert await pipe.peer.closed()


def die(pipe: Pipe) -> WorkerDiedError:
    """The worker has died, and the pool acts upon it."""
    error = pipe.host.bury(Exit(-9), ValueError("why"))
    assert error is not None
    pipe.host.fail_pending()
    return error


async def test_a_death_wakes_everybody_with_an_error_of_their_own(pipe: Pipe) -> None:
    futures = [pipe.request(Opcode.STEP, {env}) for env in range(2)]
    error = die(pipe)
    futures.append(pipe.request(Opcode.STEP, {0}))  # as who asks later has
    raised = []
    for future in futures:
        with pytest.raises(WorkerDiedError, match=r"the worker of envs 0-1 .* killed by SIGKILL") as caught:
            await future
        raised.append(caught.value)
    assert len({id(found) for found in (*raised, error)}) == 4
    assert [(e.env_index, e.__cause__) for e in raised] == [((0, 1), error.__cause__)] * 3
    assert pipe.heard == []
    assert pipe.host.pending == {}


async def test_a_death_that_nobody_awaits_makes_no_noise(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    future = pipe.request(Opcode.STEP, {0})
    die(pipe)
    assert future.done()
    del future
    await asyncio.sleep(0)
    assert caplog.records == []
