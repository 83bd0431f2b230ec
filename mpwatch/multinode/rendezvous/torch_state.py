"""What torch's engine keeps in the store: who takes part in which round. Read so that it can only be that.

Torch unpickles whatever the store holds. Here it is unpickled with the few classes that it consists of, and looked through,
before torch sees it; what torch gets is pickled here. Imports torch's classes.
"""

import io
import pickle
from datetime import datetime, timedelta, timezone
from typing import Any, cast

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings

from mpwatch.torch_private import _NodeDesc, _remove_participant_epilogue, _RendezvousState, state_timezone

Node = _NodeDesc
State = _RendezvousState

ZONE = state_timezone()
MAX_BYTES = 1 << 24  # of some 200 a node
KNOWN = {(kind.__module__, kind.__qualname__): kind for kind in (Node, State, datetime, timedelta, timezone, set)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a state") from None


def read(data: bytes) -> State:
    """Raises RendezvousStateError, which torch has for that, if it is anything else."""
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes")
        state = _Unpickler(io.BytesIO(data)).load()
        _look_through(state)
    except Exception as error:
        raise RendezvousStateError(f"what the store holds is no state of a rendezvous: {error!r:.200}") from error
    return cast("State", state)


def write(state: State) -> bytes:
    """As torch writes it."""
    return pickle.dumps(state)


def _look_through(state: State) -> None:
    """Raises whatever happens to what is not as it should be."""
    _check([type(part) for part in (state, state.round, state.complete, state.closed)] == [State, int, bool, bool])
    _check(state.deadline is None or _is_time(state.deadline))
    _check([type(kept) for kept in (state.participants, state.last_heartbeats)] == [dict, dict])
    _check([type(kept) for kept in (state.wait_list, state.redundancy_list)] == [set, set])
    _check(all(type(rank) is int for rank in state.participants.values()))
    _check(all(map(_is_time, state.last_heartbeats.values())))
    for nodes in (state.participants, state.wait_list, state.redundancy_list, state.last_heartbeats):
        _check(all(map(_is_node, nodes)))


def _check(is_so: bool) -> None:
    if not is_so:
        raise ValueError("it is made of other things")


def _is_time(value: object) -> bool:
    return type(value) is datetime and type(value.tzinfo) is type(ZONE)


def _is_node(value: object) -> bool:
    return type(value) is Node and [type(part) for part in (value.addr, value.pid, value.local_id)] == [str, int, int]


def withdraw(state: State, node: Node, settings: RendezvousSettings) -> bool:
    """Take a node out of the state, as torch does with those that leave. Whether it was in there."""
    listed = [nodes for nodes in (state.wait_list, state.redundancy_list) if node in nodes]
    takes_part = node in state.participants
    for nodes in listed:
        nodes.remove(node)
    if takes_part:
        del state.participants[node]
        _remove_participant_epilogue(state, settings)
    beat = state.last_heartbeats.pop(node, None)
    return takes_part or bool(listed) or beat is not None
