"""The protocol on the pipe: frames, opcodes and sequence numbers. Pure: no I/O, no asyncio.

A frame is a fixed header, then the selected env positions, then a body:

    magic u8 | opcode u8 | count u16 | generation u16 | reserved u16 | sequence u32 | length u32
    count x u16   positions of the selected envs within the worker; none means all of them
    length bytes  body, opaque here

In a reply to a command the positions are counts instead: none, or how many episodes finished and the worker's verdict
on the time of its envs (`Outcome`). A reply echoes the sequence number and generation of its request; one whose number
nobody awaits is dropped by the receiver, so that an abandoned request can never shift the stream.

An answer without a body goes as a *record* of the same size over the pool's one pipe, in which all workers write:

    magic u8 | opcode u8 | worker u16 | generation u16 | number u16 | sequence u32 | value u32

In one that answers a whole command (DONE) the number is how many episodes finished, and the value the verdict; in one
that answers for one env of a STEP_EACH (DONE_EACH), that env's position, and twice the verdict, plus one if its episode
finished. A record is complete in itself, so that its order among the frames does not matter.

CANCEL has the sequence number of a request that was given up, and no reply of its own: the worker, if it runs
coroutines, cancels those and answers that request all the same. Such a worker answers requests as they are done, in
whatever order.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from aioenvs.errors import ProtocolError

__all__ = [
    "HEADER",
    "MAGIC",
    "MAX_BODY",
    "RECORD",
    "RECORD_MAGIC",
    "STEPS",
    "Decoder",
    "Frame",
    "Opcode",
    "encode",
    "encode_record",
    "next_sequence",
]

MAGIC = 0xAE
RECORD_MAGIC = 0xDC
MAX_BODY = 1 << 30
MAX_SEQUENCE = (1 << 32) - 1
HEADER = struct.Struct("<BBHHHII")
RECORD = struct.Struct("<BBHHHII")


class Opcode(IntEnum):
    """The request (below 64) or answer (64 and above) of a frame."""

    START = 1
    ATTACH = 2
    RESET = 3
    STEP = 4
    STEP_AND_MAYBE_RESET = 5
    SEED = 6
    CALL = 7
    CLOSE = 8
    CANCEL = 9
    STEP_EACH = 10  # and maybe reset; each env is answered for by itself

    DONE = 64
    FAILED = 65
    DONE_EACH = 66


STEPS = frozenset((Opcode.STEP, Opcode.STEP_AND_MAYBE_RESET, Opcode.STEP_EACH))


class Frame(NamedTuple):
    """One message, in either direction.

    Attributes:
        positions: Selected envs, counted within the worker, empty for all; in a reply, counts (see the module).
        body: Whatever rides behind the header; its meaning belongs to the opcode.
    """

    opcode: Opcode
    sequence: int
    generation: int = 0
    positions: Sequence[int] = ()
    body: bytes = b""


def next_sequence(sequence: int) -> int:
    """The number after this one; it wraps around and is never 0, which is for unasked frames."""
    return 1 if sequence >= MAX_SEQUENCE else sequence + 1


def encode(frame: Frame) -> bytes:
    """Turn a frame into bytes.

    Raises:
        ProtocolError: If the body is larger than `MAX_BODY`, or there are more positions than fit into a frame.
    """
    opcode, sequence, generation, positions, body = frame
    if len(body) > MAX_BODY:
        raise ProtocolError(f"a {opcode.name} frame may carry at most {MAX_BODY} bytes, got {len(body)}")
    try:
        header = HEADER.pack(MAGIC, opcode, len(positions), generation, 0, sequence, len(body))
    except struct.error as error:
        raise ProtocolError(f"no {opcode.name} frame can select {len(positions)} envs: {error}") from error
    if not positions and not body:
        return header
    return b"".join((header, array("H", positions).tobytes(), body))


def encode_record(frame: Frame, worker: int) -> bytes:
    """Turn an answer without a body into a record of a worker's."""
    opcode, sequence, generation, positions, _ = frame
    number, value = positions or (0, 0)
    return RECORD.pack(RECORD_MAGIC, opcode, worker, generation, number, sequence, value)


class Decoder:
    """Cuts a byte stream, however it was split, into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = 0  # so many bytes until the first frame in the buffer can be read

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take some bytes and yield the frames they complete.

        Raises:
            ProtocolError: At the first header that cannot be a frame's; the stream is then unusable.
        """
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        begin = 0
        try:
            while begin < len(data):
                end, frame = _parse(data, begin)
                if frame is None:
                    self._needed = end - begin
                    break
                begin = end
                yield frame
        finally:
            if begin < len(data):
                self._buffer += data[begin:]

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            ProtocolError: If it ended in the middle of a frame.
        """
        if self._buffer:
            raise ProtocolError(f"the stream ended inside a frame, after {len(self._buffer)} of its bytes")


_OPCODES = {int(opcode): opcode for opcode in Opcode}


def _parse(data: bytes, begin: int) -> tuple[int, Frame | None]:
    """Where the frame that begins here ends, as far as that can be told, and the frame if all of it is here."""
    start = begin + HEADER.size
    if data[begin] != MAGIC:
        raise ProtocolError(f"expected a frame to begin with {MAGIC:#x}, found {data[begin]:#x}")
    if start > len(data):
        return start, None
    _, code, count, generation, _, sequence, length = HEADER.unpack_from(data, begin)
    opcode = _OPCODES.get(code)
    if opcode is None:
        raise ProtocolError(f"unknown opcode {code}")
    if length > MAX_BODY:
        raise ProtocolError(f"a {opcode.name} frame announces {length} bytes, more than {MAX_BODY}")
    body = start + 2 * count
    end = body + length
    if end > len(data):
        return end, None
    positions = array("H", data[start:body]) if count else ()
    return end, Frame(opcode, sequence, generation, positions, data[body:end])
