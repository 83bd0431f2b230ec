"""Random cascades: one rank of a ring fails, and its neighbours lose their connections and fail, too, often before it.

With `any_error`, the neighbours raise errors that do not show that a connection was lost. Then nobody can tell who failed first
if the culprit closes its connections before it fails, so it does not.
"""

import random
import socket
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import mpwatch
from support.acts import act

LONGEST_DELAY = 0.3  # seconds from the end of the connections to the exception of the rank that ended them
ERRORS = [
    RuntimeError("the stage got no data"),
    ValueError("not enough values to unpack (expected 2, got 0)"),
    KeyError("batch"),
    ZeroDivisionError("division by zero"),
    AssertionError(),
    SystemExit(3),
    MemoryError("out of memory"),
    struct.error("unpack requires a buffer of 8 bytes"),
]


ENDS = ("raises", "raises_a_deep_chain", "exits", "calls_os_exit", "is_killed", "crashes")


@dataclass(frozen=True)
class Cascade:
    """What happens in the ranks. `wrapped` are the ranks that raise another exception from the error of their socket."""

    seed: int
    nprocs: int
    culprit: int
    end: str
    closes_first: bool
    delay: float
    wrapped: tuple[int, ...]
    error: BaseException | None  # that the others raise when a connection has ended


def make_cascade(seed, *, any_error):
    choose = random.Random(seed)
    nprocs = choose.randint(2, 5)
    return Cascade(
        seed=seed,
        nprocs=nprocs,
        culprit=choose.randrange(nprocs),
        end=choose.choice(ENDS),
        closes_first=choose.random() < 0.6 and not any_error,
        delay=choose.uniform(0, LONGEST_DELAY),
        wrapped=tuple(rank for rank in range(nprocs) if choose.random() < 0.3),
        error=choose.choice(ERRORS) if any_error else None,
    )


def connect(folder, nprocs, barrier):
    rank = mpwatch.current_worker().rank
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(Path(folder, str(rank))))
    listener.listen()
    barrier.wait()
    following = socket.socket(socket.AF_UNIX)
    following.connect(str(Path(folder, str((rank + 1) % nprocs))))
    previous, _ = listener.accept()
    listener.close()
    barrier.wait()
    return following, previous


def be_rank(cascade, folder, barrier):
    rank = mpwatch.current_worker().rank
    following, previous = connect(folder, cascade.nprocs, barrier)
    if rank == cascade.culprit:
        if cascade.closes_first:
            for end in (following, previous):
                end.close()
            time.sleep(cascade.delay)
        act(cascade.end)
    try:
        exchange(following, previous)
    except OSError as error:
        if cascade.error is not None:
            raise cascade.error from None
        if rank in cascade.wrapped:
            raise RuntimeError(f"step {rank} failed") from error
        raise


def exchange(following, previous):
    """Send to the next rank and receive from the one before, for ever."""
    while True:
        following.sendall(struct.pack("<d", time.monotonic()))
        if not previous.recv(8, socket.MSG_WAITALL):
            raise ConnectionResetError("the connection has ended")


def run_cascade(cascade):
    """Return what is wrong with the result, or an empty text."""
    barrier = get_context("spawn").Barrier(cascade.nprocs)
    with tempfile.TemporaryDirectory(prefix="cascade-") as folder:
        result = mpwatch.run(be_rank, cascade.nprocs, args=(cascade, folder, barrier), grace_period=1.0, check=False)
    root = result.root_cause
    if root is not None and root.rank == cascade.culprit and not root.is_secondary:
        return ""
    return f"{cascade}\n  blamed: {root}\n  failures: {[str(failure) for failure in result.failures.values()]}"


def run_cascades(count, *, any_error):
    """Run cascades, two at a time. Return what is wrong."""
    cascades = [make_cascade(seed, any_error=any_error) for seed in range(count)]
    with ThreadPoolExecutor(2) as pool:
        return [text for text in pool.map(run_cascade, cascades) if text]
