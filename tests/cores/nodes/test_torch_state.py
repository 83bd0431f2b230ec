"""Torch's rendezvous state is a pickle in a store that any program can write to. Only what nodes write is loaded."""

import io
import os
import pickle

import pytest

rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous")
from mpwatch.multinode.rendezvous.torch_state import MAX_STATE_BYTES, Node, State, dump_state, load_state  # noqa: E402


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("created",)


def make_state(**parts):
    state = State()
    vars(state).update(parts)
    return dump_state(state)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"no pickle", id="not a pickle"),
        pytest.param(pickle.dumps(RunsCode()), id="a pickle that runs code"),
        pytest.param(pickle.dumps(io.BytesIO()), id="another object"),
        pytest.param(make_state(wait_list={1}), id="a set of numbers"),
        pytest.param(make_state(wait_list={Node("address", "pid", 1)}), id="a node with parts of wrong types"),
        pytest.param(make_state(round="1"), id="a round that is a text"),
        pytest.param(make_state()[:-5], id="a cut state"),
        pytest.param(bytes(MAX_STATE_BYTES + 1), id="too large"),
    ],
)
def test_a_state_that_no_node_has_written_is_refused_and_runs_nothing(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_state(make_state(round=3)).round == 3
    with pytest.raises(rendezvous.RendezvousStateError, match="the store does not hold a valid rendezvous state"):
        load_state(data)
    assert not list(tmp_path.iterdir())
