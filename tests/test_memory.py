"""The shared block: one piece of memory for several maps and processes, and nothing left of it afterwards."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from aioenvs.engine.memory import SharedBlock, own_memory

CHILD = """
import sys
from aioenvs.engine.memory import SharedBlock
block = SharedBlock(int(sys.argv[1]))
view = block.map(64)
assert view[:4] == b"ping", view[:4]
view[60:64] = b"pong"
block.close()
"""


@pytest.fixture(params=["memfd", "posix"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedBlock]:
    """An empty block, of memfd or of a POSIX segment as on macOS."""
    if request.param == "memfd" and not hasattr(os, "memfd_create"):
        pytest.skip("the system has no memfd")
    if request.param == "posix":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    block = SharedBlock.create()
    yield block
    block.close()


def links(block_fd: int) -> list[str]:
    """What the descriptors of this process that lead to the same file as `block_fd` lead to."""
    same, found = os.fstat(block_fd), []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), same):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the one that listed the directory
            continue
    return found


def test_a_new_block_is_empty_and_stays_in_this_process(block: SharedBlock) -> None:
    assert os.fstat(block.fd).st_size == 0
    assert not os.get_inheritable(block.fd)


def test_what_still_looks_into_a_closed_block_needs_a_descriptor_only_where_python_does(block: SharedBlock) -> None:
    array = np.frombuffer(block.allocate(64), np.uint8)
    own = os.dup(block.fd)
    try:
        block.close()
        assert len(links(own)) == (1 if sys.version_info >= (3, 13) else 2)
        array[:] = 7
        assert array.sum() == 7 * 64
        del array
        assert len(links(own)) == 1
    finally:
        os.close(own)


def test_a_block_has_no_name_that_anyone_could_find(block: SharedBlock) -> None:
    assert all(link.endswith(" (deleted)") for link in links(block.fd))
    assert os.fstat(block.fd).st_nlink == 0


def test_only_its_owner_may_use_it(block: SharedBlock) -> None:
    block.allocate(1)
    if "memfd" not in links(block.fd)[0]:
        assert os.fstat(block.fd).st_mode & 0o777 == 0o600


def test_allocated_memory_is_zero_and_of_the_given_size(block: SharedBlock) -> None:
    view = block.allocate(10_000)
    assert len(view) == os.fstat(block.fd).st_size == 10_000
    assert view[:] == bytes(10_000)


def test_a_block_of_no_bytes_can_be_mapped(block: SharedBlock) -> None:
    assert len(block.allocate(0)) == 1
    assert os.fstat(block.fd).st_size == 1


def test_two_maps_see_the_same_memory(block: SharedBlock) -> None:
    array = np.frombuffer(block.allocate(4096), np.int32)
    other = SharedBlock(os.dup(block.fd))
    seen = np.frombuffer(other.map(4096), np.int32)
    array[7] = 42
    seen[8] = 43
    assert (seen[7], array[8]) == (42, 43)
    del seen
    other.close()


def test_another_process_sees_the_same_memory(block: SharedBlock) -> None:
    view = block.allocate(64)
    view[:4] = b"ping"
    subprocess.run([sys.executable, "-c", CHILD, str(block.fd)], pass_fds=[block.fd], check=True, timeout=30)
    assert view[60:64] == b"pong"


def test_a_descriptor_can_be_given_away_before_the_block_has_its_size(block: SharedBlock) -> None:
    early = SharedBlock(os.dup(block.fd))
    block.allocate(64)[:2] = b"ok"
    assert early.map(64)[:2] == b"ok"
    early.close()


def test_a_map_larger_than_the_block_is_refused(block: SharedBlock) -> None:
    block.allocate(64)
    with pytest.raises(ValueError, match="greater than file size"):
        block.map(mmap.PAGESIZE * 2)


def test_close_gives_the_descriptor_back(block: SharedBlock) -> None:
    view = block.allocate(64)
    witness = os.dup(block.fd)
    try:
        fd = block.fd
        block.close()
        assert block.fd == -1
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert len(links(witness)) == 1
        assert view.closed
    finally:
        os.close(witness)


def test_close_while_arrays_look_into_the_block(block: SharedBlock) -> None:
    array = np.frombuffer(block.allocate(64), np.uint8)
    block.close()
    assert block.fd == -1
    array[5] = 5
    assert array.sum() == 5


def test_the_last_array_takes_the_last_descriptor_with_it(block: SharedBlock) -> None:
    array = np.frombuffer(block.allocate(64), np.uint8)
    witness = os.dup(block.fd)
    try:
        block.close()
        while_in_use = len(links(witness)) - 1
        assert while_in_use <= (0 if sys.version_info >= (3, 13) else 1)  # mmap itself keeps one, until 3.13
        array[5] = 5
        del array
        assert len(links(witness)) == 1
    finally:
        os.close(witness)


def test_close_twice(block: SharedBlock) -> None:
    block.allocate(64)
    block.close()
    reused = os.open(os.devnull, os.O_RDONLY)
    try:
        block.close()
        os.fstat(reused)  # would raise, had the second close taken the number again
    finally:
        os.close(reused)
    assert block.fd == -1


def test_close_before_the_block_has_a_size(block: SharedBlock) -> None:
    block.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        block.allocate(64)


def test_memory_of_ones_own_has_its_pages_for_itself() -> None:
    arrays = [np.frombuffer(own_memory(nbytes), np.uint8) for nbytes in (0, 10, 10, mmap.PAGESIZE + 1)]
    assert [len(array) for array in arrays] == [1, 10, 10, mmap.PAGESIZE + 1]
    assert all(array.ctypes.data % mmap.PAGESIZE == 0 for array in arrays)
    assert not any(array.any() for array in arrays)
