"""The thread of a node that deals with the others: it meets them, round after round, and goes through each (sitting.py).

    caller's thread   --- prepared, ended, concluded, leave --->  link  <--->  meeting, talk: the store
                      <--- news: prepare, hear, conclude ------   |  |
    thread of ranks   --- herald: it is clear how it ends ---->   |  '---  member.py and, on one node, chair.py: what to do
                      <--- start, call off, lease ------------ ---'

All calls of the store are made here, and none of them waits for another node, but in the rendezvous itself. A store that is
silent is given up by the kernel (meeting/engine.py). Guarantee: when `close` has returned, nothing of it is left.
"""

import math
import platform
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any
from uuid import uuid4

from mpwatch.errors import LaunchError
from mpwatch.multinode.leader import Leader
from mpwatch.multinode.local_ranks import LocalRanks, NodeNews
from mpwatch.multinode.node_machine import NodeMachine, Rejoin, ReportJob
from mpwatch.multinode.protocol.job_config import terms_of, unlike
from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptReport,
    NextStep,
    NodeInfo,
    PublishedTerms,
    RefusedNode,
    RestartHistory,
    StartAttempt,
)
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SecretMismatchError, SignedJson
from mpwatch.multinode.protocol.store_channel import StoreChannel
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.client import OVER, RendezvousClient
from mpwatch.multinode.rendezvous.errors import CancelledError, JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.rounds import Round
from mpwatch.multinode.rendezvous.store import PrefixedStore
from mpwatch.multinode.round_runner import RoundRunner
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.processes import await_end_of_thread
from mpwatch.watcher.commands import CommandQueue
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import RunStage
from mpwatch.watcher.machine.transitions import StopReason as Fate
from mpwatch.watcher.restarts.restart_group import RankSetup

LEAVE_SECONDS = 2.0  # beyond the grace period in which they stop their ranks, for the others to take note of who leaves
LINGER_SECONDS, LINGER_PAUSE = 10.0, 0.2  # for an earlier job of the same name to be gone, and between two looks
SERVER_SECONDS = 1.0  # for the node that serves the store to write the job's terms, which it does as soon as it serves it
AGAIN_LAST_CALL = 2.0  # seconds in which survivors meet anew, should not all of them come at once


class NodeThread:
    """Of one node, in one run. Its methods are for other threads.

    Args:
        spec: of the run.
        run_by: when the run's time is up, by CLOCK_MONOTONIC.
        engine: how this node meets the others. None: as the spec's rendezvous says.
    """

    def __init__(self, spec: WorkerSpec[Any], run_by: float = math.inf, client: RendezvousClient | None = None) -> None:
        assert spec.rendezvous is not None
        self._spec, self._rendezvous, self._run_by = spec, spec.rendezvous, run_by
        self._client, self._is_given = client or RendezvousClient(spec.rendezvous), client is not None
        self._local_ranks: LocalRanks
        self._terms = terms_of(spec)
        self._seal = SignedJson(spec.rendezvous.key, spec.rendezvous.run_id)
        self._calls: deque[Callable[[RoundRunner], None]] = deque()
        self._bell = threading.Event()
        self._has_concluded = False
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=self._carry_out, name="mpwatch-node")

    @property
    def backend(self) -> str:
        """Of the rendezvous."""
        return self._client.backend

    def begin(self, commands: CommandQueue) -> None:
        """Meet the other nodes. The mailbox is that of the ranks' thread. Raises LaunchError."""
        self._local_ranks = LocalRanks(commands, self._rendezvous.node_timeout)
        try:
            self._thread.start()
        except RuntimeError as error:  # Python is ending, or there is no room for one more
            raise LaunchError(f"the other nodes cannot be met: {error}") from error

    def news(self) -> list[NodeNews]:
        """What the caller's thread has to know, or to do, since the last time."""
        return self._local_ranks.news()

    def on_verdict(self, machine: StateMachine) -> None:
        """It is clear how the attempt ends for our ranks; or all is over."""
        if machine.signum is not None:
            reason = f"it received {signal.Signals(machine.signum).name}"
            self._call(lambda round_runner: round_runner.do(round_runner.node_machine.leave(reason)))
        elif machine.verdict in (Fate.FAILED, Fate.TIMED_OUT):
            self._call(lambda round_runner: round_runner.do(round_runner.node_machine.failing()))
        if machine.stage is RunStage.AWAITING_DECISION:
            self._call(lambda round_runner: round_runner.do(round_runner.node_machine.stopped()))

    def prepared(self, start: StartAttempt, setups: list[RankSetup]) -> None:
        """The environments of the ranks have been made."""
        self._call(lambda _: self._local_ranks.take(start, setups))

    def ended(self, report: AttemptReport) -> None:
        """All of our ranks are gone."""
        self._call(lambda round_runner: round_runner.do(round_runner.node_machine.ended(report)))

    def conclude(self) -> None:
        """What came of the job is known here: the others need not wait for this node any more."""
        self._has_concluded = True
        self._call(lambda round_runner: round_runner.do(round_runner.node_machine.concluded()))

    def abort(self, report: AttemptReport) -> None:
        """The run cannot go on here, through no fault of a rank."""
        self._call(lambda round_runner: round_runner.do(round_runner.node_machine.abort(report)))

    def close(self) -> None:
        """Take leave of the others, and wait for that; for no longer, if something is thrown meanwhile."""
        if not self._has_concluded:
            self.leave(self._spec.grace_period + LEAVE_SECONDS)
        try:
            self._await_end()
        except BaseException:
            self.leave(0.0)
            self._await_end()
            raise

    def leave(self, seconds: float) -> None:
        """Take leave, within so much time: that is how long the others may take to take note of it."""
        self._is_leaving.set()
        self._client.cancel()
        self._call(lambda round_runner: round_runner.leave(seconds))

    def _await_end(self) -> None:
        if self._thread.native_id is not None:
            self._thread.join()
            await_end_of_thread(self._thread.native_id)

    def _call(self, call: Callable[[RoundRunner], None]) -> None:
        self._calls.append(call)
        self._bell.set()

    def _carry_out(self) -> None:
        try:
            with closing(self._local_ranks):
                try:
                    self._meet()
                finally:
                    self._client.close()
        except CancelledError:
            pass  # by `close`
        except (LaunchError, JobClosedError, StoreLostError) as error:
            self._fail(error)
        except BaseException as error:  # noqa: BLE001  an error of ours: the caller's thread raises it
            self._local_ranks.tell(error)

    def _fail(self, error: Exception) -> None:
        """The nodes cannot meet, or not anew. There are no ranks meanwhile."""
        if isinstance(error, LaunchError) and time.monotonic() >= self._run_by:
            error = LaunchError(f"`timeout` ({self._spec.timeout:g} s) ran out before the nodes had met: {error}")
        if self._local_ranks.has_started:
            self._local_ranks.tell(
                ReportJob(AttemptDecision(NO_ATTEMPT, NextStep.FAILED, RestartHistory(), reason=str(error)))
            )
        else:
            self._local_ranks.tell(error if isinstance(error, LaunchError) else LaunchError(str(error)))

    def _meet(self) -> None:
        rejoin = self._sit(self._enter(self._join_by()), RestartHistory())
        while rejoin is not None:
            found = self._join(self._join_by(), last_call=AGAIN_LAST_CALL, enough=rejoin.nodes)
            rejoin = self._sit(found, rejoin.history)

    def _join_by(self) -> float:
        return min(time.monotonic() + self._rendezvous.join_timeout, self._run_by)

    def _enter(self, join_by: float) -> Round:
        """The first round. If an earlier job of the same name is just ending, then when it has: the node that serves the
        store leaves last, and this one may have been quicker.
        """
        linger_by = time.monotonic() + LINGER_SECONDS
        earlier = ""
        while True:
            try:
                self._client.connect(join_by)
                self._agree()
                return self._join(join_by)
            except LaunchError as error:
                raise LaunchError(f"{error}. Before that: {earlier}") if earlier else error from error.__cause__
            except (JobClosedError, StoreLostError) as error:
                earlier = str(error)
                is_lasting = self._is_given or self._client.is_host or self._rendezvous.backend != "c10d"
                if is_lasting or time.monotonic() > min(linger_by, join_by):
                    raise
            self._client.close()
            self._client = RendezvousClient(self._rendezvous)
            if self._is_leaving.wait(LINGER_PAUSE):
                raise CancelledError

    def _agree(self) -> None:
        """That this is a node of the job is seen before it joins, and before the others wait for it. Raises LaunchError."""
        store, place = self._client.store_of_job(), "terms"
        if store is None:  # the chair will find out
            return
        if store.check([OVER]):
            raise JobClosedError(f"job {self._rendezvous.run_id!r} at {self._rendezvous.endpoint} is over")
        try:
            first = self._first_terms(store, place)
            why = unlike(self._terms, first.terms, platform.node(), f"{first.host}, which came first")
        except InvalidEntryError as error:
            why = f"what the first node of the job has written cannot be read: {error}"
        if why:
            # who waits in vain for this node learns the reason, too
            store.set("refused", self._seal.close("refused", to_json(RefusedNode(platform.node(), why))))
            raise LaunchError(f"job {self._rendezvous.run_id!r} at {self._rendezvous.endpoint}: {why}")

    def _first_terms(self, store: PrefixedStore, place: str) -> PublishedTerms:
        """What the first node of the job has written: the one that serves the store, if one of them does, since with it
        goes the store, should it be refused. Raises ForgedError.
        """
        may_be_served = self._rendezvous.backend == "c10d" and not self._client.is_host
        patience = Deadline(time.monotonic() + (SERVER_SECONDS if may_be_served else 0.0), self._is_leaving)
        is_first = self._client.is_host
        while not store.check([place]):
            if patience.pause():
                continue
            if is_first or store.add("came", 1) == 1:
                published = PublishedTerms(platform.node(), self._terms)
                store.set(place, self._seal.close(place, to_json(published)))
            patience = Deadline(time.monotonic() + self._rendezvous.node_timeout, self._is_leaving)
            is_first = True  # should who is have been lost before it could write them
        return from_json(PublishedTerms, self._seal.open(place, store.get(place)))

    def _join(self, deadline: float, *, last_call: float | None = None, enough: float = math.inf) -> Round:
        """Meet the others. Raises LaunchError, and says also whom the job has refused."""
        try:
            return self._client.join(deadline, last_call=last_call, enough=enough)
        except LaunchError as error:
            store = self._client.store_of_job()
            with suppress(StoreLostError, InvalidEntryError):
                if store is not None and store.check(["refused"]):
                    raise LaunchError(f"{error}. {self._who_was_refused(store.get('refused'))}") from error
            raise

    def _who_was_refused(self, entry: bytes) -> str:
        """Raises ForgedError."""
        try:
            refused = from_json(RefusedNode, self._seal.open("refused", entry))
        except SecretMismatchError as error:
            return f"A node was refused, and what it has written is {error}"
        return f"{refused.host} was refused: {refused.reason}"

    def _sit(self, found: Round, history: RestartHistory) -> Rejoin | None:
        """Through one round. Returns how the nodes meet anew; None: they do not."""
        at = self._rendezvous
        channel = StoreChannel(found.store, self._seal, group_rank=found.group_rank, patience=at.node_timeout)
        node_machine = NodeMachine(
            self._card(found.group_rank, history),
            size=found.group_world_size,
            min_nodes=at.min_nodes,
            max_restarts=self._spec.policy.max_restarts,
            node_timeout=at.node_timeout,
            now=time.monotonic(),
        )
        leader = self._leader(found.group_world_size) if found.group_rank == 0 else None
        round_runner = RoundRunner(
            channel,
            node_machine,
            leader,
            self._client,
            self._local_ranks,
            size=found.group_world_size,
            node_timeout=at.node_timeout,
        )
        round_runner.run(self._calls, self._bell)
        return round_runner.rejoin

    def _card(self, group_rank: int, history: RestartHistory) -> NodeInfo:
        assert isinstance(self._spec.nprocs, int)
        return NodeInfo(
            group_rank=group_rank,
            host=platform.node(),
            address=self._client.address,
            nprocs=self._spec.nprocs,
            role=self._spec.role,
            serves_store=self._client.is_host,
            grace_period=float(self._spec.grace_period),
            nonce=uuid4().hex,
            terms=self._terms,
            history=history,
        )

    def _leader(self, size: int) -> Leader:
        at = self._rendezvous
        return Leader(
            size=size,
            nodes=(at.min_nodes, at.max_nodes),
            policy=self._spec.policy,
            node_timeout=at.node_timeout,
            exit_barrier_timeout=at.exit_barrier_timeout,
            now=time.monotonic(),
        )
