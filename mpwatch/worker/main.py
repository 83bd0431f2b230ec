"""The entry point of a rank. This module runs in the rank's main thread.

    main
      start             die with the watcher, reset signals, map the shared memory, open the channel, send READY
      _serve            for each call: receive it, `_run_call`, send the answer
        _run_call       unpickle the call, run the function, pickle its return value
        _send_value     RETURNED
        _send_failure   FAILING, CALLED_COLLECTIVES if there is a process group, then RAISED or LOAD_FAILED, then DETAILS
        _send_locals    LOCALS, with debug="locals"
      exit              restore signals, destroy the torch process group, send EXIT_BLOCKED if threads or processes remain

Guarantees:

- A rank sends exactly one answer to each call, whatever the function raises. An answer contains the time at which the
  function ended. With the option `backend`, the rank destroys the torch process group only after it has sent the answer.
- A rank prints no traceback, because the watcher reports the exception.
- A rank ends if its watcher is dead.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from contextlib import closing, suppress
from functools import partial
from importlib import import_module

from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.signals import die_if_ended, die_with_writer

# What an answer needs is imported before the function runs: later the package may have been removed or replaced, or the
# function may have changed sys.path, the root folder or the user, or have left no descriptor.
from mpwatch.wire.exceptions.decoder import get_builtin_attribute, read_traceback_text, set_builtin_attribute
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.launch import LaunchInfo
from mpwatch.wire.messages import MessageKind
from mpwatch.wire.pickling import call_payload, return_values
from mpwatch.wire.resource_errors import is_resource_shortage, with_remedy
from mpwatch.wire.shared_memory import STOP_AT, HeartbeatWriter, open_slot
from mpwatch.wire.stop_step import StopReader
from mpwatch.worker import context, debugger_hook, stdio
from mpwatch.worker.channel import Channel
from mpwatch.worker.import_hook import ModuleFinder
from mpwatch.worker.signals import DeferredSignals

CLOSED_CHANNEL = "its function has closed descriptors that it did not open"
NO_PROCESS_GROUP = "Default process group has not been initialized"  # the message of torch.distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType, TracebackType
    from typing import NoReturn

    from mpwatch.wire.pickling.call_payload import FunctionCall
    from mpwatch.wire.pickling.packed import Packed

    ReceivedCall = tuple[int, bytes, list[int] | None]  # the call's number, and the arguments of call_payload.unpack
    Returned = tuple[Packed, float]  # the pickled return value, and when the function returned

_first_excepthook = sys.excepthook  # before any call
_channel: Channel | None = None  # of this rank


def main(launch_info: LaunchInfo) -> None:
    """Run a rank from its start to its exit."""
    _die_with_watcher(launch_info.guardian_fds)
    _reset_signals(launch_info.ignored_signals)
    stdio.leave_terminal()
    memory = open_slot(launch_info.slots_fd, launch_info.slot)
    deferred_signals = DeferredSignals(memory)
    deferred_signals.defer()
    ready_body = stdio.move_stderr(launch_info.stderr_fd)
    if launch_info.is_captured:
        stdio.flush_at_newline()
    global _channel
    channel = _channel = Channel(launch_info.channel_fd)
    context.set_rank(launch_info.worker, HeartbeatWriter(memory), StopReader(memory, STOP_AT), channel.request_stop)
    debugger_hook.install(channel, post_mortem=launch_info.post_mortem)
    ModuleFinder("torch.distributed.distributed_c10d", partial(_answer_when_used, channel)).install()
    channel.send(MessageKind.READY, ready_body)
    preload_error = _preload(launch_info.preload)
    _serve(channel, deferred_signals, preload_error, capture_locals=launch_info.capture_locals)
    _answer_last_request()
    deferred_signals.restore_for_exit()
    _destroy_torch_process_group()
    _report_exit_blockers(channel)
    channel.detach()


# --- Start ---


def _die_with_watcher(guardian_fds: tuple[int, ...]) -> None:
    """Make the kernel kill this rank when the watcher dies.

    When the kernel closes the watcher's end of the pipe of multiprocessing, it sends SIGKILL to the rank. Without F_SETSIG,
    or if a fork of the program holds that end, too, only the guardian kills the rank. The watcher may have been killed
    before it could tell the guardian of this rank. So the rank does that itself, and then looks whether the watcher lives.
    """
    watcher = multiprocessing.parent_process()
    if watcher is not None:
        die_with_writer(watcher.sentinel)
    if guardian_fds:
        orders, *pidfds = guardian_fds
        with suppress(OSError):  # the guardian is gone
            os.write(orders, b"+%d\n" % os.getpgrp())
        die_if_ended(pidfds)
        for fd in guardian_fds:
            os.close(fd)


def _reset_signals(ignored: tuple[int, ...]) -> None:
    """Ignore these signals, unblock all, and reset SIGTERM and SIGCHLD.

    A rank inherits blocked signals from the watcher thread, and ignored ones from the program. If it ignored SIGTERM, only
    SIGKILL could stop it, and if SIGCHLD, it could not wait for its own children.
    """
    if not callable(signal.getsignal(signal.SIGTERM)):  # else the start of the interpreter has set it, as coverage does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _answer_when_used(channel: Channel, module: ModuleType) -> None:
    """Change `module`, so that the rank begins to report its collectives when it creates its first process group."""
    from mpwatch.worker import collectives

    collectives.answer_when_used(module, channel)


def _answer_last_request() -> None:
    """If the watcher has asked for the rank's collectives, answer the watcher before the rank exits."""
    if "mpwatch.worker.collectives" in sys.modules:
        from mpwatch.worker import collectives

        collectives.answer_last_request()


def _preload(names: tuple[str, ...]) -> BaseException | None:
    try:
        for name in names:
            import_module(name)
    except BaseException as error:  # noqa: BLE001  code of the user
        return error
    return None


# --- Calls ---


def _serve(
    channel: Channel, deferred_signals: DeferredSignals, preload_error: BaseException | None, *, capture_locals: bool
) -> None:
    """Run and answer calls until the watcher sends SHUTDOWN or closes the channel. If a module of `preload` cannot be
    imported, the first call fails.
    """
    pid = os.getpid()
    has_returned = False
    while True:
        deferred_signals.prepare_for_call()
        if has_returned:
            _destroy_torch_process_group(only_unkept=True)  # here SIGTERM ends the rank, even if torch hangs
        received = channel.receive_call()
        if received is None:
            return
        outcome = _run_call(received, deferred_signals, preload_error)
        preload_error = None
        if os.getpid() != pid:
            _exit_forked_process(outcome)
        if isinstance(outcome, _Failure):
            _send_failure(channel, outcome)
            if capture_locals:
                _send_locals(channel, outcome)
        else:
            stdio.flush_before_answer()
            _send_value(channel, *outcome)
        has_returned = not isinstance(outcome, _Failure)
        del outcome  # a failure keeps the function's frames and their variables alive
        stdio.flush()


def _run_call(
    received: ReceivedCall, deferred_signals: DeferredSignals, preload_error: BaseException | None
) -> _Failure | Returned:
    """Run a call, and pickle its return value. The user's signal handlers run only during `_load_and_call`."""
    try:
        try:
            value = _load_and_call(received, deferred_signals, preload_error)
        finally:
            deferred_signals.defer()
        returned_at = monotonic()
        return _pack_value(value, returned_at)
    except _LoadError as error:
        return _Failure(MessageKind.LOAD_FAILED, error.error, monotonic())
    except _DebuggedError as error:
        deferred_signals.defer()
        return _Failure(MessageKind.RAISED, error.error, error.raised_at)
    except BaseException as error:  # noqa: BLE001  KeyboardInterrupt and SystemExit are answers, too
        failed_at = monotonic()
        deferred_signals.defer()  # a second time, since the exception may be an interrupt that came before the first `defer`
        return _Failure(MessageKind.RAISED, error, failed_at)


def _load_and_call(received: ReceivedCall, deferred_signals: DeferredSignals, preload_error: BaseException | None) -> object:
    number, body, fds = received
    context.begin_call()
    deferred_signals.restore(number)
    try:
        call = call_payload.unpack(body, fds, context.choose_part)
        if preload_error is not None:
            raise preload_error
    except BaseException as error:  # noqa: BLE001  unpickling imports modules of user code
        raise _LoadError(error) from None
    return _call_function(call)


def _call_function(call: FunctionCall) -> object:
    if call.backend is not None:
        from mpwatch.worker import process_group

        process_group.init(call.backend, call.process_group_version, call.backend_timeout)
    try:
        value = call.fn(*call.args, **call.kwargs)
    except SystemExit as error:
        if not (error.code is None or (isinstance(error.code, int) and error.code == 0)):  # a success for Python, too
            raise
        value = None
    except Exception as error:
        raised_at = monotonic()
        if call.backend is None and error.args and NO_PROCESS_GROUP in str(error.args[0]):
            error.add_note('mpwatch makes the process group if the run has the option backend="gloo", "nccl" or "auto"')
        if debugger_hook.open_post_mortem(error):
            raise _DebuggedError(error, raised_at) from None
        raise
    finally:
        debugger_hook.finish_stepping()
    context.stop_heartbeats()
    return value


def _pack_value(value: object, returned_at: float) -> _Failure | Returned:
    try:
        return pickle_value(value), returned_at
    except BaseException as error:  # noqa: BLE001  the value's classes may raise anything
        return _Failure(MessageKind.RAISED, error, returned_at)


def pickle_value(value: object) -> Packed:
    """Raises TypeError, which names the part that cannot be pickled, or MemoryError or OSError if a resource has run out."""
    try:
        return return_values.pack(value)
    except MemoryError:
        raise MemoryError("there is not enough memory to pack the return value") from None
    except BaseException as error:  # noqa: BLE001  the value's classes may raise anything
        if is_resource_shortage(error):
            raise OSError(with_remedy("the return value could not be packed", error)) from None
        path, part = "its return value", value
        with suppress(ImportError, OSError):
            from mpwatch.wire.pickling import unpicklable

            refused = return_values.find_refused(value)
            found = unpicklable.find_path([(path, value)], refused)
            path, part = (path, value) if found is None else (found, refused)
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise TypeError(
            f"{path} cannot be sent back: it is of type {kind} ({type(error).__name__}: {error}); return plain data instead"
        ) from None


def _exit_forked_process(outcome: _Failure | Returned) -> None:
    """Exit this process, which the user's function has forked. Only the rank itself sends an answer to the watcher."""
    if isinstance(outcome, _Failure):
        with suppress(ImportError, OSError):  # of the module traceback
            sys.stderr.write(read_traceback_text(outcome.make_encoder().plain()))
    stdio.flush()
    os._exit(1 if isinstance(outcome, _Failure) else 0)


# --- Answers ---


def _send_value(channel: Channel, value: Packed, returned_at: float) -> None:
    error = None
    try:
        is_sent = _send_packed(channel, MessageKind.RETURNED, value, returned_at)
    except OSError as refused:
        is_sent, error = True, OSError(with_remedy("the return value could not be sent back", refused))
    finally:
        value.close()
    if error is not None:
        _send_failure(channel, _Failure(MessageKind.RAISED, error, returned_at))
    elif not is_sent:
        _exit_without_channel()


def send_item(value: object) -> None:
    """Send the value of one item of `mpwatch.map`. Raises what `pickle_value` raises, and OSError."""
    assert _channel is not None  # this is a rank
    with closing(pickle_value(value)) as packed:
        if not _send_packed(_channel, MessageKind.ITEM, packed, monotonic()):
            _exit_without_channel()


def _send_packed(channel: Channel, kind: MessageKind, value: Packed, stamp: float) -> bool:
    if value.file is None:
        return channel.send(kind, value.body, stamp)
    return channel.send_file(kind, value.file, stamp)


def _send_failure(channel: Channel, failure: _Failure) -> None:
    """Send FAILING, the text and the traceback, and then the pickle, since the exception's own code may crash or hang."""
    channel.send(MessageKind.FAILING, stamp=failure.at)
    stdio.flush_before_answer()
    if (collectives := sys.modules.get("mpwatch.worker.collectives")) is not None:
        collectives.send_before_failure(channel)
    try:
        encoder = failure.make_encoder()
        plain = encoder.plain()
    except BaseException as error:  # noqa: BLE001  memory has run out, or mpwatch has a bug
        encoder = failure.make_encoder_of(RuntimeError(f"{failure.name} was raised, and could not be encoded: {error!r}"))
        plain = encoder.plain()
    if not channel.send(failure.kind, plain, failure.at):
        _exit_without_channel(read_traceback_text(plain))
    channel.send(MessageKind.DETAILS, encoder.details(), failure.at)
    hook = sys.excepthook
    is_of_user = hook is not _first_excepthook and not (getattr(hook, "__module__", None) or "").startswith("torch.")
    if is_of_user and not isinstance(failure.error, SystemExit):  # torch's prints the traceback
        with suppress(BaseException):
            hook(type(failure.error), failure.error, failure.error.__traceback__)


def _exit_without_channel(traceback_text: str = "") -> NoReturn:
    """Exit as a lost rank, since the answer cannot reach the watcher."""
    with suppress(OSError):  # stderr is closed, too
        sys.stderr.write(f"{traceback_text}mpwatch: the answer of this rank could not be sent: {CLOSED_CHANNEL}\n")
    stdio.flush()
    os._exit(1)


def _send_locals(channel: Channel, failure: _Failure) -> None:
    """The watcher waits for LOCALS. If the variables cannot be encoded, its body is empty."""
    texts = b""
    with suppress(BaseException):  # memory or threads have run out
        texts = failure.make_encoder().locals()
    channel.send(MessageKind.LOCALS, texts, failure.at)


class _Failure:
    """An exception that a call raised. `kind` is RAISED or LOAD_FAILED, and `at` a time of CLOCK_MONOTONIC."""

    def __init__(self, kind: MessageKind, error: BaseException, at: float) -> None:
        self.kind = kind
        self.error = error
        self.at = at

    @property
    def name(self) -> str:
        return type(self.error).__name__

    def make_encoder(self) -> ExceptionEncoder:
        """Remove mpwatch's frames from the start of the exception's traceback, and return an ExceptionEncoder."""
        trace = get_builtin_attribute(self.error, "__traceback__")
        while trace is not None and _is_of_mpwatch(trace):
            trace = trace.tb_next
        set_builtin_attribute(self.error, "__traceback__", trace)
        return ExceptionEncoder(self.error)

    def make_encoder_of(self, error: BaseException) -> ExceptionEncoder:
        """Encode the error that replaces this one, which cannot be sent, with its traceback."""
        set_builtin_attribute(error, "__traceback__", get_builtin_attribute(self.error, "__traceback__"))
        return _Failure(self.kind, error, self.at).make_encoder()


class _LoadError(Exception):
    """Raised if the rank cannot unpickle a call, or cannot import a module of the option `preload`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _DebuggedError(Exception):
    """With debug="post_mortem", this replaces the exception, to keep the time at which the function failed."""

    def __init__(self, error: Exception, raised_at: float) -> None:
        self.error = error
        self.raised_at = raised_at


def _is_of_mpwatch(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("mpwatch.")


# --- Exit ---


def _destroy_torch_process_group(*, only_unkept: bool = False) -> None:
    """Destroy the process group that mpwatch has made, after a successful call, and ignore exceptions.

    The rank has sent its value before, because ranks that still wait for it fail at once. After a failed call, it is not
    destroyed, since two ranks could wait for each other in it.
    """
    process_group = sys.modules.get("mpwatch.worker.process_group")
    if process_group is not None and not (only_unkept and process_group.is_kept()):
        with suppress(Exception):
            process_group.destroy()


def _report_exit_blockers(channel: Channel) -> None:
    """Send to the watcher the names of the non-daemon threads and processes that keep the rank from exiting."""
    threads = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    children = [child.name for child in multiprocessing.active_children() if not child.daemon]
    blockers = [
        *([f"non-daemon threads: {', '.join(threads)}"] if threads else []),
        *([f"non-daemon processes: {', '.join(children)}"] if children else []),
    ]
    if blockers:
        channel.send(MessageKind.EXIT_BLOCKED, "; ".join(blockers).encode(errors="backslashreplace"))
