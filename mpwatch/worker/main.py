"""The first code of a rank: say READY, answer calls, end when told. Runs in a rank, in its main thread.

What it guarantees: each call gets exactly one answer, whatever the function raises, with the time at which it ended; it is
sent before anything else happens to the rank; nothing is printed that the watcher will say; a rank whose watcher is gone
ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress

from mpwatch.os_support.signals import die_with_writer
from mpwatch.wire.launch import LaunchInfo
from mpwatch.wire.messages import MessageKind
from mpwatch.wire.pickling import call_payload, return_values
from mpwatch.wire.resource_errors import (  # imported early: later there may be no descriptor to read it with
    is_shortage,
    with_remedy,
)
from mpwatch.wire.shared_memory import BlackBox, HeartbeatWriter, open_slot
from mpwatch.worker import context, stdio
from mpwatch.worker.channel import Channel
from mpwatch.worker.signals import DeferredSignals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from mpwatch.wire.exceptions.encoder import ExceptionEncoder
    from mpwatch.wire.pickling.call_payload import Call
    from mpwatch.wire.pickling.pickle_buffers import PickleBundle

    Sent = tuple[bytes, list[int] | None]  # a call as it came, see payload.unpack


def main(launch_info: LaunchInfo) -> None:
    """Live as the rank of this seat."""
    _end_with_watcher()
    _normal_signals()
    memory = open_slot(launch_info.slots_fd, launch_info.slot)
    deferred_signals = DeferredSignals(memory)
    deferred_signals.enter()
    where = stdio.move_stderr(launch_info.stderr_fd)
    if launch_info.is_captured:
        stdio.flush_each_line()
    channel = Channel(launch_info.channel_fd, BlackBox(memory))
    context.enter(launch_info.worker, HeartbeatWriter(memory))
    channel.send(MessageKind.READY, where)
    _serve(channel, deferred_signals)
    deferred_signals.end()
    _leave_process_group()
    _tell_what_lingers(channel)
    channel.let_go()


def _serve(channel: Channel, deferred_signals: DeferredSignals) -> None:
    pid = os.getpid()
    while True:
        deferred_signals.wait()
        sent = channel.receive_call()
        if sent is None:
            return
        channel.keep_a_descriptor()
        outcome = _outcome(sent, deferred_signals)
        if os.getpid() != pid:
            _end_as_fork(outcome)
        if isinstance(outcome, _Failure):
            _send_failure(channel, outcome)
        else:
            stdio.flush_for_answer()
            _send_value(channel, *outcome)
        del outcome  # a failure holds the function's frames, and all that is in them
        stdio.flush()


def _end_as_fork(outcome: _Failure | tuple[PickleBundle, float]) -> None:
    """The function forked, and this is the copy: it has no say, and ends as a forked program does."""
    if isinstance(outcome, _Failure):
        from mpwatch.wire.exceptions import decoder

        sys.stderr.write(decoder.text_of(outcome.encoder().plain()))
    stdio.flush()
    os._exit(1 if isinstance(outcome, _Failure) else 0)


def _send_value(channel: Channel, value: PickleBundle, ended_at: float) -> None:
    error = None
    try:
        if value.file is None:
            is_sent = channel.send(MessageKind.RETURNED, value.body, ended_at)
        else:
            is_sent = channel.send_file(MessageKind.RETURNED, value.file, ended_at)
        if not is_sent:
            error = _too_large(value.size)
    except OSError as refused:
        error = OSError(with_remedy("the return value could not be sent back", refused))
    finally:
        value.close()
    if error is not None:
        _send_failure(channel, _Failure(MessageKind.RAISED, error, ended_at))


def _send_failure(channel: Channel, failure: _Failure) -> None:
    """First that it failed and when, then what can be told of it, then what must be tried out: the classes of an exception
    may raise, crash or never end in their `__str__`, and worse in their pickling.
    """
    channel.send(MessageKind.FAILING, stamp=failure.at)
    stdio.flush_for_answer()
    channel.free_a_descriptor()  # the function may have taken all, and what tells must be imported
    try:
        encoder = failure.encoder()
        told = encoder.plain()
    except BaseException as broken:  # noqa: BLE001  memory has run out, or an error of ours
        encoder = failure.instead(RuntimeError(f"{failure.name} was raised, and could not be told: {broken!r}"))
        told = encoder.plain()
    if channel.send(failure.kind, told, failure.at):
        channel.send(MessageKind.DETAILS, encoder.details(), failure.at)
    else:
        channel.send(failure.kind, failure.instead(_too_large(len(told))).plain(), failure.at)


def _too_large(size: int) -> OSError:
    return OSError(
        f"an answer of {size} bytes could not be sent: the rank's code has closed or replaced the descriptors that it "
        "did not open, and without them only small answers arrive"
    )


def _end_with_watcher() -> None:
    """The kernel sees to it, by the pipe that spawn leaves open between us; where it cannot, the guardian alone does."""
    watcher = multiprocessing.parent_process()
    if watcher is not None:
        die_with_writer(watcher.sentinel)


def _normal_signals() -> None:
    """What a program expects. The watcher's thread may have blocked signals, its program may ignore some, and both are
    inherited: a rank deaf to SIGTERM could only be killed, and without SIGCHLD it could not wait for its own children.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _outcome(sent: Sent, deferred_signals: DeferredSignals) -> _Failure | tuple[PickleBundle, float]:
    """What comes of a call: its value, pickled, and when. An interrupt meets what `_perform` does, and never this."""
    try:
        try:
            value = _perform(sent, deferred_signals)
        finally:
            deferred_signals.enter()
        ended_at = time.monotonic()
        return _packed(value, ended_at)
    except _LoadError as error:
        return _Failure(MessageKind.LOAD_FAILED, error.error, time.monotonic())
    except BaseException as error:  # noqa: BLE001  a KeyboardInterrupt, a SystemExit too is an answer
        failed_at = time.monotonic()
        deferred_signals.enter()  # it may have been an interrupt that came before the shelter was reached
        return _Failure(MessageKind.RAISED, error, failed_at)


class _Failure:
    """What a call raised, and when, by CLOCK_MONOTONIC."""

    def __init__(self, kind: MessageKind, error: BaseException, at: float) -> None:
        self.kind = kind
        self.error = error
        self.at = at

    @property
    def name(self) -> str:
        """The exception's type."""
        return type(self.error).__name__

    def instead(self, error: BaseException) -> ExceptionEncoder:
        """Another one, told in its place, as if it had been raised there."""
        from mpwatch.wire.exceptions.decoder import own, set_own

        set_own(error, "__traceback__", own(self.error, "__traceback__"))
        return _Failure(self.kind, error, self.at).encoder()

    def encoder(self) -> ExceptionEncoder:
        """The exception as the user should see it, without our frames above the function's."""
        from mpwatch.wire.exceptions.decoder import own, set_own
        from mpwatch.wire.exceptions.encoder import ExceptionEncoder

        trace = own(self.error, "__traceback__")
        while trace is not None and _is_ours(trace):
            trace = trace.tb_next
        set_own(self.error, "__traceback__", trace)
        return ExceptionEncoder(self.error)


class _LoadError(Exception):
    """The call could not be loaded, and why."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _perform(sent: Sent, deferred_signals: DeferredSignals) -> object:
    deferred_signals.leave()
    try:
        call = call_payload.unpack(*sent)
    except BaseException as error:  # noqa: BLE001  the caller's own modules are imported there
        raise _LoadError(error) from None
    return _call(call)


def _call(call: Call) -> object:
    if call.backend is not None:
        from mpwatch.worker import process_group

        process_group.init(call.backend, call.epoch)
    try:
        value = call.fn(*call.args, **call.kwargs)
    except SystemExit as error:
        if not (error.code is None or (isinstance(error.code, int) and error.code == 0)):  # as Python itself has it
            raise
        value = None
    context.function_has_returned()
    # Not after a failure: it may wait for peers that wait for us, and the error must not wait for either.
    if call.backend is not None and call.epoch is None:
        process_group.destroy()
    return value


def _leave_process_group() -> None:
    """One that was kept from call to call. That this fails now concerns nobody: it may be broken since long."""
    process_group = sys.modules.get("mpwatch.worker.process_group")
    if process_group is not None:
        with suppress(Exception):
            process_group.destroy()


def _packed(value: object, ended_at: float) -> _Failure | tuple[PickleBundle, float]:
    """A value that cannot be sent is a failure of when it was returned, however long it took to find out."""
    try:
        return _pack_value(value), ended_at
    except BaseException as error:  # noqa: BLE001  whatever it raises
        return _Failure(MessageKind.RAISED, error, ended_at)


def _pack_value(value: object) -> PickleBundle:
    try:
        return return_values.pack(value)
    except MemoryError:
        raise MemoryError("there is not enough memory to pack the return value") from None
    except BaseException as error:  # noqa: BLE001  whatever the value's classes do when they are pickled
        if is_shortage(error):
            raise OSError(with_remedy("the return value could not be packed", error)) from None
        from mpwatch.wire.pickling import unpicklable

        path, part = unpicklable.find("its return value", value, return_values.probe)
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise TypeError(
            f"{path} cannot be sent back: it is of type {kind} ({type(error).__name__}: {error}); return plain data instead"
        ) from None


def _is_ours(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("mpwatch.")


def _tell_what_lingers(channel: Channel) -> None:
    """Python waits for these before it ends; the watcher waits, too, and can then say for what."""
    threads = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    children = [child.name for child in multiprocessing.active_children() if not child.daemon]
    held_by = [
        *([f"non-daemon threads: {', '.join(threads)}"] if threads else []),
        *([f"non-daemon processes: {', '.join(children)}"] if children else []),
    ]
    if held_by:
        channel.send(MessageKind.EXIT_BLOCKED, "; ".join(held_by).encode())
