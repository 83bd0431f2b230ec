"""The first code of a rank: say READY, answer calls, end when told. Runs in a rank, in its main thread.

What it guarantees: each call gets exactly one answer, whatever the function raises, with the time at which it ended; it is
sent before anything else happens to the rank; nothing is printed that the watcher will say; a rank whose watcher is gone
ends. The function meets SIGINT and SIGTERM as it likes; while its answer is made and sent both are blocked; and while the
rank waits SIGTERM just ends it, whatever handler the function has left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time

from ..wire import payload, values
from ..wire.lastwords import LastWords
from ..wire.messages import Kind
from ..wire.process import Seat
from . import context, stacks
from .channel import Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from ..wire.payload import Call

__all__ = ["main"]

Answer = tuple[Kind, bytes, float]
GUARDED = frozenset({signal.SIGINT, signal.SIGTERM})


def main(seat: Seat) -> None:
    """Live as the rank of this seat."""
    _normal_signals()
    last_words = LastWords(seat.lastwords_fd)
    stacks.keep_at_crash(last_words.crash_fd)
    channel = Channel(seat.channel_fd, last_words)
    context.enter(seat.worker)
    channel.send(Kind.READY)
    _serve(channel, os.getpid())
    _tell_what_lingers(channel)


def _serve(channel: Channel, pid: int) -> None:
    while (fds := _wait_for_call(channel)) is not None:
        answer = _answer(fds)
        if os.getpid() != pid:
            _end_as_fork(answer)
        if not channel.send(*answer):
            _, body, ended_at = answer
            channel.send(Kind.RAISED, _encode(_too_large(body)), ended_at)
        _flush()


def _wait_for_call(channel: Channel) -> list[int] | None:
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    fds = channel.receive_call()
    signal.pthread_sigmask(signal.SIG_BLOCK, GUARDED)
    if fds is not None and handler is not None:  # None: one that C code has installed, which Python cannot put back
        signal.signal(signal.SIGTERM, handler)
    return fds


def _end_as_fork(answer: Answer) -> None:
    """The function forked, and this is the copy: it has no say, and ends as a forked program does."""
    from ..wire import exceptions

    kind, body, _ = answer
    if kind is not Kind.RETURNED:
        sys.stderr.write(exceptions.text_of(body))
    _flush()
    os._exit(0 if kind is Kind.RETURNED else 1)


def _too_large(body: bytes) -> OSError:
    return OSError(
        f"an answer of {len(body)} bytes could not be sent: the rank's code has closed or replaced the descriptors that it "
        "did not open, and without them only small answers arrive"
    )


def _normal_signals() -> None:
    """What a program expects. The watcher's thread may have blocked signals, its program may ignore some, and both are
    inherited: a rank deaf to SIGTERM could only be killed, and without SIGCHLD it could not wait for its own children.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, GUARDED)


def _answer(fds: list[int]) -> Answer:
    """What comes of a call, and when. An interrupt meets what `_perform` does, and never this."""
    try:
        value = _perform(fds)
        ended_at = time.monotonic()
        return Kind.RETURNED, _dump_value(value), ended_at
    except _LoadError as error:
        return Kind.UNLOADED, _encode(error.error), time.monotonic()
    except BaseException as error:  # noqa: BLE001  a KeyboardInterrupt, a SystemExit too is an answer
        failed_at = time.monotonic()  # before it is taken apart, which may take a while
        return Kind.RAISED, _encode(error), failed_at


class _LoadError(Exception):
    """The call could not be loaded, and why."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _perform(fds: list[int]) -> object:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARDED)
        try:
            call = payload.unpack(fds)
        except BaseException as error:  # noqa: BLE001  the caller's own modules are imported there
            raise _LoadError(error) from None
        return _call(call)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, GUARDED)


def _call(call: Call) -> object:
    if call.backend is not None:
        from . import backend

        backend.init(call.backend)
    try:
        value = call.fn(*call.args, **call.kwargs)
    except SystemExit as error:
        if not (error.code is None or (isinstance(error.code, int) and error.code == 0)):  # as Python itself has it
            raise
        value = None
    # Not after a failure: it may wait for peers that wait for us, and the error must not wait for either.
    if call.backend is not None:
        backend.destroy()
    return value


def _dump_value(value: object) -> bytes:
    try:
        return values.dumps(value)
    except BaseException as error:  # noqa: BLE001  whatever the value's classes do when they are pickled
        from ..wire import culprit

        path, part = culprit.find("its return value", value, values.dumps)
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise TypeError(
            f"{path} cannot be sent back: it is of type {kind} ({type(error).__name__}: {error}); return plain data instead"
        ) from None


def _encode(error: BaseException) -> bytes:
    """The exception as the user should see it, without our frames above the function's."""
    from ..wire import exceptions

    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    return exceptions.encode(error.with_traceback(trace))


def _is_ours(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("mpwatch.")


def _flush() -> None:
    """What the function printed comes before what the watcher says of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001, S112  closed, or replaced by something that cannot
            continue


def _tell_what_lingers(channel: Channel) -> None:
    """Python waits for these before it ends; the watcher waits, too, and can then say for what."""
    # An interrupt that came when the function had just ended is too late: to ignore it drops it.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, handler if handler is not None else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARDED)
    threads = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    children = [child.name for child in multiprocessing.active_children() if not child.daemon]
    held_by = [
        *([f"non-daemon threads: {', '.join(threads)}"] if threads else []),
        *([f"non-daemon processes: {', '.join(children)}"] if children else []),
    ]
    if held_by:
        channel.send(Kind.LINGERS, "; ".join(held_by).encode())
