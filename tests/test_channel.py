"""The parent's end of one pipe, against a peer written by hand on the other."""

import asyncio
import socket
from collections.abc import AsyncIterator, Collection

import pytest
from aioenvs.engine.pools.channel import SocketChannel

from aioenvs.engine import protocol
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
        await self.write(encode(Frame(opcode, request.sequence, generation, (), body)))

    async def closed(self) -> bool:
        """Whether the other end of the pipe closes."""
        try:
            return await asyncio.get_running_loop().sock_recv(self.sock, 4096) == b""
        except ConnectionResetError:
            return True


class Pipe:
    """A channel and its peer."""

    def __init__(self) -> None:
        self.answered: list[set[int]] = []
        self.channel = SocketChannel(GENERATION, self._note)
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self._ours = ours
        self.peer = Peer(theirs)

    def _note(self, envs: Collection[int]) -> None:
        self.answered.append(set(envs))

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self.channel, sock=self._ours)

    async def settle(self) -> None:
        """Wait until all that the peer wrote has been taken in: a request and its reply pass behind it."""
        count = len(self.answered)
        future = self.channel.request(Opcode.SEED, {99})
        while (request := await self.peer.request()).opcode is not Opcode.SEED:
            pass
        await self.peer.reply(request)
        await future
        assert self.answered.pop() == {99}
        assert len(self.answered) >= count


@pytest.fixture
async def pipe() -> AsyncIterator[Pipe]:
    pipe = Pipe()
    await pipe.connect()
    yield pipe
    pipe.channel.close()
    await pipe.channel.lost
    pipe.peer.sock.close()


def died() -> WorkerDiedError:
    return WorkerDiedError("it died", env_index=(0, 1), pid=7)


async def test_a_request_on_the_wire(pipe: Pipe) -> None:
    pipe.channel.request(Opcode.STEP, {4, 6}, (0, 2), b"actions")
    request = await pipe.peer.request()
    assert request._replace(positions=tuple(request.positions)) == Frame(Opcode.STEP, 1, GENERATION, (0, 2), b"actions")


async def test_a_reply_goes_to_whoever_awaits_its_number(pipe: Pipe) -> None:
    futures = [pipe.channel.request(Opcode.STEP, {env}) for env in range(3)]
    requests = [await pipe.peer.request() for _ in futures]
    assert len({request.sequence for request in requests}) == 3
    for env in (2, 0, 1):
        await pipe.peer.reply(requests[env], body=b"%d" % env)
        assert (await futures[env]).body == b"%d" % env
    assert pipe.answered == [{2}, {0}, {1}]


async def test_replies_may_come_together_or_in_pieces(pipe: Pipe) -> None:
    futures = [pipe.channel.request(Opcode.STEP, {env}) for env in range(2)]
    stream = b""
    for body in (b"first", b"second"):
        request = await pipe.peer.request()
        stream += encode(Frame(Opcode.FAILED, request.sequence, GENERATION, (1,), body))
    await pipe.peer.write(stream[:30])
    assert (await futures[0]).body == b"first"
    assert not futures[1].done()
    await pipe.peer.write(stream[30:])
    reply = await futures[1]
    assert (reply.opcode, reply.body, list(reply.positions)) == (Opcode.FAILED, b"second", [1])


async def test_the_late_reply_of_an_abandoned_request_is_dropped_and_reported(pipe: Pipe) -> None:
    abandoned = pipe.channel.request(Opcode.STEP, {0})
    late = await pipe.peer.request()
    abandoned.cancel()
    following = pipe.channel.request(Opcode.RESET, {1})
    request = await pipe.peer.request()
    assert pipe.answered == []
    await pipe.peer.reply(late, body=b"late")
    await pipe.peer.reply(request, body=b"mine")
    assert (await following).body == b"mine"
    assert pipe.answered == [{0}, {1}]
    assert abandoned.cancelled()


@pytest.mark.parametrize("change", [{"sequence": 77}, {"sequence": 0}, {"generation": GENERATION - 1}], ids=str)
async def test_a_reply_that_nobody_awaits_is_dropped(pipe: Pipe, change: dict[str, int]) -> None:
    future = pipe.channel.request(Opcode.STEP, {0})
    request = await pipe.peer.request()
    foreign = Frame(Opcode.DONE, request.sequence, GENERATION, (), b"foreign")._replace(**change)
    await pipe.peer.write(encode(foreign))
    await pipe.settle()
    assert not future.done()
    assert pipe.answered == []
    await pipe.peer.reply(request, body=b"mine")
    assert (await future).body == b"mine"


async def test_a_second_reply_to_the_same_request_is_dropped(pipe: Pipe) -> None:
    future = pipe.channel.request(Opcode.STEP, {0})
    request = await pipe.peer.request()
    await pipe.peer.reply(request, body=b"first")
    await pipe.peer.reply(request, body=b"second")
    await pipe.settle()
    assert (await future).body == b"first"
    assert pipe.answered == [{0}]


async def test_numbers_wrap_around(pipe: Pipe) -> None:
    pipe.channel._sequence = MAX_SEQUENCE - 1
    futures = [pipe.channel.request(Opcode.STEP, {env}) for env in range(2)]
    requests = [await pipe.peer.request() for _ in futures]
    assert [request.sequence for request in requests] == [MAX_SEQUENCE, 1]
    for request in requests:
        await pipe.peer.reply(request)
    await asyncio.gather(*futures)


async def test_too_large_a_body_is_refused_and_nothing_is_sent(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_BODY", 8)
    with pytest.raises(ProtocolError, match="a STEP frame may carry at most 8 bytes, got 9"):
        pipe.channel.request(Opcode.STEP, {0}, (), b"123456789")
    future = pipe.channel.request(Opcode.STEP, {0})
    request = await pipe.peer.request()
    assert request.sequence == 1
    await pipe.peer.reply(request)
    await future


async def test_large_bodies_pass_each_other(pipe: Pipe) -> None:
    body = bytes(range(256)) * 16_384
    future = pipe.channel.request(Opcode.STEP, {0}, (), body)
    request = await pipe.peer.request()
    assert request.body == body
    await pipe.peer.reply(request, body=body)
    assert (await future).body == body


async def test_garbage_closes_the_pipe_after_the_replies_before_it(pipe: Pipe) -> None:
    future = pipe.channel.request(Opcode.STEP, {0})
    other = pipe.channel.request(Opcode.STEP, {1})
    request = await pipe.peer.request()
    await pipe.peer.request()
    await pipe.peer.write(encode(Frame(Opcode.DONE, request.sequence, GENERATION)) + b"Hello from a print" * 2)
    assert (await future).opcode is Opcode.DONE
    lost = await pipe.channel.lost
    assert isinstance(lost, ProtocolError)
    assert "found 0x48" in str(lost)
    assert await pipe.peer.closed()
    assert not other.done()  # that is for whoever watches the worker to end, by `fail`


async def test_the_end_of_the_stream_is_noticed(pipe: Pipe) -> None:
    pipe.peer.sock.shutdown(socket.SHUT_WR)
    assert await pipe.channel.lost is None


async def test_close_closes_the_pipe(pipe: Pipe) -> None:
    pipe.channel.close()
    pipe.channel.close()
    assert await pipe.channel.lost is None
    assert await pipe.peer.closed()


async def test_close_before_there_is_a_pipe() -> None:
    pipe = Pipe()
    pipe.channel.close()
    assert not pipe.channel.lost.done()
    pipe._ours.close()
    pipe.peer.sock.close()


async def test_a_failure_wakes_everybody_with_an_error_of_their_own(pipe: Pipe) -> None:
    futures = [pipe.channel.request(Opcode.STEP, {env}) for env in range(3)]
    error = died()
    error.__cause__ = ValueError("why")
    futures[2].cancel()
    pipe.channel.fail(error)
    raised = []
    for future in futures[:2]:
        with pytest.raises(WorkerDiedError, match="it died") as caught:
            await future
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert error not in raised
    assert [(e.env_index, e.pid, e.__cause__) for e in raised] == [((0, 1), 7, error.__cause__)] * 2
    assert futures[2].cancelled()
    assert pipe.answered == []


async def test_after_a_failure_every_request_is_refused(pipe: Pipe) -> None:
    error = died()
    pipe.channel.fail(error)
    raised = []
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match="it died") as caught:
            pipe.channel.request(Opcode.STEP, {0})
        raised.append(caught.value)
    assert len({id(found) for found in (*raised, error)}) == 3


async def test_a_failure_that_nobody_awaits_makes_no_noise(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    future = pipe.channel.request(Opcode.STEP, {0})
    pipe.channel.fail(died())
    assert future.done()
    del future
    await asyncio.sleep(0)
    assert caplog.records == []


async def test_a_reply_after_a_failure_is_dropped(pipe: Pipe) -> None:
    future = pipe.channel.request(Opcode.STEP, {0})
    request = await pipe.peer.request()
    pipe.channel.fail(died())
    await pipe.peer.reply(request)
    pipe.peer.sock.shutdown(socket.SHUT_WR)
    await pipe.channel.lost
    assert pipe.answered == []
    with pytest.raises(WorkerDiedError):
        await future


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_worker_is_told_of_an_abandoned_request_if_it_can_do_something_about_it(
    pipe: Pipe, cancels: bool
) -> None:
    future = pipe.channel.request(Opcode.STEP, {0}, cancels=cancels)
    request = await pipe.peer.request()
    future.cancel()
    await asyncio.sleep(0)
    pipe.channel.request(Opcode.RESET, {1})
    following = await pipe.peer.request()
    if cancels:
        assert (following.opcode, following.sequence) == (Opcode.CANCEL, request.sequence)
        following = await pipe.peer.request()
    assert following.opcode is Opcode.RESET
    await pipe.peer.reply(request)
    await pipe.settle()
    assert pipe.answered == [{0}]


async def test_a_request_that_was_answered_is_not_cancelled_any_more(pipe: Pipe) -> None:
    future = pipe.channel.request(Opcode.STEP, {0}, cancels=True)
    await pipe.peer.reply(await pipe.peer.request())
    assert (await future).opcode is Opcode.DONE
    late = pipe.channel.request(Opcode.STEP, {0}, cancels=True)
    request = await pipe.peer.request()
    await pipe.peer.reply(request)
    await pipe.settle()
    late.cancel()
    pipe.channel.request(Opcode.RESET, {1})
    assert (await pipe.peer.request()).opcode is Opcode.RESET
