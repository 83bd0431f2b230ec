"""The ranks of this node, as the node thread sees them.

    node thread --- start, stop, hold, lease ---> watcher thread
                --- updates --------------------> caller's thread: prepare the ranks, decisions, errors

If another node fails: the coordinator sends StopAttempt, NodeMachine returns StopRanks, `stop` posts
EventLoop.cancel_attempt, and the machine of the call stops the ranks (CANCELLED_BY_JOB, which becomes the NodeOutcome
STOPPED). If nothing comes from the coordinator any more, the lease expires, and the watcher thread stops the ranks by
itself.
"""

import socket
from collections import deque
from collections.abc import Callable

from mpwatch.nodes.messages import StartAttempt
from mpwatch.nodes.node_machine import (
    AgreeOnStep,
    HoldRanks,
    PrepareRanks,
    ReportAttempt,
    ReportJob,
    StopRanks,
)
from mpwatch.watcher.machine.transitions import NO_LEASE, Lease, StopRequested
from mpwatch.watcher.processes.rank_environment import RankSetup, reserve_port
from mpwatch.watcher.watcher import Watcher

NodeUpdate = PrepareRanks | StopRanks | ReportAttempt | ReportJob | BaseException
# If a node is cut off, its ranks get SIGTERM and then SIGKILL after these fractions of node_timeout.
STOP_SHARE, KILL_SHARE = 0.65, 0.85


class LocalRanks:
    """The ranks of one node, in all rounds.

    Args:
        watcher: starts and stops the ranks.
        start_ranks: makes the watcher start ranks and call them.
        node_timeout: seconds without a heartbeat after which the other nodes may count this node as lost.
    """

    def __init__(self, watcher: Watcher, start_ranks: Callable[[list[RankSetup]], object], node_timeout: float) -> None:
        self._watcher, self._start_ranks = watcher, start_ranks
        self._node_timeout = node_timeout
        self._updates: deque[NodeUpdate] = deque()
        self._setups: list[RankSetup] | None = None  # the setups of ranks that can be started
        self._setups_attempt = -1
        self._wanted_start: StartAttempt | None = None  # the latest StartAttempt that the caller's thread had to prepare
        self.has_started = False  # whether this node has started ranks in this call of `run`
        self._port_socket: socket.socket | None = None  # keeps the port reserved

    @property
    def prepared_attempt(self) -> int | None:
        """The attempt whose ranks can be started now, or None."""
        return self._setups_attempt if self._setups is not None else None

    def notify_caller(self, update: NodeUpdate) -> None:
        if isinstance(update, PrepareRanks):
            self._setups, self._wanted_start = None, update.start
        self._updates.append(update)
        self._watcher.outbox.wake()

    def take_updates(self) -> list[NodeUpdate]:
        return [self._updates.popleft() for _ in range(len(self._updates))]

    def set_rank_setups(self, start: StartAttempt, setups: list[RankSetup]) -> None:
        if start is self._wanted_start:
            self._setups, self._setups_attempt = setups, start.attempt

    def start(self) -> None:
        assert self._setups is not None
        setups, self._setups = self._setups, None
        self.has_started = True
        self._start_ranks(setups)

    def stop(self, action: StopRanks) -> None:
        """Stop the ranks.

        The caller's thread logs why the ranks are stopped, because a slow logging handler must not delay the node thread.
        """
        self._watcher.post(self._watcher.loop.cancel_attempt)
        self.notify_caller(action)

    def hold(self, action: HoldRanks) -> None:
        """Make the ranks wait at their next call of `should_stop`.

        HOLD_SECONDS later, the watcher thread calls `NodeThread.on_steps_held` with the highest step that a rank has passed.
        """
        self._watcher.post(self._watcher.loop.request_stop, StopRequested(action.cause, is_from_job=True))

    def agree_on_step(self, action: AgreeOnStep) -> None:
        self._watcher.post(self._watcher.loop.agree_on_step, action.after_step, action.cause)

    def renew_lease(self, since: float) -> None:
        """Let the ranks run for a while, since this node has heard from the coordinator what it has sent at this time."""
        stop_at, kill_at = (since + share * self._node_timeout for share in (STOP_SHARE, KILL_SHARE))
        self._watcher.post(self._watcher.loop.renew_lease, Lease(stop_at, kill_at))

    def end_lease(self) -> None:
        """The job is over for this node: the ranks have their whole grace period."""
        self._watcher.post(self._watcher.loop.renew_lease, NO_LEASE)

    def reserve_port(self) -> int:
        # The new port is reserved before the old port is released, so the two differ.
        earlier, self._port_socket = self._port_socket, reserve_port()
        if earlier is not None:
            earlier.close()
        port: int = self._port_socket.getsockname()[1]
        return port

    def close(self) -> None:
        if self._port_socket is not None:
            self._port_socket.close()
