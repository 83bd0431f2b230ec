"""The ranks as the watcher has them: processes, their lines, slots of memory, the gate and the guardian, all owned here.

Guarantee: when the crew is closed, every rank it started is dead and reaped (but for one that not even SIGKILL ends, which
is left to the kernel), and everything it opened is closed.
"""

import dataclasses
import os
import signal
import socket
import time
from contextlib import ExitStack, closing
from multiprocessing import current_process
from multiprocessing.connection import wait
from typing import Any, Self

from mpwatch.errors import LaunchError
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.cpython_private import is_importing_main
from mpwatch.os_support.descriptors import STDERR, anonymous_file
from mpwatch.os_support.processes import group_exists, group_members, open_pidfd
from mpwatch.watcher.machine.transitions import KILL_SECONDS
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.watcher.processes.guardian import Guardian
from mpwatch.watcher.processes.process import WatchedProcess
from mpwatch.watcher.processes.rank_handle import RankHandle
from mpwatch.watcher.processes.selector import Selector
from mpwatch.wire.launch import LaunchInfo
from mpwatch.wire.messages import Message, MessageKind
from mpwatch.wire.pickling.call_payload import Payload
from mpwatch.wire.resource_errors import with_remedy
from mpwatch.wire.shared_memory import (
    SLOT,
    HeartbeatSample,
    clear_slot,
    forget_pulse,
    note_interrupt,
    read_answer,
    read_beat,
    read_pulse,
)


class ProcessPool:
    """Owns the ranks' processes and all that they need. A context manager: whoever is alive at its end is killed."""

    def __init__(self, deferred_log: DeferredLog, output: RankOutput) -> None:
        self.deferred_log = deferred_log
        self._output = output
        self.handles: dict[int, RankHandle] = {}
        self.selector: Selector[Any]
        self._slots: dict[int, int] = {}  # which is whose, by rank
        self._held: dict[WatchedProcess, float] = {}  # dead since that time, but a debugger has not yet let go of them
        self._groups: dict[int, float] = {}  # of buried ranks, with helpers that were killed at that time, but not gone yet

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self.selector = stack.enter_context(Selector())
                self._slots_fd = stack.enter_context(anonymous_file("mpwatch-slots")).fileno()
                self.guardian = stack.enter_context(closing(Guardian(self.deferred_log)))
                self._stderr_fd = os.dup(STDERR)
                stack.callback(os.close, self._stderr_fd)
            except OSError as error:
                raise LaunchError(with_remedy("the ranks cannot be watched", error)) from error
            stack.callback(self.await_helpers)
            stack.callback(self._await_debuggers)
            stack.callback(self._kill_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, worker: Worker, env: dict[str, str]) -> RankHandle:
        """Start a rank. Raises LaunchError."""
        try:
            return self._start(worker, env)
        except (OSError, RuntimeError, AssertionError) as error:
            raise LaunchError(_why_not_started(worker, error)) from error

    def _start(self, worker: Worker, env: dict[str, str]) -> RankHandle:
        slot = self._slot_for(worker.rank)
        with ExitStack() as kept, ExitStack() as passed:
            ours, theirs = map(passed.enter_context, socket.socketpair())
            ours.setblocking(False)
            pipe_ours, pipe_theirs = os.pipe()
            kept.callback(os.close, pipe_ours)
            passed.callback(os.close, pipe_theirs)
            os.set_blocking(pipe_ours, False)
            stdio = self._output.open(worker, passed)
            stderr = self._stderr_fd if stdio.stderr is None else stdio.stderr
            launch_info = LaunchInfo(
                _fields_of(worker), theirs.fileno(), self._slots_fd, slot, stderr, is_captured=stdio.are_ours
            )
            fds = [theirs.fileno(), self._slots_fd, stderr]
            process = WatchedProcess(launch_info, env, fds, (stdio.stdout, pipe_theirs), f"mpwatch-rank-{worker.rank}")
            process.start()
            channel = socket.socket(fileno=ours.detach())
            kept.pop_all()
        handle = self.handles[worker.rank] = RankHandle(
            worker, process, channel, pipe_ours, stdio=stdio, deferred_log=self.deferred_log
        )
        self.guardian.guard(process.child_pid)
        return handle

    def _slot_for(self, rank: int) -> int:
        if rank in self._slots:  # it has lived before
            clear_slot(self._slots_fd, self._slots[rank])
        else:
            self._slots[rank] = len(self._slots)
            os.ftruncate(self._slots_fd, len(self._slots) * SLOT)
        return self._slots[rank]

    def call(self, handle: RankHandle, payload: Payload) -> None:
        """Send a rank its call, and what its interpreter has printed: it has its stderr now, and may wait for who reads it.

        Raises LaunchError.
        """
        try:
            if handle.stacks.printed:
                handle.send_file(MessageKind.STARTUP_OUTPUT, handle.stacks.printed)
                handle.stacks.printed = b""
            handle.calls += 1
            handle.send(MessageKind.CALL, payload.fds, payload.body)
        except OSError as error:
            raise LaunchError(
                with_remedy(f"the call could not be sent to rank {handle.observations.worker.rank}", error)
            ) from error

    def read_black_box(self, handle: RankHandle) -> list[Message]:
        """What a dead rank could not send any more, and has left in its black box."""
        rank = handle.observations.worker.rank
        try:
            return read_answer(self._slots_fd, self._slots[rank])
        except ValueError as error:  # its own memory has been overwritten
            self.deferred_log.debug("the black box of rank %d: %s", rank, error)
            return []

    def interrupt(self, handle: RankHandle) -> None:
        """By SIGINT, and in the call that it is at, not in another that it may be at when the signal arrives."""
        note_interrupt(self._slots_fd, self._slots[handle.observations.worker.rank], handle.calls)
        handle.process.signal_rank(signal.SIGINT)

    def pulse_of(self, handle: RankHandle) -> HeartbeatSample:
        """When a rank was last heard of, and what it last reported."""
        return read_pulse(self._slots_fd, self._slots[handle.observations.worker.rank])

    def beat_of(self, handle: RankHandle) -> float | None:
        """The first of that alone, which is quick."""
        return read_beat(self._slots_fd, self._slots[handle.observations.worker.rank])

    def forget_pulse(self, handle: RankHandle) -> None:
        """What it said in an earlier call is none of the next."""
        forget_pulse(self._slots_fd, self._slots[handle.observations.worker.rank])

    def reap(self, handle: RankHandle) -> None:
        """Reap a dead rank."""
        pid = handle.process.child_pid
        del self.handles[handle.observations.worker.rank]
        reaped_at = time.monotonic()
        try:
            handle.close()
        finally:  # even if the host has closed descriptors that are none of its own
            if not handle.process.reap():
                self._held[handle.process] = reaped_at
            self._output.end(handle.stdio, handle.stacks.unsaid)
            self.guardian.release(pid)
            if group_exists(pid):
                self._groups[pid] = reaped_at

    def abandon(self, handle: RankHandle) -> None:
        """Leave a rank that cannot be killed to the kernel."""
        handle.close()
        handle.process.abandon()
        self._output.end(handle.stdio, handle.stacks.unsaid)
        del self.handles[handle.observations.worker.rank]

    def _kill_all(self) -> None:
        """For the ranks that are left when something has gone wrong on our side."""
        for handle in self.handles.values():
            handle.process.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        with ExitStack() as stack:  # one that fails does not keep the others from being buried
            for handle in self.handles.values():
                stack.callback(self._reap_by, deadline, handle)

    def _reap_by(self, deadline: float, handle: RankHandle) -> None:
        if handle.process.has_ended_by(deadline):
            self.reap(handle)
        else:
            self.abandon(handle)

    def _await_debuggers(self) -> None:
        """A debugger that does not look keeps a dead rank from being reaped."""
        for process, died_at in self._held.items():
            while not (is_reaped := process.reap()) and time.monotonic() < died_at + KILL_SECONDS:
                pass  # it waits a while itself
            if not is_reaped:
                pid = process.child_pid
                self.deferred_log.warning("%s (pid %d) is dead, but held by a debugger: left behind", process.name, pid)
                process.abandon()

    def await_helpers(self) -> None:
        """What ranks had started is killed with them, but takes its time to go if it held much memory, or a GPU."""
        while self._groups:
            group, killed_at = self._groups.popitem()
            deadline = killed_at + KILL_SECONDS
            try:
                _await_members(group, deadline, self.deferred_log)
            except OSError:  # there are no descriptors left to look at /proc, or to wait, with
                while group_exists(group) and time.monotonic() < deadline:
                    time.sleep(0.001)


def _await_members(group: int, deadline: float, deferred_log: DeferredLog) -> None:
    for pid in group_members(group):
        pidfd = open_pidfd(pid)
        if pidfd is None:
            continue
        try:
            if not wait([pidfd], max(0.0, deadline - time.monotonic())):
                deferred_log.warning("process %d, started by a rank, has not yet gone although it has been killed", pid)
        finally:
            os.close(pidfd)


def _fields_of(worker: Worker) -> dict[str, Any]:
    """What a rank needs to know itself, without `state`, which is its own."""
    return {field.name: getattr(worker, field.name) for field in dataclasses.fields(worker) if field.name != "state"}


def _why_not_started(worker: Worker, error: Exception) -> str:
    if is_importing_main():
        return (
            "mpwatch was called while __main__ is being imported again, by a process that multiprocessing has spawned (a "
            "DataLoader's worker, say); put the call under: if __name__ == '__main__':"
        )
    what = f"rank {worker.rank} could not be started"
    if current_process().daemon:
        return f"{what}: {error}; start the run in a process that is not daemonic"
    return with_remedy(what, error)
