"""Descriptors on their way to a worker that is being started, beside the pickles that refer to them by number."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Sequence

__all__ = ["Passed", "drop_received", "receive", "send", "tracker"]

HEADER = struct.Struct("<?I")  # whether the first is the resource tracker's, and how many there are
BATCH = 200  # in one message, of which the kernel takes at most 253

_received: list[int] = []  # in a worker, until its envs are built


class Passed:
    """Stands for a descriptor in a pickle; what `multiprocessing` calls a `DupFd`.

    Args:
        number: Which of those that are sent to the worker.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        """Return a descriptor that belongs to the caller, in the worker."""
        return os.dup(_received[self.number])


def tracker() -> int | None:
    """The descriptor of the process that `multiprocessing` leaves the tidying of names to, if there is one.

    A worker must report to that of its parent: one of its own would unlink, at its end, what others still use.
    """
    module = sys.modules.get("multiprocessing.resource_tracker")
    return None if module is None else module._resource_tracker._fd


def send(sock: socket.socket, descriptors: Sequence[int], tracker: int | None = None) -> None:
    """Send descriptors, none or more, as the first that a worker receives; it fits into the pipe of a new one.

    Args:
        sock: The parent's end of a pipe to which nothing was written yet.
        descriptors: In the order of their numbers.
        tracker: See `tracker`.

    Raises:
        OSError: If the system has no room for them.
    """
    everything = list(descriptors) if tracker is None else [tracker, *descriptors]
    sock.sendall(HEADER.pack(tracker is not None, len(everything)))
    for begin in range(0, len(everything), BATCH):
        socket.send_fds(sock, [b"\0"], everything[begin : begin + BATCH])


def receive(sock: socket.socket) -> None:
    """Take what the parent has sent first, in a worker.

    Raises:
        ConnectionResetError: If the parent is gone.
        OSError: If more descriptors were sent than this process may have.
    """
    header = b""
    while len(header) < HEADER.size:
        header += _some(sock.recv(HEADER.size - len(header)))
    has_tracker, number = HEADER.unpack(header)
    while len(_received) < number:
        # A byte at a time, since descriptors are lost that belong to bytes which are read without asking for them.
        data, descriptors, flags, _ = socket.recv_fds(sock, 1, BATCH)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        _received.extend(descriptors)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, f"no room for the {number} descriptors that the factories of the envs share")
        _some(data)
    if has_tracker:
        from multiprocessing import resource_tracker

        resource_tracker._resource_tracker._fd = _received.pop(0)  # type: ignore[attr-defined]


def _some(data: bytes) -> bytes:
    if not data:
        raise ConnectionResetError("the parent closed the pipe before it had sent everything")
    return data


def drop_received() -> None:
    """Close what was received, now that everything which refers to it has its own."""
    while _received:
        os.close(_received.pop())
