"""One round, as one node goes through it: the pure machines, fed with what is on the board, and their actions carried out.

    board, mail, time --> member.py, and on the node of group rank 0 chair.py --> board, hands.py

It looks at the board a few times a second, since a store has no other way to tell; and more often just after something was
said, since that is when answers come. If the store is lost, the machines go on without it until the node's own ranks are
gone.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from mpwatch.multinode import leader as c
from mpwatch.multinode import node_machine as m
from mpwatch.multinode.local_ranks import LocalRanks
from mpwatch.multinode.protocol.store_channel import StoreChannel
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.errors import CancelledError, StoreLostError

POLL_SECONDS = 0.1  # how late a node hears of what the chair says, at most; and the chair of what a node does
LIVELY_POLL_SECONDS = 0.02  # the same, while it is being talked
LIVELY_SECONDS = 1.0  # after something was said
MOST_POLLS = 4000  # a second, of all nodes together
BEATS = 8  # in the time after which a node is lost
STALL_SECONDS = 1.0  # this node did not look at the board for so long: nobody else was silent meanwhile
RECONSIDER_SECONDS = 1.0  # until it is asked again for newcomers, which reads the whole state of the rendezvous


class RoundRunner:
    """Of one round.

    Args:
        board: of the round.
        member: this node.
        chair: if this node is the chair.
        engine: asked for newcomers, and told when the job is over.
        hands: what is done to the node's ranks.
        size: how many nodes there are.
        node_timeout: seconds of silence after which a node is lost.
    """

    def __init__(
        self,
        channel: StoreChannel,
        node_machine: m.NodeMachine,
        leader: c.Leader | None,
        client: RendezvousClient,
        local_ranks: LocalRanks,
        *,
        size: int,
        node_timeout: float,
    ) -> None:
        self._channel, self.node_machine, self._leader = channel, node_machine, leader
        self._client, self._local_ranks = client, local_ranks
        self._nodes = range(size)
        self._lively_until = time.monotonic() + LIVELY_SECONDS
        self._least_poll = size / MOST_POLLS
        self._interval = node_timeout / BEATS
        self._lost_after = node_timeout - 2 * self._interval  # of silence: from then on the others may go on without us
        self._next_beat = self._next_look = 0.0
        self._looked_at = time.monotonic()
        self._actions: deque[m.Action] = deque(node_machine.begin())
        self._acts: deque[c.Act] = deque()
        self._is_lost = False  # the store
        self._leave_by: float | None = None
        self.rejoin: m.Rejoin | None = None  # if the nodes meet anew

    def run(self, calls: deque[Callable[["RoundRunner"], None]], bell: Event) -> None:
        """Until this node has nothing more to do in it. What other threads call for is done as soon as the bell rings."""
        while not self._is_over():
            bell.clear()
            try:
                while calls:
                    calls.popleft()(self)
                self._step()
            except StoreLostError as error:
                self._lose_store(str(error))
            bell.wait(self._seconds_to_poll())

    def do(self, actions: list[m.Action]) -> None:
        """What the member wants."""
        self._actions += actions
        self._stir(bool(actions))

    def leave(self, seconds: float) -> None:
        """The node's ranks are gone, and it goes as soon as nobody needs it, or so much later."""
        self._leave_by = time.monotonic() + seconds

    def _stir(self, has_happened: bool) -> None:
        if has_happened:
            self._lively_until = time.monotonic() + LIVELY_SECONDS

    def _seconds_to_poll(self) -> float:
        is_lively = time.monotonic() < self._lively_until
        return max(LIVELY_POLL_SECONDS if is_lively else POLL_SECONDS, self._least_poll)

    def _is_over(self) -> bool:
        if self._leave_by is not None and (self._is_lost or time.monotonic() >= self._leave_by):
            return True
        has_heirs = self._leader is None or self._leader.is_over or self._is_lost
        is_needed = not self.node_machine.is_over and (self._leave_by is None or self.node_machine.serves_store)
        return has_heirs and not is_needed and not self._actions

    def _step(self) -> None:
        now = time.monotonic()
        self._notice_stall(now)
        if self._is_lost:
            self._carry_out()
            return
        self._give_sign(now)
        self._carry_out()
        if self._leader is not None:
            self._preside(self._leader, now)
        if self._channel.is_open():
            self._listen()
        self._carry_out()

    def _notice_stall(self, now: float) -> None:
        gap, self._looked_at = now - self._looked_at, now
        if gap <= STALL_SECONDS:
            return
        self.node_machine.forgive(gap)
        if self._leader is not None:
            self._leader.forgive(gap)
        if gap <= self._lost_after:
            return
        why = f"it was silent for {gap:.1f} s"
        if self._leader is None:
            self.do(self.node_machine.resign(why))
        elif not self._leader.is_closing:
            self._acts += self._leader.resign(why)
            self.do(self.node_machine.lose_chair(why))

    def _give_sign(self, now: float) -> None:
        has_resigned = self._leader is not None and self._leader.is_over  # or there is nothing more to come
        if now < self._next_beat or has_resigned:
            return
        self._next_beat = now + self._interval
        self._channel.beat()
        self._local_ranks.hold(now)
        self.do(self.node_machine.see_chair(self._channel.beats([0])[0], time.monotonic()))
        if self._leader is not None:
            self._acts += self._leader.see_beats(self._channel.beats(self._nodes), time.monotonic())

    def _preside(self, leader: c.Leader, now: float) -> None:
        if not self._channel.is_open():
            return
        for message in self._channel.inbox():
            self._acts += leader.hear(message, now)
        if now >= self._next_look and not leader.is_over:
            self._next_look = now + RECONSIDER_SECONDS
            with suppress(CancelledError):  # this node is leaving: newcomers will find others
                self._acts += leader.see_waiting(self._client.waiting(), now)
        self._acts += leader.expire(now)
        self._stir(bool(self._acts))
        while self._acts:
            self._act(leader, self._acts.popleft())

    def _listen(self) -> None:
        for word in self._channel.words():
            self.do(self.node_machine.hear(word))
        attempt = self.node_machine.wants_place
        if attempt is not None and (place := self._channel.place(attempt)) is not None:
            self.do(self.node_machine.placed(place))
        if (attempt := self._local_ranks.ready_for()) is not None:
            self.do(self.node_machine.prepared(attempt))

    def _carry_out(self) -> None:
        while self._actions and (
            self._is_lost or self._channel.is_open() or not isinstance(self._actions[0], m.SendToLeader)
        ):
            action = self._actions.popleft()
            if isinstance(action, m.SendToLeader):
                if not self._is_lost:
                    self._channel.post(action.message)
            elif isinstance(action, m.StartRanks):
                self._local_ranks.start()
            elif isinstance(action, m.StopRanks):
                self._local_ranks.call_off(action.why)
            elif isinstance(action, m.Rejoin):
                self.rejoin = action
            else:
                self._local_ranks.tell(action)

    def _act(self, leader: c.Leader, act: c.Act) -> None:
        if isinstance(act, c.Broadcast):
            self._channel.say(act.word)
        elif isinstance(act, c.PublishAssignments):
            self._channel.put(act.places)
        elif isinstance(act, c.ReservePort):
            self._acts += leader.reserved(self._local_ranks.reserve_port())
        else:
            self._client.set_closed()

    def _lose_store(self, why: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.do(self.node_machine.lose_store(why))
            self._carry_out()
