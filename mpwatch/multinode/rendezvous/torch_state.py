"""Read and write the state that torch's dynamic rendezvous keeps in the store. The state says which nodes are in the round.

torch keeps the state as a pickle. Without this module, torch would unpickle any data in the store, and a pickle can execute
code. This module reads the pickle with a restricted unpickler, which creates only objects of the six classes that a state
needs. After a check of all values, this module makes a new pickle of the state, and torch unpickles the new pickle.
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

STATE_TIMEZONE = state_timezone()
MAX_STATE_BYTES = 1 << 24  # a node needs about 200 bytes
ALLOWED_CLASSES = {(cls.__module__, cls.__qualname__): cls for cls in (Node, State, datetime, timedelta, timezone, set)}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED_CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a rendezvous state") from None


def load_state(data: bytes) -> State:
    """Unpickle and check a state. Raises torch's RendezvousStateError if the data are not a valid state."""
    try:
        if len(data) > MAX_STATE_BYTES:
            raise ValueError(f"{len(data)} bytes")
        state = _RestrictedUnpickler(io.BytesIO(data)).load()
        _check_state(state)
    except Exception as error:
        raise RendezvousStateError(f"the store does not hold a valid rendezvous state: {error!r:.200}") from error
    return cast("State", state)


def dump_state(state: State) -> bytes:
    """Pickle a state as torch does."""
    return pickle.dumps(state)


def _check_state(state: State) -> None:
    """Check the types of all parts of a state.

    If a value has the wrong type, raises ValueError. If an attribute is missing, raises AttributeError.
    """
    _require([type(part) for part in (state, state.round, state.complete, state.closed)] == [State, int, bool, bool])
    _require(state.deadline is None or _is_time(state.deadline))
    _require([type(part) for part in (state.participants, state.last_heartbeats)] == [dict, dict])
    _require([type(part) for part in (state.wait_list, state.redundancy_list)] == [set, set])
    _require(all(type(rank) is int for rank in state.participants.values()))
    _require(all(map(_is_time, state.last_heartbeats.values())))
    for nodes in (state.participants, state.wait_list, state.redundancy_list, state.last_heartbeats):
        _require(all(map(_is_node, nodes)))


def _require(is_valid: bool) -> None:
    if not is_valid:
        raise ValueError("a part of it has the wrong type")


def _is_time(value: object) -> bool:
    return type(value) is datetime and type(value.tzinfo) is type(STATE_TIMEZONE)


def _is_node(value: object) -> bool:
    return type(value) is Node and [type(part) for part in (value.addr, value.pid, value.local_id)] == [str, int, int]


def remove_node(state: State, node: Node, settings: RendezvousSettings) -> bool:
    """Remove a node from the state, as torch does when a node leaves.

    Return False if the state did not contain the node.
    """
    node_lists = [nodes for nodes in (state.wait_list, state.redundancy_list) if node in nodes]
    is_participant = node in state.participants
    for nodes in node_lists:
        nodes.remove(node)
    if is_participant:
        del state.participants[node]
        _remove_participant_epilogue(state, settings)
    heartbeat = state.last_heartbeats.pop(node, None)
    return is_participant or bool(node_lists) or heartbeat is not None
