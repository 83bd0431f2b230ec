"""Calls of idle ranks that the caller's own thread makes. Most short calls are over before the watcher thread wakes up.

To pass a call to another thread and its answer back takes longer than a short function. So the caller's thread tries first:

    caller's thread: DirectCalls.execute --- CALL ---> ranks --- RETURNED ---> the call is over
                                             |
                                             | no answer in time, another message, an exception; or the watcher
                                             v thread needs the ranks: one has died, or a command has come
    watcher thread:  DirectCalls.take_over   goes on with the call, from what the caller's thread has sent and received

Rules:

1. The watcher thread offers idle ranks while no call is running. Then it does not read their channels.
2. The thread that holds the lock owns the offered channels and the state of the ranks. The event loop holds the lock while
   it handles events. If the caller's thread has the lock, the event loop wakes it up, and it leaves the call at once.
3. The caller's thread notes each message by the same call of C that sends or receives it. So a DirectCall is right wherever
   an exception, such as KeyboardInterrupt, ends the attempt.
4. A call that has begun and is not over belongs to the watcher thread as soon as the lock is free.
"""

import socket
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING

from mpwatch.os_support.cpython_private import c_socket
from mpwatch.os_support.descriptors import MSG_CMSG_CLOEXEC, MSG_NOSIGNAL, SIZE_OF_INT
from mpwatch.watcher.pending_call import DirectCall, IdleRanks, PendingCall, is_return_value
from mpwatch.watcher.wakeup_pipe import WakeupPipe
from mpwatch.wire.messages import MAX_DESCRIPTORS, encode_call

if TYPE_CHECKING:
    from mpwatch.watcher.processes.process_pool import ProcessPool
    from mpwatch.watcher.processes.rank_handle import RankHandle

READ_SIZE = 1 << 14  # bytes; a longer answer is left to the watcher thread
FD_ROOM = c_socket.CMSG_SPACE(SIZE_OF_INT)


class DirectCalls:
    """The idle ranks of one watcher thread, and the call that the caller's thread tries to make.

    The watcher thread holds the lock as a context manager. It calls `offer`, `withdraw` and `take_over` within. Raises
    LaunchError if there is no descriptor left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakeup = WakeupPipe()
        self._offered: dict[tuple[int, ...] | None, IdleRanks] = {}  # by PendingCall.ranks
        self._current: PendingCall | None = None

    def execute(self, call: PendingCall, deadline: float) -> bool:
        """Try to make a call until `deadline` (CLOCK_MONOTONIC). Return False if it, or its rest, is for the watcher thread.

        That is so, too, if an exception interrupts this method.
        """
        idle_ranks = self._offered.get(call.ranks)
        fds = call.payload.fds
        if idle_ranks is None or len(fds) > MAX_DESCRIPTORS or self._lock.locked():
            return False
        frame = [encode_call(call.number, call.payload.body)]
        ancillary = [(c_socket.SOL_SOCKET, c_socket.SCM_RIGHTS, array("i", fds))] if fds else []
        if call.timeout is not None:
            deadline = min(deadline, call.started_at + call.timeout)
        with self._lock:
            if self._offered.get(call.ranks) is not idle_ranks or idle_ranks.exits.poll(0):
                return False
            for handle in idle_ranks.handles:
                idle_ranks.pool.begin_call(handle)
            call.direct, self._current = DirectCall(idle_ranks), call
            with suppress(OSError):  # a rank is dying, or has closed its end
                call.direct.sent.extend(
                    map(socket.socket.sendmsg, idle_ranks.channels, repeat(frame), repeat(ancillary), repeat(MSG_NOSIGNAL))
                )
                _receive_answers(call.direct, deadline)
            if not call.direct.have_all_returned():
                return False
            self._current = None
            call.direct.heartbeats = list(map(idle_ranks.pool.read_heartbeat, idle_ranks.handles))
            return True

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wakeup.wake()
            self._lock.acquire()
            self._wakeup.drain()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def offer(self, ranks: tuple[int, ...] | None, handles: "Sequence[RankHandle]", pool: "ProcessPool") -> None:
        """Let the caller's threads call these ranks, and read their channels. None: all ranks."""
        for handle in handles:
            handle.pause_messages()
        self._offered[ranks] = IdleRanks(handles, self._wakeup, pool)

    def withdraw(self) -> None:
        """Let the watcher thread read all channels again. Raises OSError."""
        while self._offered:
            _, idle_ranks = self._offered.popitem()
            for handle in idle_ranks.handles:
                handle.resume_messages()

    @property
    def are_offered(self) -> bool:
        """Whether the caller's threads may call ranks."""
        return bool(self._offered)

    def take_over(self) -> PendingCall | None:
        """Return the call that has begun and is not over, for the watcher thread to go on with. None: there is none."""
        call, self._current = self._current, None
        if call is None or not call.has_begun() or call.is_over():
            return None
        call.is_taken_over = True
        return call

    def close(self) -> None:
        """Close the wake-up pipe. No thread uses the ranks any more."""
        self._wakeup.close()


def _receive_answers(direct: DirectCall, deadline: float) -> None:
    """Receive the answer of each rank. Leave the rest if something else happens than that the function returns."""
    idle_ranks = direct.idle_ranks
    for channel, (poll, only_answer) in zip(idle_ranks.channels, idle_ranks.waits, strict=True):
        if poll.poll(max(0.0, deadline - time.monotonic()) * 1000) != only_answer:
            return
        direct.received.extend(map(socket.socket.recvmsg, [channel], [READ_SIZE], [FD_ROOM], [MSG_CMSG_CLOEXEC]))
        if not is_return_value(direct.received[-1]):
            return
