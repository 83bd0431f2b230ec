"""The entry point of a rank. This module runs in the rank's main thread.

    main
      start             die with the watcher, reset signals, map the shared memory, open the channel, send READY
      _serve            for each call: receive it, `_run_call`, send the answer
        _run_call       unpickle the call, run the function, pickle its return value
        _send_value     RETURNED
        _send_failure   FAILING, CALLED_COLLECTIVES if there is a process group, then RAISED or LOAD_FAILED, then DETAILS,
                        and LOCALS with debug="locals"
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
from mpwatch.os_support.signals import die_with_writer

# What an answer needs is imported before the function runs: later the package may have been removed or replaced, or the
# function may have changed sys.path, the root folder or the user, or have left no descriptor.
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.launch import LaunchInfo
from mpwatch.wire.messages import MAIN_THREAD, MessageKind
from mpwatch.wire.pickling import call_payload, return_values
from mpwatch.wire.resource_errors import is_resource_shortage
from mpwatch.wire.shared_memory import RankSlot
from mpwatch.worker import context, debugger, stdio
from mpwatch.worker.channel import Channel
from mpwatch.worker.import_hook import ModuleFinder
from mpwatch.worker.signals import DeferredSignals
from mpwatch.worker.stack_dumps import register_stack_dumps

NO_PROCESS_GROUP = "Default process group has not been initialized"  # the message of torch.distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, NoReturn

    from mpwatch.wire.pickling.call_payload import FunctionCall
    from mpwatch.wire.pickling.packed import Packed

    Outcome = tuple[MessageKind, Any, float]  # the kind of the answer, the packed value or the exception, and the time

_first_excepthook = sys.excepthook  # before any call
_channel: Channel | None = None  # of this rank


def main(launch_info: LaunchInfo) -> None:
    watcher = multiprocessing.parent_process()
    assert watcher is not None
    die_with_writer(watcher.sentinel)
    _reset_signals(launch_info.ignored_signals)
    stdio.leave_terminal()
    slot = RankSlot(launch_info.slots_fd, launch_info.slot)
    deferred_signals = DeferredSignals(slot)
    deferred_signals.defer()
    startup_output = stdio.move_stderr(launch_info.stderr_fd)
    main_thread = register_stack_dumps(launch_info.stack_fd)
    if launch_info.is_captured:
        stdio.flush_at_newline()
    global _channel
    channel = _channel = Channel(launch_info.channel_fd)
    context.set_rank(launch_info.worker, slot, channel.request_stop)
    debugger.install(channel, slot, post_mortem=launch_info.debug == "post_mortem")
    ModuleFinder("torch.distributed.distributed_c10d", partial(_answer_when_used, channel)).install()
    channel.send(MessageKind.READY, MAIN_THREAD.pack(main_thread))
    stdio.write_startup_output(startup_output)
    preload_error = _preload(launch_info.preload)
    _serve(channel, deferred_signals, preload_error, capture_locals=launch_info.debug == "locals")
    deferred_signals.restore_for_exit()
    _destroy_torch_process_group()
    _report_exit_blockers(channel)
    channel.detach()


# --- Start ---


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
    from mpwatch.worker import collectives

    collectives.answer_when_used(module, channel)


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
    """Run and answer calls until no more will come. If a module of `preload` cannot be imported, the first call fails."""
    pid = os.getpid()
    has_returned = False
    while True:
        deferred_signals.prepare_for_call()
        if has_returned:
            _destroy_torch_process_group(only_unkept=True)  # here SIGTERM ends the rank, even if torch hangs
        received = channel.receive_call()
        if received is None:
            return
        kind, result, ended_at = _run_call(*received, deferred_signals, preload_error)
        preload_error = None
        has_returned = kind is MessageKind.RETURNED
        if os.getpid() != pid:  # the function has forked; only the rank itself sends an answer
            if not has_returned:
                _print_traceback(result)
            stdio.flush()
            os._exit(0 if has_returned else 1)
        if has_returned:
            stdio.flush_before_answer()
            _send_value(channel, kind, result, ended_at)
        else:
            _send_failure(channel, kind, result, ended_at, capture_locals=capture_locals)
        del result  # an exception keeps the function's frames and their variables alive
        stdio.flush()


def _run_call(
    number: int, body: bytes, fds: list[int] | None, deferred_signals: DeferredSignals, preload_error: BaseException | None
) -> Outcome:
    """Run a call, and pickle its return value. The user's signal handlers run only between `restore` and `defer`."""
    kind, ended_at = MessageKind.LOAD_FAILED, 0.0
    try:
        try:
            context.begin_call()
            deferred_signals.restore(number)
            call = call_payload.unpack(body, fds, context.choose_part)
            if preload_error is not None:
                raise preload_error
            kind = MessageKind.RAISED
            value = _call_function(call)
            ended_at = monotonic()
        except Exception as error:
            ended_at = monotonic()
            if kind is MessageKind.RAISED:
                debugger.open_post_mortem(error)
            raise
        finally:
            debugger.finish_stepping()
            deferred_signals.defer()
        return MessageKind.RETURNED, _pickle_value(value), ended_at
    except BaseException as error:  # noqa: BLE001  KeyboardInterrupt and SystemExit are answers, too
        ended_at = ended_at or monotonic()
        deferred_signals.defer()  # a second time, since the exception may be an interrupt that came before the first `defer`
        return kind, error, ended_at


def _call_function(call: FunctionCall) -> object:
    if call.backend is not None:
        from mpwatch.worker import process_group

        process_group.init(call.backend, call.process_group_version, call.backend_timeout)
    try:
        value = call_user(call.fn, *call.args, **call.kwargs)
    except Exception as error:
        if call.backend is None and error.args and NO_PROCESS_GROUP in str(error.args[0]):
            error.add_note(
                'mpwatch makes the process group if all ranks are called with the option backend="gloo", "nccl" or "auto"'
            )
        raise
    context.stop_heartbeats()
    return value


def call_user(fn: Callable[..., object], /, *args: Any, **kwargs: Any) -> object:
    try:
        return fn(*args, **kwargs)
    except SystemExit as error:
        if error.code is None or (isinstance(error.code, int) and error.code == 0):  # a success for Python, too
            return None
        raise


def _pickle_value(value: object) -> Packed:
    """Raises TypeError, which names the part that cannot be pickled, or MemoryError or OSError if a resource has run out."""
    try:
        return return_values.pack(value)
    except BaseException as error:
        if is_resource_shortage(error):
            raise
        from mpwatch.wire.pickling import unpicklable

        part, _ = unpicklable.find_refused(value) or (value, None)
        path = unpicklable.find_path([("its return value", value)], part)
        if path is None:  # pickling has made the part
            path, part = "its return value", value
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise TypeError(
            f"{path} cannot be sent back: it is of type {kind} ({type(error).__name__}: {error}); return plain data instead"
        ) from None


# --- Answers ---


def send_item(value: object) -> None:
    """Send the value of one item of `mpwatch.map`. Raises what `_pickle_value` raises."""
    assert _channel is not None  # this is a rank
    _send_value(_channel, MessageKind.ITEM, _pickle_value(value), monotonic())


def _send_value(channel: Channel, kind: MessageKind, value: Packed, stamp: float) -> None:
    with closing(value):
        if not channel.send(kind, value.body, stamp, fd=None if value.file is None else value.file.fileno()):
            _exit_without_channel()


def _send_failure(channel: Channel, kind: MessageKind, error: BaseException, at: float, *, capture_locals: bool) -> None:
    """Send FAILING, the text and the traceback, and then the pickle, since the exception's own code may crash or hang."""
    channel.send(MessageKind.FAILING, stamp=at)
    stdio.flush_before_answer()
    if (collectives := sys.modules.get("mpwatch.worker.collectives")) is not None:
        collectives.send_before_failure(channel)
    try:
        _remove_own_frames(error)
        encoder = ExceptionEncoder(error)
        plain = encoder.plain()
    except BaseException as bug:  # noqa: BLE001  memory has run out, or mpwatch has a bug
        encoder = ExceptionEncoder(RuntimeError(f"{type(error).__name__} was raised, and could not be encoded: {bug!r}"))
        plain = encoder.plain()
    if not channel.send(kind, plain, at):
        _print_traceback(error)
        _exit_without_channel()
    channel.send(MessageKind.DETAILS, encoder.details(), at)
    if capture_locals:
        channel.send(MessageKind.LOCALS, encoder.locals(), at)
    hook = sys.excepthook
    is_of_user = hook is not _first_excepthook and not (getattr(hook, "__module__", None) or "").startswith("torch.")
    if is_of_user and not isinstance(error, SystemExit):  # torch's prints the traceback
        with suppress(BaseException):
            hook(type(error), error, error.__traceback__)


def _print_traceback(error: BaseException) -> None:
    sys.__excepthook__(type(error), error, error.__traceback__)


def _exit_without_channel() -> NoReturn:
    with suppress(OSError):  # stderr is closed, too
        why = "its function has closed descriptors that it did not open, or too many files are on their way"
        sys.stderr.write(f"mpwatch: the answer of this rank could not be sent: {why}\n")
    stdio.flush()
    os._exit(1)


def _remove_own_frames(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("mpwatch."):
        trace = trace.tb_next
    BaseException.__setattr__(error, "__traceback__", trace)  # a frozen dataclass has another __setattr__


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
    blockers = {
        "threads": [
            thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
        ],
        "processes": [child.name for child in multiprocessing.active_children() if not child.daemon],
    }
    if text := "; ".join(f"non-daemon {what}: {', '.join(names)}" for what, names in blockers.items() if names):
        channel.send(MessageKind.EXIT_BLOCKED, text.encode(errors="backslashreplace"))
