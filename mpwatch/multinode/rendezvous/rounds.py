"""Form rounds in one of two ways: the nodes can come and go (dynamic), or each node has a fixed group rank (static).

This module raises LaunchError, JobClosedError or StoreLostError instead of torch's errors.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from mpwatch.errors import LaunchError
from mpwatch.multinode.protocol.json_codec import from_json
from mpwatch.multinode.protocol.messages import ExpectedNodes
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SignedJson
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.clock_skew import LocalClockBackend
from mpwatch.multinode.rendezvous.errors import CancelledError, JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.open_store import OpenedStore
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection
from mpwatch.multinode.rendezvous.torch_handler import Handler, JoinTimeouts, make_handler
from mpwatch.multinode.rendezvous.torch_state import Node, State, dump_state, load_state, remove_node
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.clock import monotonic
from mpwatch.torch_private import forget_bootstrap_store

T = TypeVar("T")

EXPECTED_NODES_KEY = "expected_nodes"  # the key of ExpectedNodes in the store of the job
LEFT_KEY = "left"  # the key in the store of a round for the number of its nodes that have left
LEAVE_TRIES = 20  # a try fails if another node has written the state meanwhile


@dataclass
class WaitReport:
    """Reports at most once that this node waits for other nodes to join."""

    due_at: float
    """When to report it, in seconds of CLOCK_MONOTONIC."""
    report: Callable[[int], object]
    """Called with the number of nodes that have joined, this one included."""
    is_done: bool = False

    def check(self, count: int) -> None:
        """If `due_at` has passed and nothing was reported yet, report that `count` nodes have joined."""
        if not self.is_done and monotonic() >= self.due_at:
            self.is_done = True
            self.report(count)


@dataclass(frozen=True)
class Round:
    """One round of the job, as this node sees it.

    If a node leaves while the round forms, the nodes may see different sizes of the round. `group_world_size` is always
    correct on the leader, which is the node with group rank 0.
    """

    store: PrefixedStore
    """The store that only this round uses. Any thread may use it. Its calls raise StoreLostError."""
    group_rank: int
    group_world_size: int

    def mark_as_left(self) -> None:
        """Record in the store that this node has left.

        After this call, this node may call `has_other_nodes`, but must not use the store in any other way.
        """
        with suppress(StoreLostError):
            self.store.add(LEFT_KEY, 1)

    def has_other_nodes(self) -> bool:
        """Return whether at least one other node has not left this round yet. Lost nodes never leave.

        Call this method after `mark_as_left`.
        """
        with suppress(StoreLostError):
            return self.store.add(LEFT_KEY, 0) < self.group_world_size
        return False


class _NoRoomError(Exception):
    """Raised if this node cannot join before its deadline, because the job has its maximum number of nodes.

    If the job has its maximum number of nodes, torch itself ignores the deadline, and waits until another node leaves.
    """


class _CheckedBackend(RendezvousBackend):
    """A wrapper of torch's rendezvous backend that raises StoreLostError instead of torch's errors."""

    def __init__(self, backend: RendezvousBackend, connection: StoreConnection) -> None:
        self._backend = backend
        self._connection = connection

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Any] | None:
        return self._connection.call(self._backend.get_state)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        return self._connection.call(self._backend.set_state, state, token)


class DynamicRendezvous:
    """Forms rounds with torch's dynamic rendezvous, so that nodes can join and leave during the job.

    Args:
        rendezvous: the options.
        opened: the store.
        address: name or address with which the other nodes reach this node.
    """

    def __init__(self, rendezvous: Rendezvous, opened: OpenedStore, address: str) -> None:
        self._rendezvous = rendezvous
        self._opened_store = opened
        self._timeouts = JoinTimeouts(rendezvous.node_timeout / 2)
        self._backend = _CheckedBackend(opened.backend, opened.connection)
        local_backend = LocalClockBackend(self._backend, self._last_call, self._on_state)
        self._handler: Handler = make_handler(rendezvous, local_backend, address, self._timeouts)
        self._deadline: Deadline | None = None  # the deadline of the join that is in progress
        self._state = State()  # the latest state that torch has read
        self._joined_count = 0  # the number of nodes that had joined in the latest state that contains this node
        self._previous_nodes: set[Node] = set()  # the nodes of the previous round
        self._expected_nodes = math.inf
        self._job_store = PrefixedStore(opened.connection, f"mpwatch.{rendezvous.run_id}")
        self._signed_json = SignedJson(rendezvous.key, rendezvous.run_id)
        self._wait_report: WaitReport | None = None  # of the join that is in progress

    def join(self, deadline: Deadline, last_call: float, expected_nodes: float, wait_report: WaitReport | None) -> Round:
        """See `RendezvousClient.join`."""
        started_at = monotonic()
        self._wait_report = wait_report
        self._timeouts.deadline, self._timeouts.last_call_seconds = deadline.at, last_call
        self._deadline, self._joined_count, self._expected_nodes = deadline, 0, expected_nodes
        try:
            deadline.seconds_left(0)
            while True:
                forget_bootstrap_store(self._handler)
                info = self._handler.next_rendezvous()
                if self._is_still_complete(info):
                    return self._make_round(info)
        except RendezvousStateError as error:
            raise StoreLostError(f"rendezvous at {self._opened_store.endpoint}: {error}") from error
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise JobClosedError(
                f"the rendezvous of job {self._rendezvous.run_id!r} at {self._opened_store.endpoint} is closed: that job is"
                " over. A new job needs a run_id of its own"
            ) from error
        except (RendezvousTimeoutError, _NoRoomError) as error:
            seconds = monotonic() - started_at
            text = self._describe_timeout(seconds, has_no_room=isinstance(error, _NoRoomError))
            self._remove_this_node()
            raise LaunchError(text) from error
        except (CancelledError, LaunchError):
            self._remove_this_node()
            raise
        finally:
            self._deadline = self._wait_report = None

    def _on_state(self, state: State) -> None:
        """Save the state that torch has just read, and raise an exception if the join must end.

        During a join, this method is called at least once a second. If the join was cancelled, raises CancelledError. If the
        deadline has passed and the job has no room for this node, raises _NoRoomError.
        """
        self._state = state
        node = self._handler.node
        if node in state.participants:
            self._joined_count = len(state.participants)
            if self._wait_report and not state.complete and self._joined_count < self._rendezvous.min_nodes:
                self._wait_report.check(self._joined_count)
        if self._deadline and not self._deadline.seconds_left(1) and node in state.redundancy_list:
            raise _NoRoomError

    def _last_call(self) -> timedelta:
        """Return how long a round waits for more nodes after the minimum number of nodes has joined.

        The returned time is zero if all expected nodes have joined and no other node waits to join. After the first round,
        only nodes of the previous round count as expected nodes. If the store contains an invalid number of expected nodes,
        raises LaunchError.
        """
        state = self._state
        returned = state.participants.keys() & (self._previous_nodes or state.participants.keys())
        has_entry = not self._previous_nodes and self._job_store.check([EXPECTED_NODES_KEY])
        expected = self._read_expected_nodes() if has_entry else self._expected_nodes
        are_all_here = len(returned) >= expected and not (state.wait_list or state.redundancy_list)
        return timedelta() if are_all_here else self._timeouts.last_call

    def _read_expected_nodes(self) -> int:
        entry = self._job_store.get(EXPECTED_NODES_KEY)
        try:
            return from_json(ExpectedNodes, self._signed_json.decode(EXPECTED_NODES_KEY, entry)).count
        except InvalidEntryError as error:
            raise LaunchError(f"the number of nodes that can come at present cannot be read: {error}") from error

    def _is_still_complete(self, info: RendezvousInfo) -> bool:
        """Return whether all nodes are still in the round.

        Another node can leave before this node sees that the round is complete.
        """
        return sorted(self._state.participants.values()) == list(range(info.world_size))

    def _make_round(self, info: RendezvousInfo) -> Round:
        self._previous_nodes = set(self._state.participants)
        # A store may still contain this round of an earlier job with the same run_id. But the first node's id is always new.
        first = next(node for node, rank in self._state.participants.items() if rank == 0)
        prefix = f"mpwatch.{self._rendezvous.run_id}.{self._state.round}.{first.local_id:x}"
        return Round(PrefixedStore(self._opened_store.connection, prefix), info.rank, info.world_size)

    def _describe_timeout(self, seconds: float, *, has_no_room: bool) -> str:
        rendezvous = self._rendezvous
        prefix = f"rendezvous of job {rendezvous.run_id!r} at {self._opened_store.endpoint}"
        if has_no_room:
            return (
                f"{prefix}: the job has its maximum number of nodes ({rendezvous.max_nodes}), and none of them has left in"
                f" {seconds:.1f} s. To allow more nodes, give all nodes a larger nnodes=(min, max)"
            )
        if not self._joined_count and self._state.complete:
            return (
                f"{prefix}: the job runs on {len(self._state.participants)} of at most {rendezvous.max_nodes} nodes and has"
                f" not taken in this node within {seconds:.1f} s. Check what those nodes report, or give this node a longer"
                " join_timeout"
            )
        count = self._joined_count or len(self._state.participants)
        return (
            f"{prefix}: {count} of {rendezvous.min_nodes} nodes had joined after {seconds:.1f} s. Check that mpwatch.run has"
            " been called on all of them with the same endpoint and run_id, and that it still runs there. A longer"
            " join_timeout waits longer"
        )

    def count_waiting_nodes(self) -> int:
        """See `RendezvousClient.count_waiting_nodes`."""
        return self._call_handler(self._handler.num_nodes_waiting)

    def set_closed(self) -> None:
        """See `RendezvousClient.set_closed`."""
        self._call_handler(self._handler.set_closed)

    def _call_handler(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (RendezvousStateError, RendezvousTimeoutError) as error:
            reason = str(error) or "too many other nodes write the state at the same time"
            raise StoreLostError(f"rendezvous at {self._opened_store.endpoint}: {reason}") from error

    def leave(self) -> None:
        """Stop the heartbeats and remove this node, so that no node waits for it.

        `leave` waits until the store answers.
        """
        self._handler.stop_heartbeats()
        self._remove_this_node()

    def has_other_nodes(self) -> bool:
        """Return whether the rendezvous state still contains at least one other node.

        If the state contains only lost nodes, this method still returns True. Call this method after this node has left.
        """
        with suppress(StoreLostError, RendezvousStateError):
            response = self._backend.get_state()
            return response is not None and bool(load_state(response[0]).last_heartbeats)
        return False

    def _remove_this_node(self) -> None:
        with suppress(StoreLostError, RendezvousStateError):  # the other nodes will then miss its heartbeats
            for _ in range(LEAVE_TRIES):
                response = self._backend.get_state()
                if response is None:
                    return
                state = load_state(response[0])
                if not remove_node(state, self._handler.node, self._handler.settings):
                    return
                result = self._backend.set_state(dump_state(state), response[1])
                if result and result[2]:
                    return


class StaticRendezvous:
    """Forms rounds in which each node has a fixed group rank. All nodes of the job must join each round.

    A round is complete when each node has added 1 to its key `here/<rank>` in the store of the round.
    """

    def __init__(self, rendezvous: Rendezvous, opened: OpenedStore) -> None:
        self._rendezvous = rendezvous
        self._opened_store = opened
        self._job_store = PrefixedStore(opened.connection, f"mpwatch.{rendezvous.run_id}")
        self._rounds = 0
        self._round: Round | None = None  # the latest round
        self._own_entry: tuple[PrefixedStore, str] | None = None  # the store and the key of a join that is in progress

    def join(self, deadline: Deadline, _last_call: float, _expected_nodes: float, wait_report: WaitReport | None) -> Round:
        """See `RendezvousClient.join`."""
        started_at = monotonic()
        deadline.seconds_left(0)
        rank, size = self._rendezvous.options["rank"], self._rendezvous.max_nodes
        store = PrefixedStore(self._opened_store.connection, f"mpwatch.{self._rendezvous.run_id}.{self._rounds}")
        missing = [f"here/{each}" for each in range(size)]
        if store.add(f"here/{rank}", 1) > 1:
            raise LaunchError(
                f"rendezvous at {self._opened_store.endpoint}: a node with options={{'rank': {rank}}} has already joined."
                " Either two nodes have the same rank, or one was restarted, which backend='static' does not support."
                " Give each node a rank of its own, or use backend='c10d'"
            )
        self._own_entry = store, f"here/{rank}"
        try:
            while missing := [key for key in missing if not store.check([key])]:
                if self._job_store.check(["closed"]):
                    raise JobClosedError(f"the job at {self._opened_store.endpoint} is over")
                if wait_report is not None:
                    wait_report.check(size - len(missing))
                if not deadline.wait_before_retry():
                    raise LaunchError(self._describe_timeout(missing, monotonic() - started_at))
        except (CancelledError, JobClosedError, LaunchError):
            self._delete_own_entry()
            raise
        self._rounds += 1
        self._own_entry = None
        self._round = Round(store, rank, size)
        return self._round

    def _describe_timeout(self, missing: list[str], seconds: float) -> str:
        ranks = ", ".join(key.partition("/")[2] for key in missing)
        return (
            f"rendezvous of job {self._rendezvous.run_id!r} at {self._opened_store.endpoint}: after {seconds:.1f} s nodes"
            f" with these ranks had not joined: {ranks}. Check that mpwatch.run has been called on them with the same"
            " endpoint and run_id, and each with its options={'rank': ...}"
        )

    def count_waiting_nodes(self) -> int:
        """Return 0. All nodes of a static job are in each round, so no node waits to join. Raises StoreLostError."""
        return self._opened_store.connection.call(int)

    def set_closed(self) -> None:
        """See `RendezvousClient.set_closed`."""
        self._job_store.set("closed", "1")

    def has_other_nodes(self) -> bool:
        """Return whether at least one other node has not left the latest round yet. Call this method after `leave`."""
        return self._round is not None and self._round.has_other_nodes()

    def leave(self) -> None:
        """If a `join` is in progress, delete this node's key `here/<rank>` from the store. Leave the latest round."""
        self._delete_own_entry()
        if self._round is not None:
            self._round.mark_as_left()

    def _delete_own_entry(self) -> None:
        if self._own_entry:
            store, key = self._own_entry
            with suppress(StoreLostError):
                store.delete_key(key)
            self._own_entry = None
