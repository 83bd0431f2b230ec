"""Run one round on one node, in the node thread.

    store channel, requests of other threads, time --> NodeMachine, and on the node with group rank 0 Leader
                                                            |
                                                            '--> actions: store channel, LocalRanks

A store cannot notify its clients, so the node thread polls the store several times a second. If the store is lost, the
NodeMachine goes on without the store until the node's ranks have exited.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from mpwatch.multinode.leader import (
    Broadcast,
    CloseRendezvous,
    Leader,
    LeaderAction,
    LogWarning,
    PublishAssignments,
    ReservePort,
)
from mpwatch.multinode.local_ranks import LocalRanks
from mpwatch.multinode.node_machine import (
    AgreeOnStep,
    HoldRanks,
    NodeAction,
    NodeMachine,
    PrepareRanks,
    Rejoin,
    ReportAttempt,
    ReportJob,
    SendToLeader,
    StartRanks,
    StopRanks,
)
from mpwatch.multinode.protocol.store_channel import StoreChannel
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.errors import CancelledError, StoreLostError
from mpwatch.os_support.clock import monotonic

POLL_SECONDS = 0.1  # the longest time until a message is read, in a round of at most 400 nodes
FAST_POLL_SECONDS = 0.02  # the same while the nodes exchange messages
FAST_POLL_DURATION = 1.0  # seconds of fast polling after an action
MAX_POLLS_PER_SECOND = 4000  # of all nodes together
HEARTBEATS_PER_TIMEOUT = 8  # the number of heartbeats in node_timeout
SILENCE_SECONDS = 1.0  # if this node did not poll for this time, it could not see heartbeats of other nodes
WAITING_NODES_POLL_SECONDS = 1.0  # each of these polls reads the whole state of the rendezvous


class RoundRunner:
    """Runs one round on one node.

    Args:
        channel: sends and receives the messages of the round.
        node_machine: the state machine of this node.
        leader: the state machine of the leader, or None if another node is the leader.
        client: counts the nodes that wait to join, and closes the job.
        local_ranks: starts and stops the node's ranks.
        size: the number of nodes in the round.
        node_timeout: seconds without a heartbeat after which a node is lost.
        log_warning: logs a warning in the caller's thread.
    """

    def __init__(
        self,
        channel: StoreChannel,
        node_machine: NodeMachine,
        leader: Leader | None,
        client: RendezvousClient,
        local_ranks: LocalRanks,
        *,
        size: int,
        node_timeout: float,
        log_warning: Callable[[str], object],
    ) -> None:
        self._channel, self.node_machine, self._leader = channel, node_machine, leader
        self._client, self._local_ranks, self._log_warning = client, local_ranks, log_warning
        self._nodes = range(size)
        self._poll_fast_until = monotonic() + FAST_POLL_DURATION
        self._min_poll_seconds = size / MAX_POLLS_PER_SECOND
        self._heartbeat_interval = node_timeout / HEARTBEATS_PER_TIMEOUT
        # If this node was silent for a longer time, the other nodes may count it as lost.
        self._max_silence = node_timeout - 2 * self._heartbeat_interval
        self._next_heartbeat = self._next_waiting_nodes_poll = 0.0
        self._polled_at = monotonic()
        self._node_actions: deque[NodeAction] = deque(node_machine.send_node_info())
        self._leader_actions: deque[LeaderAction] = deque()
        self._is_store_lost = False
        self._leave_deadline: float | None = None
        self.rejoin: Rejoin | None = None  # how the node joins the next round, or None if it does not join

    def run(self, requests: deque[Callable[["RoundRunner"], None]], wakeup: Event) -> None:
        """Run the round until this node has nothing more to do in the round.

        To make a request, another thread appends it to `requests` and then sets `wakeup`.
        """
        while not self._is_finished():
            wakeup.clear()
            try:
                while requests:
                    requests.popleft()(self)
                self._poll()
            except StoreLostError as error:
                self._handle_store_loss(str(error))
            wakeup.wait(self._seconds_to_poll())

    def add_actions(self, actions: list[NodeAction]) -> None:
        """Append actions of the node machine to the queue of actions. Each poll executes the queued actions."""
        self._node_actions += actions
        if actions:
            self._extend_fast_polling()

    def stop_waiting_after(self, seconds: float) -> None:
        """Make `run` return after at most `seconds`, even if other nodes still need this node.

        Call this method when the node's ranks have exited.
        """
        self._leave_deadline = monotonic() + seconds

    def _is_finished(self) -> bool:
        deadline = self._leave_deadline
        if deadline is not None and (self._is_store_lost or monotonic() >= deadline):
            return True
        is_leader_needed = self._leader is not None and not self._leader.is_finished and not self._is_store_lost
        if self._node_actions or is_leader_needed:
            return False
        may_leave = deadline is not None and not self.node_machine.serves_store
        return self.node_machine.is_finished or may_leave

    def _seconds_to_poll(self) -> float:
        is_fast = monotonic() < self._poll_fast_until
        return max(FAST_POLL_SECONDS if is_fast else POLL_SECONDS, self._min_poll_seconds)

    def _extend_fast_polling(self) -> None:
        self._poll_fast_until = monotonic() + FAST_POLL_DURATION

    def _poll(self) -> None:
        now = monotonic()
        self._check_own_silence(now)
        if self._is_store_lost:
            self._execute_node_actions()
            return
        self._exchange_heartbeats(now)
        self._execute_node_actions()
        if self._channel.try_open():
            if self._leader is not None:
                self._run_leader(self._leader, now)
            self._feed_node_machine()
        self._execute_node_actions()

    def _check_own_silence(self, now: float) -> None:
        """Extend the deadlines or leave the round if this node has not polled the store for a long time.

        A node sends its heartbeats only when it polls.
        """
        silence, self._polled_at = now - self._polled_at, now
        if silence <= SILENCE_SECONDS:
            return
        self.node_machine.extend_deadlines(silence)
        if self._leader is not None:
            self._leader.extend_deadlines(silence)
        if silence <= self._max_silence:
            return
        reason = f"its watcher did not run for {silence:.1f} s (suspended, or too little CPU time)"
        if self._leader is None:
            self.add_actions(self.node_machine.withdraw(reason))
        elif not self._leader.has_decided:
            self._leader_actions += self._leader.step_down(reason)
            self.add_actions(self.node_machine.handle_leader_loss(reason))

    def _exchange_heartbeats(self, now: float) -> None:
        # A leader that has stepped down sends no heartbeats, so that the other nodes find that it is lost.
        has_stepped_down = self._leader is not None and self._leader.has_stepped_down
        if now < self._next_heartbeat or has_stepped_down:
            return
        self._next_heartbeat = now + self._heartbeat_interval
        self._channel.send_heartbeat()
        self._local_ranks.renew_lease(now)
        leader_count = self._channel.read_heartbeats([0])[0]
        self.add_actions(self.node_machine.check_leader_heartbeat(leader_count, monotonic()))
        if self._leader is not None:
            counts = self._channel.read_heartbeats(self._nodes)
            self._leader_actions += self._leader.check_heartbeats(counts, monotonic())

    def _run_leader(self, leader: Leader, now: float) -> None:
        """Run the leader's state machine, and execute the actions that it returns."""
        for message in self._channel.read_inbox():
            self._leader_actions += leader.handle_message(message, now)
        self._leader_actions += leader.judge_stalls(now)
        if now >= self._next_waiting_nodes_poll and not leader.is_finished:
            self._next_waiting_nodes_poll = now + WAITING_NODES_POLL_SECONDS
            with suppress(CancelledError):  # this node is leaving, so it does not look for waiting nodes
                self._leader_actions += leader.update_waiting_nodes(self._client.count_waiting_nodes(), now)
        self._leader_actions += leader.handle_deadline(now)
        if self._leader_actions:
            self._extend_fast_polling()
        while self._leader_actions:
            self._execute_leader_action(leader, self._leader_actions.popleft())

    def _execute_leader_action(self, leader: Leader, action: LeaderAction) -> None:
        if isinstance(action, Broadcast):
            self._channel.broadcast(action.message)
        elif isinstance(action, PublishAssignments):
            self._channel.publish_assignments(action.assignments)
        elif isinstance(action, ReservePort):
            self._leader_actions += leader.start_attempt(self._local_ranks.reserve_port())
        elif isinstance(action, LogWarning):
            self._log_warning(action.text)
        else:
            assert isinstance(action, CloseRendezvous)
            self._client.set_closed()

    def _feed_node_machine(self) -> None:
        for message in self._channel.read_broadcasts():
            self.add_actions(self.node_machine.handle_broadcast(message))
        attempt = self.node_machine.awaited_assignment
        if attempt is not None and (assignment := self._channel.read_assignment(attempt)) is not None:
            self.add_actions(self.node_machine.handle_assignment(assignment))
        if (attempt := self._local_ranks.prepared_attempt) is not None:
            self.add_actions(self.node_machine.start_ranks(attempt))

    def _execute_node_actions(self) -> None:
        """Execute the actions of the node machine in order.

        If the round has no name yet, stop before the first action that sends a message to the leader.
        """
        while self._node_actions and (
            self._is_store_lost or self._channel.try_open() or not isinstance(self._node_actions[0], SendToLeader)
        ):
            action = self._node_actions.popleft()
            if isinstance(action, SendToLeader):
                if not self._is_store_lost:
                    self._channel.send_to_leader(action.message)
            elif isinstance(action, StartRanks):
                self._local_ranks.start()
            elif isinstance(action, StopRanks):
                self._local_ranks.stop(action)
            elif isinstance(action, HoldRanks):
                self._local_ranks.hold(action)
            elif isinstance(action, AgreeOnStep):
                self._local_ranks.agree_on_step(action)
            elif isinstance(action, Rejoin):
                self.rejoin = action
            else:
                assert isinstance(action, PrepareRanks | ReportAttempt | ReportJob)
                self._local_ranks.notify_caller(action)

    def _handle_store_loss(self, reason: str) -> None:
        if not self._is_store_lost:
            self._is_store_lost = True
            self.add_actions(self.node_machine.handle_store_loss(reason))
            self._execute_node_actions()
