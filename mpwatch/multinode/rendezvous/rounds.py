"""The two ways in which nodes meet, once they are connected to a store: as they come, or as they are numbered beforehand.

Blocks its caller's thread, but until a deadline or until it is cancelled. What torch raises is told here in our words.
"""

import math
import time
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
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.clock_skew import LocalClockBackend
from mpwatch.multinode.rendezvous.errors import CancelledError, JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.open_store import OpenedStore
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection
from mpwatch.multinode.rendezvous.torch_handler import Handler, JoinTimeouts, make_handler
from mpwatch.multinode.rendezvous.torch_state import Node, State, read, withdraw, write
from mpwatch.options.rendezvous import Rendezvous

T = TypeVar("T")

LEAVE_TRIES = 20  # each time somebody else has written in between


@dataclass(frozen=True)
class Round:
    """One membership of the job, as this node has it.

    Should a node leave in the moment in which the round forms, nodes may differ in how many they are: what holds is what
    the node of group rank 0 says.
    """

    store: PrefixedStore
    """Of this round alone: set, get, add, check, compare_set, delete_key, from any thread. They raise StoreLostError."""
    group_rank: int
    group_world_size: int


class _NoRoomError(Exception):
    """The time is over for a node that the job has no room for. Torch lets these wait for ever."""


class _CheckedBackend(RendezvousBackend):
    """Torch's backend, whose errors are ours."""

    def __init__(self, backend: RendezvousBackend, connection: StoreConnection) -> None:
        self._backend = backend
        self._connection = connection

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Any] | None:
        return self._connection.guarded(self._backend.get_state)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        return self._connection.guarded(self._backend.set_state, state, token)


class DynamicRendezvous:
    """Nodes that come and go, by torch's dynamic rendezvous.

    Args:
        rendezvous: the terms.
        opened: the store.
        address: by which the others reach this node.
    """

    def __init__(self, rendezvous: Rendezvous, opened: OpenedStore, address: str) -> None:
        self._rendezvous = rendezvous
        self._opened = opened
        self._terms = JoinTimeouts(rendezvous.node_timeout / 2)
        self._backend = _CheckedBackend(opened.backend, opened.connection)
        clock = LocalClockBackend(self._backend, self._last_call, self._look)
        self._handler: Handler = make_handler(rendezvous, clock, address, self._terms)
        self._limit: Deadline | None = None
        self._state = State()
        self._came = 0
        self._earlier: set[Node] = set()  # the nodes of the last round
        self._enough = math.inf

    def join(self, limit: Deadline, last_call: float, enough: float) -> Round:
        """See `Engine.join`."""
        started = time.monotonic()
        self._terms.deadline, self._terms.seconds_of_last_call = limit.deadline, last_call
        self._limit, self._came, self._enough = limit, 0, enough
        try:
            limit.left(0)
            while True:
                info = self._handler.next_rendezvous()
                if self._is_whole(info):
                    return self._round(info)
        except RendezvousStateError as error:
            raise StoreLostError(f"rendezvous at {self._opened.endpoint}: {error}") from error
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise JobClosedError(
                f"the rendezvous of job {self._rendezvous.run_id!r} at {self._opened.endpoint} is closed: that job is over."
                " Another one needs a run_id of its own"
            ) from error
        except (RendezvousTimeoutError, _NoRoomError) as error:
            text = self._why_not(time.monotonic() - started, spare=isinstance(error, _NoRoomError))
            self._withdraw()
            raise LaunchError(text) from error
        except CancelledError:
            self._withdraw()
            raise
        finally:
            self._limit = None

    def _look(self, state: State) -> None:
        """At each state that comes in while torch's engine is at work, at least once a second."""
        self._state = state
        node = self._handler.node
        if node in state.participants:
            self._came = len(state.participants)
        if self._limit and not self._limit.left(1) and node in state.redundancy_list:
            raise _NoRoomError

    def _last_call(self) -> timedelta:
        """How long a round that has enough nodes waits for more: for none, if all have come that are known to."""
        state = self._state
        returned = state.participants.keys() & (self._earlier or state.participants.keys())  # a newcomer is none of them
        are_all_there = len(returned) >= self._enough and not (state.wait_list or state.redundancy_list)
        return timedelta() if are_all_there else self._terms.last_call

    def _is_whole(self, info: RendezvousInfo) -> bool:
        """Whether nobody has left between the moment in which the round was formed and that in which we saw it."""
        return sorted(self._state.participants.values()) == list(range(info.world_size))

    def _round(self, info: RendezvousInfo) -> Round:
        self._earlier = set(self._state.participants)
        # A store that outlives jobs may hold this round of an earlier job with this run_id. The first node's id is new.
        first = next(node for node, rank in self._state.participants.items() if rank == 0)
        prefix = f"mpwatch.{self._rendezvous.run_id}.{self._state.round}.{first.local_id:x}"
        return Round(PrefixedStore(self._opened.connection, prefix), info.rank, info.world_size)

    def _why_not(self, seconds: float, *, spare: bool) -> str:
        here, of = f"rendezvous of job {self._rendezvous.run_id!r} at {self._opened.endpoint}", self._rendezvous
        if spare:
            return (
                f"{here}: the job has all {of.max_nodes} nodes that it may have, and none has left in {seconds:.1f} s."
                " Should it have more, give all nodes a larger nnodes=(min, max)"
            )
        if not self._came and self._state.complete:
            return (
                f"{here}: the job runs with {len(self._state.participants)} nodes, and has not taken this one in within"
                f" {seconds:.1f} s. See what these nodes say; a longer join_timeout waits longer"
            )
        came = self._came or len(self._state.participants)
        return (
            f"{here}: {came} of {of.min_nodes} nodes had come after {seconds:.1f} s. Has mpwatch.run been called on"
            " all of them, with the same endpoint and run_id, and does it run there still? A longer join_timeout waits more"
        )

    def waiting(self) -> int:
        """See `Engine.waiting`."""
        return self._told(self._handler.num_nodes_waiting)

    def set_closed(self) -> None:
        """See `Engine.set_closed`."""
        self._told(self._handler.set_closed)

    def _told(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (RendezvousStateError, RendezvousTimeoutError) as error:
            reason = str(error) or "too many others write at the same time"
            raise StoreLostError(f"rendezvous at {self._opened.endpoint}: {reason}") from error

    def leave(self) -> None:
        """End the thread that gives signs of life, and have the others not wait for us. Blocks as long as the store does."""
        self._handler.stop()
        self._withdraw()

    def has_others(self) -> bool:
        """Whether there are nodes besides this one, which has left: others that are leaving, and those that were lost."""
        with suppress(StoreLostError, RendezvousStateError):
            response = self._backend.get_state()
            return response is not None and bool(read(response[0]).last_heartbeats)
        return False

    def _withdraw(self) -> None:
        with suppress(StoreLostError, RendezvousStateError):  # then they will miss our signs of life
            for _ in range(LEAVE_TRIES):
                response = self._backend.get_state()
                if response is None:
                    return
                state = read(response[0])
                if not withdraw(state, self._handler.node, self._handler.settings):
                    return
                written = self._backend.set_state(write(state), response[1])
                if written and written[2]:
                    return


class StaticRendezvous:
    """Nodes that know their ranks. All of them have to come for each round."""

    def __init__(self, rendezvous: Rendezvous, opened: OpenedStore) -> None:
        self._rendezvous = rendezvous
        self._opened = opened
        self._job = PrefixedStore(opened.connection, f"mpwatch.{rendezvous.run_id}")
        self._rounds = 0
        self._mark: tuple[PrefixedStore, str] | None = None

    def join(self, limit: Deadline, *_: float) -> Round:
        """See `Engine.join`."""
        started = time.monotonic()
        limit.left(0)
        rank, size = self._rendezvous.options["rank"], self._rendezvous.max_nodes
        store = PrefixedStore(self._opened.connection, f"mpwatch.{self._rendezvous.run_id}.{self._rounds}")
        missing = [f"here/{each}" for each in range(size)]
        if store.add(f"here/{rank}", 1) > 1:
            raise LaunchError(
                f"rendezvous at {self._opened.endpoint}: a node with options={{'rank': {rank}}} has come already: two"
                " nodes have the same number, or one was started again, which backend='static' cannot take in"
            )
        self._mark = store, f"here/{rank}"
        try:
            while missing := [key for key in missing if not store.check([key])]:
                if self._job.check(["closed"]):
                    raise JobClosedError(f"the job at {self._opened.endpoint} is over")
                if not limit.pause():
                    raise LaunchError(self._why_not(missing, time.monotonic() - started))
        except (CancelledError, JobClosedError, LaunchError):
            self._withdraw()
            raise
        self._rounds += 1
        self._mark = None
        return Round(store, rank, size)

    def _why_not(self, missing: list[str], seconds: float) -> str:
        ranks = ", ".join(key.partition("/")[2] for key in missing)
        return (
            f"rendezvous of job {self._rendezvous.run_id!r} at {self._opened.endpoint}: after {seconds:.1f} s nodes with"
            f" these ranks had not come: {ranks}. Has mpwatch.run been called on them, with the same endpoint and run_id,"
            " and their options={'rank': ...}?"
        )

    def waiting(self) -> int:
        """0: nobody comes who is not known. Raises StoreLostError."""
        return self._opened.connection.guarded(int)

    def set_closed(self) -> None:
        """See `Engine.set_closed`."""
        self._job.set("closed", "1")

    def has_others(self) -> bool:
        """False: nobody says here that he leaves."""
        return False

    def leave(self) -> None:
        """Nothing of it is kept anywhere but the mark of a join in progress."""
        self._withdraw()

    def _withdraw(self) -> None:
        if self._mark:
            store, key = self._mark
            with suppress(StoreLostError):
                store.delete_key(key)
            self._mark = None
