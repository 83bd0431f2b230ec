"""Pass signals of the host program on to the ranks: the option `forward_signals`.

    kernel ---> HostSignals: handler in the caller's thread --- ForwardSignal ---> event loop: forward_signal ---> ranks

`check_forwarding` and `find_handlers` run in the caller's thread, `forward_signal` runs in the watcher thread.
"""

import os
import signal
import threading
from collections.abc import Collection, Mapping
from typing import Any

from mpwatch.os_support.processes import read_process_state
from mpwatch.os_support.signals import get_handler, name_signal
from mpwatch.results.report import format_ranks
from mpwatch.watcher.commands import ForwardSignal
from mpwatch.watcher.machine.transitions import RankPhase
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.processes.rank_handle import RankHandle
from mpwatch.watcher.restarts.restart_group import RestartGroup

IN_MAIN_THREAD_ONLY = (
    "forward_signals needs a run in the main thread, because Python runs signal handlers in the main thread only; call "
    "mpwatch.run there, or leave forward_signals out"
)


def check_forwarding(signals: Collection[int]) -> None:
    """Check that this thread can take these signals over and restore their handlers. Raises ValueError."""
    if signals and threading.current_thread() is not threading.main_thread():
        raise ValueError(IN_MAIN_THREAD_ONLY)
    for signum in set(signals) - find_handlers(signals).keys():
        raise ValueError(
            f"forward_signals may not have {name_signal(signum)} now: C code of this program handles it, as after "
            "faulthandler.register, and mpwatch could not restore that handler; unregister it, or leave the signal out"
        )


def find_handlers(signals: Collection[int]) -> dict[int, Any]:
    """Return the host's handlers of these signals, SIG_DFL and SIG_IGN included. Leave out signals that C code handles.

    Python knows the handlers that it has set itself; the kernel knows which signals are caught.
    """
    handlers = {signum: handler for signum in signals if (handler := get_handler(signum)) is not None}
    defaults = [signum for signum, handler in handlers.items() if handler == signal.SIG_DFL]
    state = read_process_state(os.getpid()) if defaults else None
    for signum in defaults:
        if state is not None and state.catches(signum):
            del handlers[signum]
    return handlers


def forward_signal(
    command: ForwardSignal,
    groups: Collection[RestartGroup],
    handles: Mapping[int, RankHandle],
    deferred_log: DeferredLog,
) -> None:
    """Send a signal to each rank that is running its function and catches the signal. Log a warning about the others.

    The default action of most signals would end such a rank.
    """
    running = [
        rank
        for group in groups
        if command.call is None or command.call is group.call
        for rank in group.machine.phase_table.ranks_in(RankPhase.RUNNING)
    ]
    left_out = []
    for handle in (handles[rank] for rank in sorted(running)):
        state = read_process_state(handle.process.pid)
        if state is not None and state.catches(command.signum):
            handle.process.send_signal(command.signum)
        elif state is None or state.letter not in "ZX":  # otherwise it has just ended
            left_out.append(handle.observations.worker.rank)
    if left_out:
        text = "%s was not passed on to %s: without a handler for it, set by the function, the signal could end a rank"
        deferred_log.warning(text, name_signal(command.signum), format_ranks(left_out))
