"""Forwards the signals in the option `forward_signals` from the calling program to the ranks.

    kernel ---> HostSignals: handler in the caller's thread --- ForwardSignal ---> event loop: forward_signal ---> ranks

`forward_signal` runs in the watcher thread.
"""

from collections.abc import Collection, Mapping

from mpwatch.os_support.processes import read_process_state
from mpwatch.os_support.signals import name_signal
from mpwatch.results.failure import format_ranks
from mpwatch.watcher.commands import ForwardSignal
from mpwatch.watcher.machine.transitions import RankPhase
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.processes.rank_handle import RankHandle
from mpwatch.watcher.restarts.restart_group import RestartGroup


def forward_signal(
    command: ForwardSignal,
    groups: Collection[RestartGroup],
    handles: Mapping[int, RankHandle],
    deferred_log: DeferredLog,
) -> None:
    """Send a signal to each rank that is running its function and catches the signal.

    If a rank runs its function but has no handler for the signal, send nothing to this rank, because most signals end a
    process that has no handler. Log a warning that names these ranks.
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
        text = "%s was not passed on to %s: only a rank whose function has set a handler for the signal gets it"
        deferred_log.warning(text, name_signal(command.signum), format_ranks(left_out))
