"""The node thread: one thread of a node talks to the other nodes. It joins one round after the other, and runs each of them.

    caller's thread  --- set_prepared, report_attempt, acknowledge_shutdown, leave ---> |          | ---> rendezvous/: join
                     <-- updates: PrepareRanks, ReportAttempt, ReportJob, errors ------ |NodeThread| ---> RoundRunner:
    watcher thread   --- on_attempt_end: it fails, or its ranks have exited ----------> |          |      NodeMachine, and
                     <-- commands: start, stop, renew the lease ----------------------- |          |      Leader on one node

The node thread makes all calls to the store. Only the rendezvous itself waits for other nodes. If a store is silent, the
kernel ends its connection (rendezvous/store.py). Guarantee: when `close` has returned, the thread has ended, and its sockets
and its port are released.
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

from mpwatch.errors import LaunchError
from mpwatch.multinode.leader import Leader
from mpwatch.multinode.local_ranks import LocalRanks, NodeUpdate
from mpwatch.multinode.node_machine import NodeAction, NodeMachine, Rejoin, ReportJob
from mpwatch.multinode.protocol.job_config import describe_difference, make_job_config
from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptReport,
    NextStep,
    NodeInfo,
    PublishedJobConfig,
    RefusedNode,
    RestartHistory,
    StartAttempt,
)
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SecretMismatchError, SignedJson
from mpwatch.multinode.protocol.store_channel import StoreChannel
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.client import JOB_OVER_KEY, RendezvousClient
from mpwatch.multinode.rendezvous.errors import CancelledError, JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.rounds import Round
from mpwatch.multinode.rendezvous.store import PrefixedStore
from mpwatch.multinode.round_runner import RoundRunner
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.watcher.commands import CommandQueue
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import RunStage, StopReason
from mpwatch.watcher.restarts.restart_group import RankSetup

LEAVE_SECONDS = 2.0  # beyond the grace period for the node's own ranks: for the other nodes to see that this node leaves
# An earlier job of the same name may just be ending. A new node tries to connect again for so long, after such pauses.
RECONNECT_SECONDS, RECONNECT_PAUSE = 10.0, 0.2
STORE_NODE_SECONDS = 1.0  # the node that serves the store gets so long to publish its JobConfig first
REJOIN_LAST_CALL_SECONDS = 2.0  # how long remaining nodes wait for more nodes, if not all expected nodes join at once
JOB_CONFIG_KEY, WRITERS_KEY, REFUSED_KEY = "job_config", "job_config/writers", "refused"  # in the store of the job


class NodeThread:
    """The thread of one node for one run. Other threads call its public methods.

    Args:
        spec: the options of the run.
        run_by: when the run's `timeout` is over, in seconds of CLOCK_MONOTONIC.
        client: how this node joins the others. None: by the spec's rendezvous.
    """

    def __init__(self, spec: WorkerSpec[Any], run_by: float = math.inf, client: RendezvousClient | None = None) -> None:
        assert spec.rendezvous is not None
        self._spec, self._rendezvous, self._run_by = spec, spec.rendezvous, run_by
        self._client, self._is_custom_client = client or RendezvousClient(spec.rendezvous), client is not None
        self._local_ranks: LocalRanks
        self._job_config = make_job_config(spec)
        self._signed_json = SignedJson(spec.rendezvous.key, spec.rendezvous.run_id)
        self._calls: deque[Callable[[RoundRunner], None]] = deque()
        self._wakeup = threading.Event()
        self._is_acknowledged = False
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpwatch-node")

    @property
    def backend(self) -> str:
        """The backend of the rendezvous, such as "c10d"."""
        return self._client.backend

    # Called in the caller's thread.

    def start(self, commands: CommandQueue) -> None:
        """Start the thread. It joins the other nodes. `commands` is the queue of the watcher thread. Raises LaunchError."""
        self._local_ranks = LocalRanks(commands, self._rendezvous.node_timeout)
        try:
            self._thread.start()
        except RuntimeError as error:  # Python is shutting down, or the limit of threads is reached
            raise LaunchError(f"the thread that joins the other nodes cannot be started: {error}") from error

    def take_updates(self) -> list[NodeUpdate]:
        """Return what the caller's thread has to know or to do, since the last call."""
        return self._local_ranks.take_updates()

    def set_prepared(self, start: StartAttempt, setups: list[RankSetup]) -> None:
        """Hand over the environments of the ranks for this attempt."""
        self._call(lambda _: self._local_ranks.set_prepared(start, setups))

    def report_attempt(self, report: AttemptReport) -> None:
        """Report to the leader what became of this node's ranks. They have all exited."""
        self._feed(lambda machine: machine.report_attempt(report))

    def acknowledge_shutdown(self) -> None:
        """Report that the decision about the job is known here, so that the other nodes need not wait for this one."""
        self._is_acknowledged = True
        self._feed(lambda machine: machine.acknowledge_shutdown())

    def abort(self, report: AttemptReport) -> None:
        """Report that the run cannot go on here, although no rank is to blame."""
        self._feed(lambda machine: machine.abort(report))

    def leave(self, seconds: float) -> None:
        """Leave the job within so many seconds: that is how long the other nodes have to see that this node leaves."""
        self._is_leaving.set()
        self._client.cancel()
        self._call(lambda round_runner: round_runner.leave(seconds))

    def close(self) -> None:
        """Leave the job, and wait until the thread has ended. If an exception is raised meanwhile, leave at once."""
        if not self._is_acknowledged:
            self.leave(self._spec.grace_period + LEAVE_SECONDS)
        try:
            self._join_thread()
        except BaseException:
            self.leave(0.0)
            self._join_thread()
            raise

    # Called in the watcher thread.

    def on_attempt_end(self, machine: StateMachine) -> None:
        """Report a signal, a failure, or that all ranks have exited. The argument is the state machine of the ranks."""
        if machine.signum is not None:
            reason = f"it received {signal.Signals(machine.signum).name}"
            self._feed(lambda node_machine: node_machine.leave(reason))
        elif machine.stop_reason in (StopReason.FAILED, StopReason.TIMED_OUT):
            self._feed(lambda node_machine: node_machine.report_failing())
        if machine.stage is RunStage.AWAITING_DECISION:
            self._feed(lambda node_machine: node_machine.report_ranks_stopped())

    def _feed(self, event: Callable[[NodeMachine], list[NodeAction]]) -> None:
        """Have the node thread feed the event to the node machine, and carry out the actions."""
        self._call(lambda round_runner: round_runner.add_actions(event(round_runner.node_machine)))

    def _call(self, call: Callable[[RoundRunner], None]) -> None:
        self._calls.append(call)
        self._wakeup.set()

    def _join_thread(self) -> None:
        if self._thread.native_id is not None:
            self._thread.join()
            wait_for_thread_exit(self._thread.native_id)

    # In the node thread.

    def _run(self) -> None:
        try:
            with closing(self._local_ranks):
                try:
                    self._run_rounds()
                finally:
                    self._client.close()
        except CancelledError:
            pass  # `close` was called
        except (LaunchError, JobClosedError, StoreLostError) as error:
            self._report_failed_rendezvous(error)
        except BaseException as error:  # noqa: BLE001  a bug of mpwatch: the caller's thread raises it
            self._local_ranks.notify_caller(error)

    def _report_failed_rendezvous(self, error: Exception) -> None:
        """Report to the caller's thread that the node could not join a round. No ranks run meanwhile."""
        if isinstance(error, LaunchError) and time.monotonic() >= self._run_by:
            error = LaunchError(f"`timeout` ({self._spec.timeout:g} s) ran out before the nodes had joined: {error}")
        if self._local_ranks.has_started:
            decision = AttemptDecision(NO_ATTEMPT, NextStep.FAILED, RestartHistory(), reason=str(error))
            self._local_ranks.notify_caller(ReportJob(decision))
        else:
            self._local_ranks.notify_caller(error if isinstance(error, LaunchError) else LaunchError(str(error)))

    def _run_rounds(self) -> None:
        rejoin = self._run_round(self._join_first_round(self._join_by()), RestartHistory())
        while rejoin is not None:
            joined = self._join(self._join_by(), last_call=REJOIN_LAST_CALL_SECONDS, expected_nodes=rejoin.expected_nodes)
            rejoin = self._run_round(joined, rejoin.history)

    def _join_by(self) -> float:
        return min(time.monotonic() + self._rendezvous.join_timeout, self._run_by)

    def _join_first_round(self, join_by: float) -> Round:
        """Connect, check the JobConfig, and join. If an earlier job of the same name is just ending, wait for its end.

        The node that serves the store leaves last, so a new node can still reach the store of the earlier job.
        """
        reconnect_by = time.monotonic() + RECONNECT_SECONDS
        earlier = ""
        while True:
            try:
                self._client.connect(join_by)
                self._check_job_config()
                return self._join(join_by)
            except LaunchError as error:
                raise LaunchError(f"{error}. Before that: {earlier}") if earlier else error from error.__cause__
            except (JobClosedError, StoreLostError) as error:
                earlier = str(error)
                is_permanent = self._is_custom_client or self._client.is_host or self._rendezvous.backend != "c10d"
                if is_permanent or time.monotonic() > min(reconnect_by, join_by):
                    raise
            self._client.close()
            self._client = RendezvousClient(self._rendezvous)
            if self._is_leaving.wait(RECONNECT_PAUSE):
                raise CancelledError

    def _join(self, deadline: float, *, last_call: float | None = None, expected_nodes: float = math.inf) -> Round:
        """Join the next round. Raises LaunchError, which also names a node that could not join because of its JobConfig."""
        try:
            return self._client.join(deadline, last_call=last_call, expected_nodes=expected_nodes)
        except LaunchError as error:
            store = self._client.get_job_store()
            with suppress(StoreLostError, InvalidEntryError):
                if store is not None and store.check([REFUSED_KEY]):
                    raise LaunchError(f"{error}. {self._describe_refusal(store.get(REFUSED_KEY))}") from error
            raise

    def _describe_refusal(self, entry: bytes) -> str:
        """Raises InvalidEntryError."""
        try:
            refused = from_json(RefusedNode, self._signed_json.decode(REFUSED_KEY, entry))
        except SecretMismatchError as error:
            return f"A node was refused, and what it has written is {error}"
        return f"{refused.host} was refused: {refused.reason}"

    def _check_job_config(self) -> None:
        """Compare this node's JobConfig with that of the first node, before the others wait for it. Raises LaunchError."""
        store = self._client.get_job_store()
        if store is None:  # the leader compares the JobConfigs later
            return
        if store.check([JOB_OVER_KEY]):
            raise JobClosedError(f"job {self._rendezvous.run_id!r} at {self._rendezvous.endpoint} is over")
        try:
            first = self._publish_or_read_job_config(store)
            reason = describe_difference(
                self._job_config, first.job_config, platform.node(), f"{first.host}, which came first"
            )
        except InvalidEntryError as error:
            reason = f"what the first node of the job has written cannot be read: {error}"
        if reason:
            # nodes that wait for this one to join learn the reason, too
            refused = RefusedNode(platform.node(), reason)
            store.set(REFUSED_KEY, self._signed_json.encode(REFUSED_KEY, to_json(refused)))
            raise LaunchError(f"job {self._rendezvous.run_id!r} at {self._rendezvous.endpoint}: {reason}")

    def _publish_or_read_job_config(self, store: PrefixedStore) -> PublishedJobConfig:
        """Return the JobConfig of the first node, which may be this one. Raises InvalidEntryError.

        If a node serves the store, that node is the first one. If it were refused, the store would be lost.
        """
        is_first = self._client.is_host
        may_be_served_by_node = self._rendezvous.backend == "c10d" and not is_first
        wait = Deadline(time.monotonic() + (STORE_NODE_SECONDS if may_be_served_by_node else 0.0), self._is_leaving)
        while not store.check([JOB_CONFIG_KEY]):
            if wait.wait_before_retry():
                continue
            if is_first or store.add(WRITERS_KEY, 1) == 1:
                published = PublishedJobConfig(platform.node(), self._job_config)
                store.set(JOB_CONFIG_KEY, self._signed_json.encode(JOB_CONFIG_KEY, to_json(published)))
            wait = Deadline(time.monotonic() + self._rendezvous.node_timeout, self._is_leaving)
            is_first = True  # from the second time on: the first writer may be lost
        return from_json(PublishedJobConfig, self._signed_json.decode(JOB_CONFIG_KEY, store.get(JOB_CONFIG_KEY)))

    def _run_round(self, joined: Round, history: RestartHistory) -> Rejoin | None:
        """Run one round. Return how the node joins the next round, or None if it does not."""
        options = self._rendezvous
        channel = StoreChannel(
            joined.store, self._signed_json, group_rank=joined.group_rank, write_timeout=options.node_timeout
        )
        node_machine = NodeMachine(
            self._make_node_info(joined.group_rank, history),
            size=joined.group_world_size,
            min_nodes=options.min_nodes,
            max_restarts=self._spec.policy.max_restarts,
            node_timeout=options.node_timeout,
            now=time.monotonic(),
        )
        leader = self._make_leader(joined.group_world_size) if joined.group_rank == 0 else None
        round_runner = RoundRunner(
            channel,
            node_machine,
            leader,
            self._client,
            self._local_ranks,
            size=joined.group_world_size,
            node_timeout=options.node_timeout,
        )
        round_runner.run(self._calls, self._wakeup)
        return round_runner.rejoin

    def _make_node_info(self, group_rank: int, history: RestartHistory) -> NodeInfo:
        assert isinstance(self._spec.nprocs, int)
        return NodeInfo(
            group_rank=group_rank,
            host=platform.node(),
            address=self._client.address,
            nprocs=self._spec.nprocs,
            role=self._spec.role,
            serves_store=self._client.is_host,
            grace_period=float(self._spec.grace_period),
            job_config=self._job_config,
            history=history,
        )

    def _make_leader(self, size: int) -> Leader:
        options = self._rendezvous
        return Leader(
            size=size,
            nnodes=(options.min_nodes, options.max_nodes),
            policy=self._spec.policy,
            node_timeout=options.node_timeout,
            exit_barrier_timeout=options.exit_barrier_timeout,
            now=time.monotonic(),
        )
