"""The data of one call to ranks: the request, the answer, and the messages that the caller's thread has sent or received.

The modules direct_calls.py and commands.py show the two ways in which a call reaches the ranks.
"""

import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import TYPE_CHECKING, Any

from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.cpython_private import c_socket
from mpwatch.os_support.descriptors import MSG_CMSG_CLOEXEC, MSG_NOSIGNAL, SIZE_OF_INT, Received
from mpwatch.results.model import Progress
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations, make_progress
from mpwatch.watcher.machine.transitions import StopRequested
from mpwatch.wire.messages import HEADER, Message, MessageKind, is_whole_frame, parse_header
from mpwatch.wire.pickling.call_payload import Payload
from mpwatch.wire.shared_memory import HeartbeatSample, SlotsMemory

if TYPE_CHECKING:
    from mpwatch.watcher.processes.rank_handle import RankHandle

READ_SIZE = 1 << 14  # bytes; the watcher thread finishes reading a longer answer
FD_ROOM = c_socket.CMSG_SPACE(SIZE_OF_INT)
RECORD_SECONDS = 1.0  # a call of C that has taken a right records its message within microseconds


class IdleRanks:
    """Ranks that wait for a call.

    Args:
        handles: the handles of the ranks, in order.
        slots: the memory that the ranks share with the watcher.
    """

    def __init__(self, handles: "Sequence[RankHandle]", slots: SlotsMemory) -> None:
        self.handles = handles
        self.workers = tuple(handle.observations.worker for handle in handles)
        self.channels = [handle.channel for handle in handles]
        self.exits = select.poll()
        # For each rank: where to wait for its answer, and what `poll` returns if nothing else has happened.
        self.waits: list[tuple[select.poll, list[tuple[int, int]]]] = []
        for handle in handles:
            self.exits.register(handle.process.sentinel, select.POLLIN)
            poll = select.poll()
            poll.register(handle.channel, select.POLLIN)
            self.waits.append((poll, [(handle.channel.fileno(), select.POLLIN)]))
        self._slots = slots
        self._tails = [handle.observations.stderr_tail for handle in handles]

    def begin_call(self) -> bool:
        """Delete the heartbeats, the reports and the stderr of the previous call. Return False if the ranks have ended."""
        try:
            for handle in self.handles:
                self._slots.prepare_slot(handle.slot)
        except ValueError:  # the watcher thread has closed the memory
            return False
        for tail in self._tails:
            tail.clear()
        return True

    def read_heartbeats(self) -> list[HeartbeatSample]:
        """Return the latest heartbeat and the latest report of each rank.

        Each HeartbeatSample is empty if all ranks have ended.
        """
        try:
            return [self._slots.read_heartbeat(handle.slot) for handle in self.handles]
        except ValueError:
            return [HeartbeatSample(None, None)] * len(self.handles)


class DirectCall:
    """The messages that the caller's thread has sent and received in one call.

    The caller's thread sends a message only over a channel that it has removed from the list `_to_send`. The caller's thread
    receives a message only from a channel that it has removed from the list `_to_receive`. In the code, each channel in one
    of these lists is called a right, because it permits the thread to send or receive one message. To prevent the caller's
    thread from sending or receiving more messages, the watcher thread removes all channels from both lists.

    To send a message, the caller's thread removes a channel from `_to_send`, sends the message, and adds the number of bytes
    to `sent`. To receive a message, the caller's thread removes a channel from `_to_receive`, receives the message, and adds
    the message to `received`. The three steps for a message take place in a single call into C code.

    Attributes:
        sent: the number of bytes for each rank that the call was sent to, in order.
        received: the return value of `recvmsg` for each rank that was received from, in order.
        heartbeats: the last heartbeat and report of each rank; empty until all ranks have returned.
    """

    __slots__ = ("_has_failed", "_has_returned", "_to_receive", "_to_send", "heartbeats", "idle_ranks", "received", "sent")

    def __init__(self, idle_ranks: IdleRanks) -> None:
        self.idle_ranks = idle_ranks
        self.sent: list[int] = []
        self.received: list[Received] = []
        self.heartbeats: list[HeartbeatSample] = []
        self._to_send = idle_ranks.channels[::-1]  # the first rank is the last one in the list
        self._to_receive = idle_ranks.channels[::-1]
        self._has_returned = False
        self._has_failed = False

    def send(self, frame: bytes, ancillary: list[Any]) -> bool:
        """Send a message to each rank.

        Return False if a message could not be sent, for example because `take_rights` had removed the channels.
        """
        count = len(self.idle_ranks.channels)
        try:
            rights = map(list.pop, repeat(self._to_send, count))
            self.sent.extend(map(socket.socket.sendmsg, rights, repeat([frame]), repeat(ancillary), repeat(MSG_NOSIGNAL)))
        except (OSError, IndexError):  # a rank is dying, or has closed its end; or there is no right
            self._has_failed = True
        return len(self.sent) == count

    def receive(self, deadline: float) -> None:
        """Receive the return value of each rank, one rank after the other.

        If one rank sends no complete return value before the deadline, receive nothing from the remaining ranks.
        """
        for poll, only_answer in self.idle_ranks.waits:
            if poll.poll(max(0.0, deadline - monotonic()) * 1000) != only_answer:
                return
            try:
                rights = map(list.pop, [self._to_receive])
                self.received.extend(map(socket.socket.recvmsg, rights, [READ_SIZE], [FD_ROOM], [MSG_CMSG_CLOEXEC]))
            except (OSError, IndexError):
                self._has_failed = True
                return
            if not is_return_value(self.received[-1]):
                return

    def take_rights(self) -> None:
        """Prevent the caller's thread from sending or receiving another message. Runs in the watcher thread."""
        self._take_rights(self._to_send, self.sent)
        self._take_rights(self._to_receive, self.received)

    def _take_rights(self, rights: list[socket.socket], records: list[Any]) -> None:
        left = 0
        with suppress(IndexError):
            while True:
                rights.pop()
                left += 1
        deadline = monotonic() + RECORD_SECONDS
        while len(records) + left < len(self.idle_ranks.channels) and not self._has_failed and monotonic() < deadline:
            os.sched_yield()

    def have_all_returned(self) -> bool:
        """Return whether the function has returned in each rank."""
        if not self._has_returned and len(self.received) == len(self.idle_ranks.channels):
            self._has_returned = all(map(is_return_value, self.received))
        return self._has_returned

    def get_bodies(self) -> list[bytes]:
        """Return each rank's return value in pickled form. Call this method only when all ranks have returned."""
        return [data[HEADER.size :] for data, *_ in self.received]

    def get_progress(self, started_at: float) -> dict[int, Progress]:
        """Return the last progress report of each rank that has sent one. Times are in seconds since `started_at`."""
        return {
            worker.rank: progress
            for worker, heartbeat in zip(self.idle_ranks.workers, self.heartbeats, strict=True)
            if (progress := make_progress(heartbeat, started_at)) is not None
        }

    def observe_ranks(self) -> dict[int, RankObservations]:
        """Return a dict from each rank to its RankObservations. Call this method only when all ranks have returned."""
        now = monotonic()
        observed = {}
        for handle, (data, *_), heartbeat in zip(self.idle_ranks.handles, self.received, self.heartbeats, strict=True):
            before = handle.observations
            _, stamp, _ = parse_header(data)
            observed[before.worker.rank] = RankObservations(
                before.worker,
                pid=before.pid,
                stderr_tail=before.stderr_tail,
                was_ready=True,
                answer=Message(MessageKind.RETURNED, stamp, data[HEADER.size :]),
                answer_received_at=now,
                heartbeat=heartbeat,
            )
        return observed


@dataclass(eq=False)
class PendingCall:
    """The request to call a function in the ranks, and the answer of the ranks."""

    payload: Payload
    started_at: float
    """When the caller made the call, in seconds of CLOCK_MONOTONIC."""
    timeout: float | None
    """The limit of the call, in seconds from `started_at`. It is None if there is no limit."""
    stop_after: float | None = None
    """When to ask the ranks to stop, in seconds from `started_at`. It is None if they are never asked."""
    ranks: tuple[int, ...] | None = None
    """The ranks to call, in order. None means all ranks."""
    observations: list[AttemptObservations] = field(default_factory=list)
    """The observations of each restart group after the call. The list is empty if a rank was lost before the call came."""
    is_done: bool = False
    """Whether the watcher thread has ended the call and keeps the ranks. If the ranks end with the call, only `observations`
    is set."""
    lost_ranks: tuple[int, ...] = ()
    """The ranks outside this call whose loss has ended this call."""
    ranks_to_restart: tuple[int, ...] = ()
    """The ranks that were lost before the call came, with scope="worker". If there are any, the call has not begun."""
    ended_ranks: tuple[int, ...] = ()
    """The ranks that have ended with this call, with scope="worker"."""
    stop_request: StopRequested | None = None
    """The first request to stop that came during the call."""
    number: int = field(default_factory=count(1).__next__)
    """A number that no other call of this program has. An interrupt contains the number of the call to interrupt."""
    direct: DirectCall | None = None
    """The messages of the caller's own thread. It is None if that thread has not tried to make the call."""
    suspended_seconds: float = 0.0
    """How long the program was suspended during the call. `timeout` does not count that time."""
    is_taken_over: bool = False
    """Whether the watcher thread continues a call that the caller's thread has begun."""

    def has_begun(self) -> bool:
        """Return whether the caller's thread has sent the call to at least one rank."""
        return self.direct is not None and bool(self.direct.sent)

    def was_sent_to(self, handle: "RankHandle") -> bool:
        """Return whether the caller's thread has sent the call to this rank."""
        return self.direct is not None and handle in self.direct.idle_ranks.handles[: len(self.direct.sent)]

    def is_over(self) -> bool:
        """Return True if the call has ended, or if the call cannot begin because ranks were lost.

        With scope="group", return False if all ranks of the WorkerGroup have ended during the call.
        """
        return self.is_done or bool(self.ranks_to_restart) or (self.direct is not None and self.direct.have_all_returned())


def is_return_value(received: Received) -> bool:
    """Return whether `received` is a complete message of the kind RETURNED that came without a file descriptor."""
    data, ancillary, flags, _ = received
    return not ancillary and not flags & c_socket.MSG_CTRUNC and is_whole_frame(MessageKind.RETURNED, data)
