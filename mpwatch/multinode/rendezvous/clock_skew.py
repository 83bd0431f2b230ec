"""Keep torch's rendezvous independent of clocks that differ between hosts, or that are set while it runs.

Torch's nodes write times of their own clocks into the shared state: the last heartbeat of each node, and the end of the
last call. Torch compares these times with the clock of its own host. It would drop a live node whose clock is behind.

LocalClockBackend stands between torch and the backend that keeps the state. Torch reads the time at which this node first
saw a value, as measured by the monotonic clock. A time that torch has not changed is written back as it was:

    torch <--- times of the local clock --- LocalClockBackend <--- times as the nodes wrote them --- store
          ---- times of the local clock -->                   ---- foreign times unchanged -------->

This module never waits and does not use the network.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from mpwatch.multinode.rendezvous.torch_state import STATE_TIMEZONE, Node, State, dump_state, load_state


class _ForeignTime:
    """A time that another clock wrote, and when this node first saw it."""

    def __init__(self, written: datetime, seen_at: float) -> None:
        self.written = written
        self.seen_at = seen_at
        self.local = written

    def to_local(self, now: float, later: timedelta = timedelta()) -> datetime:
        """Return the time by the local clock as it stands now. If that clock was set, the time is as long ago as before."""
        self.local = datetime.now(UTC).replace(tzinfo=STATE_TIMEZONE) - timedelta(seconds=now - self.seen_at) + later
        return self.local


class LocalClockBackend(RendezvousBackend):
    """A backend whose states contain only times of the local clock.

    Args:
        backend: the backend that keeps the state.
        last_call: returns how long a round waits for more nodes, from when this node saw that the minimum has joined.
        on_state: called with each state that is read. What it raises is raised.
    """

    def __init__(
        self, backend: RendezvousBackend, last_call: Callable[[], timedelta], on_state: Callable[[State], None]
    ) -> None:
        self._backend = backend
        self._last_call = last_call
        self._on_state = on_state
        self._heartbeats: dict[Node, _ForeignTime] = {}
        self._last_call_end: _ForeignTime | None = None

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Any] | None:
        response = self._backend.get_state()
        if response is None:
            return None
        data, token = response
        return self._with_local_times(data), token

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write the state with the times of other nodes as they were.

        The backend answers whether the write took effect: it compares the stored bytes with those that it was given.
        """
        response = self._backend.set_state(self._with_written_times(state), token)
        if response is None:
            return None
        data, token, has_set = response
        return self._with_local_times(data), token, has_set

    def _with_local_times(self, data: bytes) -> bytes:
        state = load_state(data)
        self._on_state(state)
        now = time.monotonic()
        heartbeats = {}
        for node, written in state.last_heartbeats.items():
            known = self._heartbeats.get(node)
            heartbeats[node] = known if known and known.written == written else _ForeignTime(written, now)
            state.last_heartbeats[node] = heartbeats[node].to_local(now)
        self._heartbeats = heartbeats
        if state.deadline is None:
            self._last_call_end = None
        else:
            if self._last_call_end is None or self._last_call_end.written != state.deadline:
                self._last_call_end = _ForeignTime(state.deadline, now)
            state.deadline = self._last_call_end.to_local(now, self._last_call())
        return dump_state(state)

    def _with_written_times(self, data: bytes) -> bytes:
        state = load_state(data)
        for node, local in state.last_heartbeats.items():
            known = self._heartbeats.get(node)
            if known and known.local == local:
                state.last_heartbeats[node] = known.written
        if self._last_call_end and self._last_call_end.local == state.deadline:
            state.deadline = self._last_call_end.written
        return dump_state(state)
