"""Makes torch's rendezvous indifferent to clocks that differ, or are set: each node goes by what it has seen, and when.

Torch's nodes write times of their own clocks into the state that they share: their last signs of life, and until when the
round waits for more. Others compare these with their clocks, and drop who seems to have died before he came. So between
torch and its backend the times of others are replaced by when this node has first seen them, by its monotonic clock; what
torch has not changed goes back as it was. Nothing here waits, or knows the network.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from mpwatch.multinode.rendezvous.torch_state import ZONE, Node, State, read, write


class _ForeignTime:
    """A time that another clock has written, and since when we know it."""

    def __init__(self, theirs: datetime, since: float) -> None:
        self.theirs = theirs
        self.since = since
        self.ours = theirs

    def told(self, moment: float, later: timedelta = timedelta()) -> datetime:
        """What it is by the clock of this host, as that stands now: should it be set, it is as long ago as before."""
        self.ours = datetime.now(UTC).replace(tzinfo=ZONE) - timedelta(seconds=moment - self.since) + later
        return self.ours


class LocalClockBackend(RendezvousBackend):
    """A backend whose states have no times but those of this node's clock.

    Args:
        backend: where the state is kept.
        last_call: how long a round that has enough nodes waits for more, from when this node has seen that it has enough.
        on_state: told of each state as it comes; what it raises is raised.
    """

    def __init__(
        self, backend: RendezvousBackend, last_call: Callable[[], timedelta], on_state: Callable[[State], None]
    ) -> None:
        self._backend = backend
        self._last_call = last_call
        self._on_state = on_state
        self._beats: dict[Node, _ForeignTime] = {}
        self._deadline: _ForeignTime | None = None

    @property
    def name(self) -> str:
        """The backend's."""
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Any] | None:
        """As the backend has it, but for the times."""
        response = self._backend.get_state()
        if response is None:
            return None
        data, token = response
        return self._ours(data), token

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Pass it on, with the times of others as they were. Whether it was taken is for the backend to say, which compares
        what it was given.
        """
        response = self._backend.set_state(self._theirs(state), token)
        if response is None:
            return None
        data, token, has_set = response
        return self._ours(data), token, has_set

    def _ours(self, data: bytes) -> bytes:
        state = read(data)
        self._on_state(state)
        now = time.monotonic()
        beats = {}
        for node, beat in state.last_heartbeats.items():
            known = self._beats.get(node)
            beats[node] = known if known and known.theirs == beat else _ForeignTime(beat, now)
            state.last_heartbeats[node] = beats[node].told(now)
        self._beats = beats
        if state.deadline is None:
            self._deadline = None
        else:
            if self._deadline is None or self._deadline.theirs != state.deadline:
                self._deadline = _ForeignTime(state.deadline, now)
            state.deadline = self._deadline.told(now, self._last_call())
        return write(state)

    def _theirs(self, data: bytes) -> bytes:
        state = read(data)
        for node, beat in state.last_heartbeats.items():
            known = self._beats.get(node)
            if known and known.ours == beat:
                state.last_heartbeats[node] = known.theirs
        if self._deadline and self._deadline.ours == state.deadline:
            state.deadline = self._deadline.theirs
        return write(state)
