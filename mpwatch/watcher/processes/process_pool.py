"""The pool of the ranks' processes: starts and reaps them, and owns their pipes, sockets and memory. In the watcher thread.

    ProcessPool --- Selector: the one place where the event loop waits
                --- Guardian: kills the ranks if the calling program is killed
                --- memory file: a slot for each rank, for heartbeats (wire/shared_memory.py)
                --- Rank for each rank --- RankPopen: its process
                                             --- channel: messages in both directions
                                             --- startup file: stderr until the rank is ready
                                             --- stack pipe: stack dumps

A helper is a process that a rank has started in its process group. When the pool reaps a rank, the pool also kills the
rank's helpers.

Guarantee: when the pool is closed, every rank is dead and reaped, and every descriptor of the pool is closed. Only
two kinds of ranks can remain: one that SIGKILL does not end, with a warning, and a dead one that a debugger (ptrace) holds.
"""

import dataclasses
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any, Self

from mpwatch.errors import LaunchError
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.descriptors import STDERR, open_anonymous_file
from mpwatch.os_support.processes import group_exists, group_members, open_pidfd, reap_adopted
from mpwatch.watcher.inbox import Outbox
from mpwatch.watcher.machine.transitions import KILL_SECONDS
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.watcher.processes.guardian import Guardian
from mpwatch.watcher.processes.process import RankPopen, Surroundings
from mpwatch.watcher.processes.rank import Rank
from mpwatch.watcher.processes.rank_environment import RankSetup
from mpwatch.watcher.processes.selector import Selector
from mpwatch.wire.launch import LaunchInfo
from mpwatch.wire.resource_errors import with_remedy
from mpwatch.wire.shared_memory import SLOT_SIZE, Slot

NAME_LENGTH = 80  # of the function's name in a command line
ID_LENGTH = 8  # of the run's id in a command line
# The guardian can get these until its interpreter runs and leaves the calling program's session.
GUARDIAN_BLOCKS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP)


class ProcessPool:
    """A context manager. At its end, it kills the ranks that are still alive. `alive` has those not reaped or abandoned."""

    def __init__(self, outbox: Outbox, output: RankOutput, spec: GroupSpec) -> None:
        self._outbox = outbox
        self._output = output
        self._spec = spec
        self._ignored_signals = tuple(set(spec.stop_policy.signals) - {signal.SIGINT, signal.SIGTERM})
        self.alive: dict[int, Rank] = {}
        self.selector: Selector[Any]
        self.guardian: Guardian
        self._slots: dict[int, int] = {}  # number of the slot, by rank
        self._killed_groups: dict[int, float] = {}  # when each group of a reaped rank was killed that may still have members

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self.selector = stack.enter_context(Selector())
                self._slots_fd = stack.enter_context(open_anonymous_file("mpwatch-slots")).fileno()
                with _block_signals({*self._spec.stop_policy.signals, *GUARDIAN_BLOCKS}):  # the guardian keeps them blocked
                    self.guardian = stack.enter_context(closing(Guardian()))
                self._stderr_fd = os.dup(STDERR)
                stack.callback(os.close, self._stderr_fd)
            except OSError as error:
                raise LaunchError(with_remedy("the ranks cannot be watched", error)) from error
            # The stack calls these in the opposite order, before it closes the descriptors.
            stack.callback(self.wait_for_helpers)
            stack.callback(self._kill_and_reap_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, setup: RankSetup) -> Rank:
        try:
            return self._start(setup)
        except (OSError, RuntimeError) as error:
            raise LaunchError(with_remedy(f"rank {setup.worker.rank} could not be started", error)) from error

    def _start(self, setup: RankSetup) -> Rank:
        worker = setup.worker
        slot_number = self._slots.setdefault(worker.rank, len(self._slots))
        os.ftruncate(self._slots_fd, len(self._slots) * SLOT_SIZE)
        slot = Slot(self._slots_fd, slot_number)
        slot.clear()
        with ExitStack() as kept, ExitStack() as passed:
            channel, rank_channel = socket.socketpair()
            kept.enter_context(channel)
            passed.enter_context(rank_channel)
            channel.setblocking(False)
            stack_pipe, rank_stack_pipe = os.pipe()
            kept.callback(os.close, stack_pipe)
            passed.callback(os.close, rank_stack_pipe)
            startup_file = kept.enter_context(open_anonymous_file("mpwatch-startup"))
            os.set_blocking(stack_pipe, False)
            stdio = self._output.open_stdio(worker, passed)
            stderr = self._stderr_fd if stdio.stderr is None else stdio.stderr
            launch_info = LaunchInfo(
                worker=_worker_fields(worker),
                channel_fd=rank_channel.fileno(),
                slots_fd=self._slots_fd,
                slot=slot_number,
                stderr_fd=stderr,
                stack_fd=rank_stack_pipe,
                is_captured=stdio.is_captured,
                debug=self._spec.debug,
                preload=tuple(self._spec.preload),
                ignored_signals=self._ignored_signals,
            )
            surroundings = Surroundings(
                _describe_rank(worker, self._spec.fn_name),
                setup.env,
                stdout=stdio.stdout,
                stderr=startup_file.fileno(),
                passed_fds=[rank_channel.fileno(), self._slots_fd, stderr, rank_stack_pipe],
                cpus=setup.cpus,
            )
            with _block_signals(self._ignored_signals):
                process = RankPopen.start(launch_info, f"mpwatch-rank-{worker.rank}", surroundings)
            # At once: from here on the end of the pool kills and reaps the rank, whatever is raised.
            rank = self.alive[worker.rank] = Rank(
                setup,
                process,
                channel,
                stack_pipe,
                self.selector,
                rank_stack_fd=rank_stack_pipe,
                startup_file=startup_file,
                slot=slot,
                stdio=stdio,
            )
            kept.pop_all()
            self.guardian.guard(process.pid)
        return rank

    def reap(self, rank: Rank) -> None:
        pid, killed_at = rank.process.pid, monotonic()
        rank.process.reap()
        self.guardian.release(pid)
        if group_exists(pid):
            self._killed_groups[pid] = killed_at
        self._close(rank)

    def _close(self, rank: Rank) -> None:
        del self.alive[rank.number]
        rank.is_reaped = True
        rank.close()
        self._output.end_rank(rank.stdio)

    def abandon(self, rank: Rank) -> None:
        """Log a warning about a rank that cannot be killed, close the connections to it, and never wait for it again."""
        text = "rank %d (pid %s) has not ended after SIGKILL; mpwatch does not wait for it any longer"
        self._outbox.warn(text, rank.number, rank.process.pid)
        self._close(rank)
        rank.process.abandon()

    def _kill_and_reap_all(self) -> None:
        """If the watcher itself has failed, kill and reap the ranks that still exist."""
        for rank in self.alive.values():
            rank.process.send_signal_to_group(signal.SIGKILL)
        deadline = monotonic() + KILL_SECONDS
        with ExitStack() as stack:  # an error with one rank does not keep the others from being reaped
            for rank in list(self.alive.values()):
                stack.callback(self._reap_or_abandon, rank, deadline)

    def _reap_or_abandon(self, rank: Rank, deadline: float) -> None:
        if rank.process.wait_for_exit(deadline):
            self.reap(rank)
        else:
            self.abandon(rank)

    def wait_for_helpers(self) -> None:
        """Wait until the killed helpers of reaped ranks are gone. A restarted rank may need their memory or GPU."""
        while self._killed_groups:
            group, killed_at = self._killed_groups.popitem()
            with suppress(OSError):  # no descriptors are left to read /proc or to wait with
                _wait_for_group(group, killed_at + KILL_SECONDS, self._outbox)
            reap_adopted(group)


def _wait_for_group(group: int, deadline: float, outbox: Outbox) -> None:
    text = "process %d, started by a rank, still exists after SIGKILL; its memory or its GPU may not be free yet"
    for pid in group_members(group):
        pidfd = open_pidfd(pid)
        if pidfd is None:
            continue
        try:
            if not wait([pidfd], max(0.0, deadline - monotonic())):
                outbox.warn(text, pid)
        finally:
            os.close(pidfd)


@contextmanager
def _block_signals(numbers: Iterable[int]) -> Iterator[None]:
    """Start a process within this block. It begins with these signals blocked, until its program has ignored them.

    A scheduler such as SLURM can send a signal to the watcher and to all ranks, where it must have no effect.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker_fields(worker: Worker) -> dict[str, Any]:
    """Without `state`, which is empty when the rank starts."""
    return {field.name: getattr(worker, field.name) for field in dataclasses.fields(worker) if field.name != "state"}


def _describe_rank(worker: Worker, fn_name: str) -> list[str]:
    fn = [f"fn={_make_printable(fn_name)[:NAME_LENGTH]}"] if fn_name else []
    return ["mpwatch", f"rank={worker.rank}/{worker.world_size}", *fn, f"run={_make_printable(worker.run_id)[:ID_LENGTH]}"]


def _make_printable(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)
