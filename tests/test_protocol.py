"""Frames: any split of a stream gives them back, anything else is refused."""

import contextlib
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioenvs.engine import protocol
from aioenvs.engine.protocol import HEADER, MAGIC, MAX_BODY, MAX_SEQUENCE, Decoder, Frame, Opcode, encode, next_sequence
from aioenvs.errors import ProtocolError

U16 = st.integers(0, 2**16 - 1)
FRAMES = st.builds(
    Frame,
    opcode=st.sampled_from(Opcode),
    sequence=st.integers(0, MAX_SEQUENCE),
    generation=U16,
    positions=st.lists(U16, max_size=5).map(tuple),
    body=st.binary(max_size=40),
)


def plain(frames: Iterable[Frame]) -> list[Frame]:
    """Frames that compare by value, whatever sequence type their positions have."""
    return [frame._replace(positions=tuple(frame.positions)) for frame in frames]


def header(magic: int = MAGIC, opcode: int = Opcode.STEP, count: int = 0, length: int = 0) -> bytes:
    return HEADER.pack(magic, opcode, count, 1, 0, 7, length)


@st.composite
def streams_in_pieces(draw: st.DrawFn) -> tuple[list[Frame], list[bytes]]:
    frames = draw(st.lists(FRAMES, max_size=6))
    stream = b"".join(map(encode, frames))
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    return frames, [stream[low:high] for low, high in itertools.pairwise([0, *cuts, len(stream)])]


@given(streams_in_pieces())
def test_any_split_of_a_stream_decodes_to_the_same_frames(case: tuple[list[Frame], list[bytes]]) -> None:
    frames, pieces = case
    decoder = Decoder()
    assert plain(frame for piece in pieces for frame in decoder.feed(piece)) == frames
    decoder.finish()


@given(st.lists(FRAMES, min_size=1, max_size=4))
def test_bytes_that_come_one_by_one(frames: list[Frame]) -> None:
    decoder = Decoder()
    found = []
    for byte in b"".join(map(encode, frames)):
        found += decoder.feed(bytes([byte]))
    assert plain(found) == frames


@given(st.data())
def test_a_truncated_stream_gives_its_whole_frames_and_is_noticed(data: st.DataObject) -> None:
    frames = data.draw(st.lists(FRAMES, min_size=1, max_size=4))
    encoded = [encode(frame) for frame in frames]
    ends = [0, *itertools.accumulate(map(len, encoded))]
    cut = data.draw(st.integers(0, ends[-1] - 1))
    whole = sum(end <= cut for end in ends) - 1
    decoder = Decoder()
    assert plain(decoder.feed(b"".join(encoded)[:cut])) == frames[:whole]
    if cut in ends:
        decoder.finish()
    else:
        with pytest.raises(ProtocolError, match=f"inside a frame, after {cut - ends[whole]} of its bytes"):
            decoder.finish()


@given(st.lists(FRAMES, max_size=3), st.binary(min_size=1).filter(lambda data: data[0] != MAGIC))
def test_garbage_is_refused_after_the_frames_before_it(frames: list[Frame], garbage: bytes) -> None:
    decoder = Decoder()
    found = []
    stream = decoder.feed(b"".join(map(encode, frames)) + garbage.ljust(HEADER.size, b"\0"))
    with pytest.raises(ProtocolError, match=f"expected a frame to begin with 0xae, found {garbage[0]:#x}"):
        found.extend(stream)
    assert plain(found) == frames


PIECES = st.one_of(st.binary(max_size=20), FRAMES.map(encode), st.binary(max_size=20).map(lambda data: b"\xae" + data))


@given(st.lists(PIECES, max_size=6).map(b"".join), st.lists(st.integers(0, 400), max_size=5))
def test_any_bytes_at_all_give_the_same_however_they_are_split(stream: bytes, cuts: list[int]) -> None:
    """Frames, and a ProtocolError where there can be none; nothing else is raised, and no more is kept than came."""
    pieces = [stream[low:high] for low, high in itertools.pairwise([0, *sorted(cuts), len(stream)])]
    assert outcome([piece for piece in pieces if piece]) == outcome([stream])


def outcome(pieces: list[bytes]) -> tuple[list[Frame], str]:
    decoder, found, error = Decoder(), [], ""
    try:
        for piece in pieces:
            found.extend(decoder.feed(piece))
        decoder.finish()
    except ProtocolError as caught:
        error = str(caught)
    assert len(decoder._buffer) <= sum(map(len, pieces))
    return plain(found), error


@given(st.lists(FRAMES, min_size=1, max_size=3), st.data())
def test_a_damaged_byte_does_no_harm(frames: list[Frame], data: st.DataObject) -> None:
    stream = bytearray(b"".join(map(encode, frames)))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= data.draw(st.integers(1, 255))
    decoder, found = Decoder(), []
    with contextlib.suppress(ProtocolError):
        found += decoder.feed(bytes(stream))
        decoder.finish()
    before = sum(end <= place for end in itertools.accumulate(len(encode(frame)) for frame in frames))
    assert plain(found)[:before] == frames[:before]
    assert len(decoder._buffer) <= len(stream)


def test_garbage_shorter_than_a_header_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError, match="expected a frame to begin with 0xae, found 0x68"):
        list(Decoder().feed(b"hello"))


def test_a_refused_stream_stays_refused() -> None:
    decoder = Decoder()
    for _ in range(2):
        with pytest.raises(ProtocolError, match="found 0x2a"):
            list(decoder.feed(b"*" * HEADER.size))
    with pytest.raises(ProtocolError):
        list(decoder.feed(encode(Frame(Opcode.STEP, 1))))


@given(st.integers(0, 255).filter(lambda code: code not in list(Opcode)))
def test_an_unknown_opcode_is_refused(code: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown opcode {code}"):
        list(Decoder().feed(header(opcode=code)))


@given(st.integers(MAX_BODY + 1, 2**32 - 1))
def test_too_large_a_length_is_refused_by_the_header_alone(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a STEP frame announces {length} bytes, more than {MAX_BODY}"):
        list(Decoder().feed(header(length=length)))


def test_the_largest_length_is_allowed_and_takes_no_memory_yet() -> None:
    decoder = Decoder()
    assert list(decoder.feed(header(length=MAX_BODY))) == []
    assert len(decoder._buffer) == HEADER.size


def test_too_large_a_body_is_refused_when_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_BODY", 8)
    whole = encode(Frame(Opcode.RESET, 1, body=b"12345678"))
    assert [frame.body for frame in Decoder().feed(whole)] == [b"12345678"]
    with pytest.raises(ProtocolError, match="a RESET frame may carry at most 8 bytes, got 9"):
        encode(Frame(Opcode.RESET, 1, body=b"123456789"))


def test_a_frame_on_the_wire() -> None:
    frame = Frame(Opcode.STEP, 0x01020304, 0x0506, (7, 8), b"xy")
    assert encode(frame) == bytes.fromhex("ae04 0200 0605 0000 04030201 02000000 0700 0800") + b"xy"


@pytest.mark.parametrize("opcode", Opcode)
def test_opcodes_travel_as_themselves(opcode: Opcode) -> None:
    (frame,) = Decoder().feed(encode(Frame(opcode, 3)))
    assert frame.opcode is opcode
    assert frame == Frame(opcode, 3, 0, (), b"")


def test_numbers_follow_one_another_wrap_and_are_never_zero() -> None:
    assert [next_sequence(number) for number in (0, 1, 2)] == [1, 2, 3]
    assert next_sequence(MAX_SEQUENCE - 1) == MAX_SEQUENCE
    assert next_sequence(MAX_SEQUENCE) == 1


@given(st.integers(0, MAX_SEQUENCE))
def test_every_number_fits_its_field(number: int) -> None:
    following = next_sequence(number)
    (frame,) = Decoder().feed(encode(Frame(Opcode.DONE, following)))
    assert frame.sequence == following != number
    assert following > 0


def test_more_positions_than_a_frame_can_hold() -> None:
    with pytest.raises(ProtocolError, match="no STEP frame can select 65536 envs"):
        encode(Frame(Opcode.STEP, 1, positions=range(1 << 16)))
