"""Run one round on one node, in the node thread: poll the store channel, feed the state machines, carry out their actions.

    store channel, calls of other threads, time --> NodeMachine, and on the node of group rank 0 Leader
                                                         |
                                                         '--> actions: store channel, LocalRanks

A store cannot notify its clients, so the node polls it several times a second. After a message was sent it polls more often,
because answers come then. If the store is lost, the machines go on without it until the node's own ranks have exited.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from mpwatch.multinode.leader import Broadcast, Leader, LeaderAction, PublishAssignments, ReservePort
from mpwatch.multinode.local_ranks import LocalRanks
from mpwatch.multinode.node_machine import NodeAction, NodeMachine, Rejoin, SendToLeader, StartRanks, StopRanks
from mpwatch.multinode.protocol.store_channel import StoreChannel
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.errors import CancelledError, StoreLostError

POLL_SECONDS = 0.1  # the longest time until a message is read
FAST_POLL_SECONDS = 0.02  # the same, while messages are exchanged
FAST_POLL_DURATION = 1.0  # seconds of fast polling after a message
MAX_POLLS_PER_SECOND = 4000  # of all nodes together
HEARTBEATS_PER_TIMEOUT = 8  # in node_timeout
STALL_SECONDS = 1.0  # if the node did not poll for so long, then it could not see heartbeats of others
NEWCOMER_POLL_SECONDS = 1.0  # between two polls for newcomers; each reads the whole state of the rendezvous


class RoundRunner:
    """One round on one node.

    Args:
        channel: the messages of the round.
        node_machine: the state machine of this node.
        leader: the state machine of the leader, if this is its node.
        client: for the number of newcomers, and to close the job.
        local_ranks: starts and stops the node's ranks.
        size: how many nodes are in the round.
        node_timeout: seconds without a heartbeat after which a node is lost.
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
    ) -> None:
        self._channel, self.node_machine, self._leader = channel, node_machine, leader
        self._client, self._local_ranks = client, local_ranks
        self._nodes = range(size)
        self._poll_fast_until = time.monotonic() + FAST_POLL_DURATION
        self._min_poll_seconds = size / MAX_POLLS_PER_SECOND
        self._heartbeat_interval = node_timeout / HEARTBEATS_PER_TIMEOUT
        # a node that was silent for longer may have been given up by the others
        self._max_silence = node_timeout - 2 * self._heartbeat_interval
        self._next_heartbeat = self._next_newcomer_poll = 0.0
        self._polled_at = time.monotonic()
        self._node_actions: deque[NodeAction] = deque(node_machine.send_node_info())
        self._leader_actions: deque[LeaderAction] = deque()
        self._is_store_lost = False
        self._leave_by: float | None = None
        self.rejoin: Rejoin | None = None  # how the node joins the next round; None: it does not

    def run(self, calls: deque[Callable[["RoundRunner"], None]], wakeup: Event) -> None:
        """Run the round until this node has nothing more to do in it.

        Other threads append to `calls` and set `wakeup`. The node thread makes the calls at once.
        """
        while not self._is_finished():
            wakeup.clear()
            try:
                while calls:
                    calls.popleft()(self)
                self._poll()
            except StoreLostError as error:
                self._handle_store_loss(str(error))
            wakeup.wait(self._seconds_to_poll())

    def add_actions(self, actions: list[NodeAction]) -> None:
        """Have the actions of the node machine carried out by the next poll."""
        self._node_actions += actions
        self._poll_fast(bool(actions))

    def leave(self, seconds: float) -> None:
        """Leave the round when no other node needs this one, or after so many seconds. The node's ranks have exited."""
        self._leave_by = time.monotonic() + seconds

    def _is_finished(self) -> bool:
        if self._leave_by is not None and (self._is_store_lost or time.monotonic() >= self._leave_by):
            return True
        if self._node_actions or not (self._leader is None or self._leader.is_finished or self._is_store_lost):
            return False
        may_leave = self._leave_by is not None and not self.node_machine.serves_store
        return self.node_machine.is_finished or may_leave

    def _seconds_to_poll(self) -> float:
        is_fast = time.monotonic() < self._poll_fast_until
        return max(FAST_POLL_SECONDS if is_fast else POLL_SECONDS, self._min_poll_seconds)

    def _poll_fast(self, has_message: bool) -> None:
        if has_message:
            self._poll_fast_until = time.monotonic() + FAST_POLL_DURATION

    def _poll(self) -> None:
        now = time.monotonic()
        self._check_for_stall(now)
        if self._is_store_lost:
            self._execute_node_actions()
            return
        self._exchange_heartbeats(now)
        self._execute_node_actions()
        if self._leader is not None:
            self._run_leader(self._leader, now)
        if self._channel.try_open():
            self._run_node()
        self._execute_node_actions()

    def _check_for_stall(self, now: float) -> None:
        """Check whether this node was suspended: then it saw no heartbeats, and the others saw none of its own."""
        gap, self._polled_at = now - self._polled_at, now
        if gap <= STALL_SECONDS:
            return
        self.node_machine.extend_deadlines(gap)
        if self._leader is not None:
            self._leader.extend_deadlines(gap)
        if gap <= self._max_silence:
            return
        reason = f"it was silent for {gap:.1f} s"
        if self._leader is None:
            self.add_actions(self.node_machine.withdraw(reason))
        elif not self._leader.has_decided:
            self._leader_actions += self._leader.step_down(reason)
            self.add_actions(self.node_machine.handle_leader_loss(reason))

    def _exchange_heartbeats(self, now: float) -> None:
        # no heartbeats of a leader that has stepped down: the other nodes must take it for lost
        is_leader_finished = self._leader is not None and self._leader.is_finished
        if now < self._next_heartbeat or is_leader_finished:
            return
        self._next_heartbeat = now + self._heartbeat_interval
        self._channel.send_heartbeat()
        self._local_ranks.renew_lease(now)
        leader_count = self._channel.read_heartbeats([0])[0]
        self.add_actions(self.node_machine.check_leader_heartbeat(leader_count, time.monotonic()))
        if self._leader is not None:
            counts = self._channel.read_heartbeats(self._nodes)
            self._leader_actions += self._leader.check_heartbeats(counts, time.monotonic())

    def _run_leader(self, leader: Leader, now: float) -> None:
        if not self._channel.try_open():
            return
        for message in self._channel.read_inbox():
            self._leader_actions += leader.handle_message(message, now)
        if now >= self._next_newcomer_poll and not leader.is_finished:
            self._next_newcomer_poll = now + NEWCOMER_POLL_SECONDS
            with suppress(CancelledError):  # this node is leaving, so it takes in no newcomers
                self._leader_actions += leader.update_waiting_nodes(self._client.count_waiting_nodes(), now)
        self._leader_actions += leader.handle_deadline(now)
        self._poll_fast(bool(self._leader_actions))
        while self._leader_actions:
            self._execute_leader_action(leader, self._leader_actions.popleft())

    def _execute_leader_action(self, leader: Leader, action: LeaderAction) -> None:
        if isinstance(action, Broadcast):
            self._channel.broadcast(action.message)
        elif isinstance(action, PublishAssignments):
            self._channel.publish_assignments(action.assignments)
        elif isinstance(action, ReservePort):
            self._leader_actions += leader.start_attempt(self._local_ranks.reserve_port())
        else:
            self._client.set_closed()

    def _run_node(self) -> None:
        for message in self._channel.read_broadcasts():
            self.add_actions(self.node_machine.handle_broadcast(message))
        attempt = self.node_machine.awaited_assignment
        if attempt is not None and (assignment := self._channel.read_assignment(attempt)) is not None:
            self.add_actions(self.node_machine.handle_assignment(assignment))
        if (attempt := self._local_ranks.prepared_attempt) is not None:
            self.add_actions(self.node_machine.start_ranks(attempt))

    def _execute_node_actions(self) -> None:
        """Carry out the actions in their order. The first message has to wait until the leader has opened the channel."""
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
                self._local_ranks.stop(action.reason)
            elif isinstance(action, Rejoin):
                self.rejoin = action
            else:
                self._local_ranks.notify_caller(action)

    def _handle_store_loss(self, reason: str) -> None:
        if not self._is_store_lost:
            self._is_store_lost = True
            self.add_actions(self.node_machine.handle_store_loss(reason))
            self._execute_node_actions()
