"""The caller's own thread calls idle ranks directly.

Passing a call to another thread takes longer than running a short function. So the caller's thread first tries to make the
call alone:

    caller's thread: DirectCalls.execute --- CALL ---> ranks --- RETURNED ---> the call is over
                                             |
                                             | no answer in time, another message, an exception; or the watcher thread
                                             v needs the ranks, because one has died or a command has come
    watcher thread:  DirectCalls.stop        takes the call over, with what was sent and received so far

Rules:

1. While no call is running, the watcher thread offers idle ranks: the caller's threads may call these ranks directly. While
   a rank is offered, the watcher thread does not read the rank's channel. After IDLE_SECONDS without a call, the watcher
   thread withdraws the offer.
2. Each direct call has two lists of channels, `_to_send` and `_to_receive` (pending_call.py). The caller's thread may use a
   channel only after it has removed the channel from one of these lists. To send a message, the caller's thread calls C
   code. The C code removes a channel from `_to_send`, sends the message over this channel, and records the message. To
   receive a message, the C code removes a channel from `_to_receive`, receives the message from this channel, and records
   the message. No exception interrupts a call into C code, so the records are always correct.
3. Before the watcher thread handles events, it removes all channels from `_to_send` and `_to_receive`
   (`DirectCall.take_rights`). After this removal, the caller's thread cannot send or receive another message. If the
   caller's thread is sending or receiving a message at this moment, the watcher thread waits at most RECORD_SECONDS until
   the message is recorded (pending_call.py). The watcher thread does not wait for Python code of the caller's thread, for
   example for a slow signal handler.
4. When the watcher thread has emptied the two lists of an unfinished call, the watcher thread finishes this call.
5. The caller's thread first registers its call, and then checks whether it may call the ranks directly. The watcher thread
   withdraws the offer before it reads the registered calls. So the watcher thread finds every call that a caller's thread
   has begun.
"""

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.cpython_private import c_socket
from mpwatch.watcher.pending_call import DirectCall, IdleRanks, PendingCall
from mpwatch.wire.messages import MAX_DESCRIPTORS, encode_call

if TYPE_CHECKING:
    from mpwatch.watcher.processes.process_pool import ProcessPool
    from mpwatch.watcher.processes.rank_handle import RankHandle

IDLE_SECONDS = 0.05  # a message of an idle rank may have to wait so long, if it is at a breakpoint or makes a process group


class DirectCalls:
    """Sends calls to idle ranks directly from the caller's threads, without the watcher thread.

    Threads of the caller call `execute`. All other methods are only for the watcher thread.

    Args:
        is_observed: returns whether an observer wants the events of calls. Only the watcher thread publishes them.
    """

    def __init__(self, is_observed: Callable[[], bool]) -> None:
        self.is_observed = is_observed
        self._offered: dict[tuple[int, ...] | None, IdleRanks] = {}  # by PendingCall.ranks
        self._is_open = False  # whether the offers hold at this moment
        self._calls: list[PendingCall] = []  # that threads of the caller have registered
        self._last_call_at = 0.0

    def execute(self, call: PendingCall, deadline: float) -> bool:
        """Try to make a call without the watcher thread. Return True if the function has returned in all ranks.

        If this method returns False, the watcher thread makes the call. The watcher thread does not send the call again to
        ranks that have already received it. If an exception interrupts this method before the first rank has received the
        call, no rank receives the call.

        Args:
            call: the call to make.
            deadline: when to stop waiting for answers, in seconds of CLOCK_MONOTONIC.
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
        self._last_call_at = monotonic()
        with suppress(ValueError):  # the watcher thread has just done it
            self._calls.remove(call)
        return True

    @property
    def are_offered(self) -> bool:
        """Whether the watcher thread has offered any ranks for direct calls."""
        return bool(self._offered)

    @property
    def due_at(self) -> float:
        """The time at which the watcher thread withdraws the offers, in seconds of CLOCK_MONOTONIC."""
        return self._last_call_at + IDLE_SECONDS

    def stop(self) -> list[PendingCall]:
        """Prevent direct calls until `reopen` is called. Return the unfinished calls, which the watcher thread continues."""
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
        """Allow direct calls to the offered ranks again."""
        self._is_open = bool(self._offered)

    def offer(self, ranks: tuple[int, ...] | None, handles: "Sequence[RankHandle]", pool: "ProcessPool") -> None:
        """Let the caller's threads call these ranks directly. Stop reading the channels of the ranks.

        If `ranks` is None, offer all ranks for direct calls. Raises OSError.
        """
        idle_ranks = IdleRanks(handles, pool.slots)
        for handle in handles:
            handle.pause_messages()
        self._offered[ranks] = idle_ranks
        self._last_call_at = monotonic()

    def withdraw(self) -> None:
        """Withdraw all offers. The watcher thread then resumes reading the channels of the ranks. Raises OSError."""
        while self._offered:
            _, idle_ranks = self._offered.popitem()
            for handle in idle_ranks.handles:
                handle.resume_messages()
