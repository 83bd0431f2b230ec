"""Calls of idle ranks that the caller's own thread makes. Most short calls are over before the watcher thread wakes up.

It takes longer to pass a call to another thread than to run a short function. So the caller's thread tries first:

    caller's thread: DirectCalls.execute --- CALL ---> ranks --- RETURNED ---> the call is over
                                             |
                                             | no answer in time, another message, an exception; or the watcher thread
                                             v needs the ranks, because one has died or a command has come
    watcher thread:  DirectCalls.stop        takes the call over, with what was sent and received so far

Rules:

1. The watcher thread offers idle ranks while no call is running. Then it does not read their channels. It takes the offer
   back after IDLE_SECONDS without a call.
2. The caller's thread needs a right for each message that it sends or receives (pending_call.py). One call of C takes the
   right, moves the message and records it. So the records are correct wherever an exception interrupts the thread.
3. Before the watcher thread handles events it takes all rights that are left. The caller's thread may be in a signal
   handler, so the watcher thread does not wait for it. It only waits for the end of a call of C that has taken a right.
4. A call that has begun and is not over belongs to the watcher thread as soon as its rights are taken.
5. The caller's thread registers its call before it looks whether the ranks are offered. The watcher thread takes the offer
   back before it looks at the registered calls. So at least one of the two threads notices the other one.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mpwatch.os_support.cpython_private import c_socket
from mpwatch.watcher.pending_call import DirectCall, IdleRanks, PendingCall
from mpwatch.wire.messages import MAX_DESCRIPTORS, encode_call

if TYPE_CHECKING:
    from mpwatch.watcher.processes.process_pool import ProcessPool
    from mpwatch.watcher.processes.rank_handle import RankHandle

IDLE_SECONDS = 0.05  # so long a message of an idle rank may have to wait: it may be at a breakpoint, or make a process group


class DirectCalls:
    """The idle ranks of one watcher thread, and the calls that threads of the caller try to make.

    Args:
        is_observed: returns whether somebody wants the events of calls, which only the watcher thread publishes.
    """

    def __init__(self, is_observed: Callable[[], bool]) -> None:
        self.is_observed = is_observed
        self._offered: dict[tuple[int, ...] | None, IdleRanks] = {}  # by PendingCall.ranks
        self._is_open = False  # whether the offers hold at this moment
        self._calls: list[PendingCall] = []  # that threads of the caller have registered
        self._last_call_at = 0.0

    def execute(self, call: PendingCall, deadline: float) -> bool:
        """Try to make a call. Return whether it is over.

        If not, the watcher thread has to make the call, or to finish it. The same holds if an exception interrupts this
        method.

        Args:
            call: of idle ranks.
            deadline: when to stop, in seconds of CLOCK_MONOTONIC.
        """
        idle_ranks = self._offered.get(call.ranks)
        fds = call.payload.fds
        if idle_ranks is None or len(fds) > MAX_DESCRIPTORS or self.is_observed():
            return False
        frame = encode_call(call.number, call.payload.body)
        ancillary = [(c_socket.SOL_SOCKET, c_socket.SCM_RIGHTS, array("i", fds))] if fds else []
        if call.timeout is not None:
            deadline = min(deadline, call.started_at + call.timeout)
        direct = call.direct = DirectCall(idle_ranks)
        self._calls.append(call)
        is_offered = self._is_open and self._offered.get(call.ranks) is idle_ranks
        if is_offered and not idle_ranks.exits.poll(0) and idle_ranks.begin_call() and direct.send(frame, ancillary):
            direct.receive(deadline)
        if not direct.have_all_returned():
            return False
        direct.heartbeats = idle_ranks.read_heartbeats()
        self._last_call_at = time.monotonic()
        with suppress(ValueError):  # the watcher thread has just done it
            self._calls.remove(call)
        return True

    @property
    def are_offered(self) -> bool:
        """Whether ranks are offered to the caller's threads, and their channels are not read here."""
        return bool(self._offered)

    @property
    def due_at(self) -> float:
        """When the watcher thread takes the offers back if there is no further call."""
        return self._last_call_at + IDLE_SECONDS

    def stop(self) -> list[PendingCall]:
        """Keep the caller's threads from the ranks until `reopen`. Return the calls to take over. For the watcher thread."""
        self._is_open = False
        stopped = []
        for call in list(self._calls):
            assert call.direct is not None  # it is set before
            call.direct.take_rights()
            if call.has_begun() and not call.is_over():
                call.is_taken_over = True
                stopped.append(call)
            with suppress(ValueError):  # the caller's thread has just done it
                self._calls.remove(call)
        return stopped

    def reopen(self) -> None:
        """Let the offers hold again. For the watcher thread, as are the methods below."""
        self._is_open = bool(self._offered)

    def offer(self, ranks: tuple[int, ...] | None, handles: "Sequence[RankHandle]", pool: "ProcessPool") -> None:
        """Offer these ranks to the caller's threads, and stop reading their channels. None: all ranks. Raises OSError."""
        idle_ranks = IdleRanks(handles, pool.slots)
        for handle in handles:
            handle.pause_messages()
        self._offered[ranks] = idle_ranks
        self._last_call_at = time.monotonic()

    def withdraw(self) -> None:
        """Take all offers back, and read the channels again. Raises OSError."""
        while self._offered:
            _, idle_ranks = self._offered.popitem()
            for handle in idle_ranks.handles:
                handle.resume_messages()
