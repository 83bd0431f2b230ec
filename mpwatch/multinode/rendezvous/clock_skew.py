"""Make torch's rendezvous work even if the clocks of hosts differ, or if somebody sets a clock during the rendezvous.

torch's shared state contains times of the nodes' own clocks: the time of each node's last heartbeat, and the time at which
the wait for more nodes ends. torch compares the times of other nodes with the local clock. Without this module, torch would
remove a live node whose clock is behind the clocks of other nodes.

LocalClockBackend is a layer between torch and the store, and replaces the times in the state. For torch, a heartbeat was
sent when this node first read the heartbeat from the store. For torch, the wait for more nodes begins when this node first
reads the end of the wait from the store. When torch writes the state, LocalClockBackend writes the times that torch has
changed, and leaves all other times in the store as they are:

    torch <--- times of the local clock --- LocalClockBackend <--- times as the nodes wrote them --- store
          ---- times of the local clock -->                   ---- foreign times unchanged -------->
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from mpwatch.multinode.rendezvous.torch_state import STATE_TIMEZONE, Node, State, dump_state, load_state
from mpwatch.os_support.clock import monotonic


class _ForeignTime:
    """A time that another node has written into the state.

    Args:
        written: the time that the other node wrote. It is a time of the other node's clock.
        seen_at: when this node first read the time, in seconds on the monotonic clock of this node.
    """

    def __init__(self, written: datetime, seen_at: float) -> None:
        self.written = written
        self.seen_at = seen_at
        self.local = written

    def to_local(self, now: float, later: timedelta = timedelta()) -> datetime:
        """Return the sum of `seen_at` and `later`, as a time of the local clock.

        If somebody sets the local clock forward by an hour, the following calls return times that are one hour later.
        """
        self.local = datetime.now(UTC).replace(tzinfo=STATE_TIMEZONE) - timedelta(seconds=now - self.seen_at) + later
        return self.local


class LocalClockBackend(RendezvousBackend):
    """A rendezvous backend that gives torch only times of the local clock.

    Args:
        backend: the backend that keeps the state.
        last_call: returns how long a round waits for more nodes when this node has seen that the minimum has joined.
        on_state: called with each state that is read. Exceptions of this function are not caught.
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
        """Write the state to the store.

        `set_state` writes the times that torch has changed, and leaves all other times in the store as they are.
        """
        response = self._backend.set_state(self._with_written_times(state), token)
        if response is None:
            return None
        data, token, has_set = response
        return self._with_local_times(data), token, has_set

    def _with_local_times(self, data: bytes) -> bytes:
        state = load_state(data)
        self._on_state(state)
        now = monotonic()
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
