"""Functions for ranks whose return value is large, or arrives in an unusual way."""

import multiprocessing
import os
import socket
from pathlib import Path

from support.failing import rank, returns_1_mib


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


def closes_descriptors_and_returns(value):
    os.closerange(3, 4096)
    return value


def rank_0_returns_1_mib_then_rank_1_fails():
    """Return a large value on rank 0. Raise on rank 1 once the watcher has received that value."""
    if rank() == 0:
        return returns_1_mib()
    while "mpwatch-value" not in Path(f"/proc/{os.getppid()}/maps").read_text():
        os.sched_yield()
    raise ValueError("the batch is bad")


def answers_with_invalid_files(what):
    """Send these descriptors to the watcher instead of the file of a return value, then end at once."""
    from mpwatch.wire.messages import MessageKind, encode_frame
    from mpwatch.wire.pickling.pickle_buffers import MAGIC, TRAILER

    empty, foreign, truncated = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("empty", "foreign", "truncated"))
    os.write(foreign, bytes(100))
    os.write(truncated, TRAILER.pack(1000, 0, MAGIC))
    pipe = os.pipe()[0]
    fds = {
        "nothing": [],
        "a pipe": [pipe],
        "two pipes": [pipe, pipe],
        "an empty file": [empty],
        "a file of something else": [foreign],
        "a truncated file": [truncated],
    }[what]
    with socket.socket(fileno=os.dup(multiprocessing.current_process().launch_info.channel_fd)) as channel:
        socket.send_fds(
            channel, [encode_frame(MessageKind.EXIT_BLOCKED if what == "two pipes" else MessageKind.RETURNED)], fds
        )
    os._exit(0)
