"""The state of torch's rendezvous: times of other clocks are translated, and data that no node has written is refused."""

import dataclasses
import gc
import io
import os
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

import mpwatch.multinode.rendezvous.client
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.clock_skew import LocalClockBackend
from mpwatch.multinode.rendezvous.open_store import open_store
from mpwatch.multinode.rendezvous.torch_state import (
    MAX_STATE_BYTES,
    STATE_TIMEZONE,
    Node,
    State,
    dump_state,
    load_state,
)
from mpwatch.options.rendezvous import Rendezvous

ME, OTHER = Node("here", 1, 1), Node("there", 1, 2)
LAST_CALL = timedelta(seconds=3)
SKEW = timedelta(minutes=7)


class Memory(RendezvousBackend):
    """A backend in memory whose tokens are numbers."""

    def __init__(self, state):
        self.data, self.token = dump_state(state), 0

    @property
    def name(self):
        return "memory"

    def get_state(self):
        return self.data, self.token

    def set_state(self, state, token=None):
        is_written = token == self.token
        if is_written:
            self.data, self.token = state, self.token + 1
        return self.data, self.token, is_written


class OtherClock(RendezvousBackend):
    """A backend as a host sees it whose clock is ahead of the clock of this host, or behind it."""

    def __init__(self, backend, ahead):
        self.backend, self.ahead = backend, ahead

    @property
    def name(self):
        return self.backend.name

    def shifted(self, data, by):
        state = load_state(data)
        state.last_heartbeats = {node: heartbeat + by for node, heartbeat in state.last_heartbeats.items()}
        state.deadline = state.deadline and state.deadline + by
        return dump_state(state)

    def get_state(self):
        response = self.backend.get_state()
        return response and (self.shifted(response[0], -self.ahead), response[1])

    def set_state(self, state, token=None):
        response = self.backend.set_state(self.shifted(state, self.ahead), token)
        return response and (self.shifted(response[0], -self.ahead), *response[1:])


def now():
    return datetime.now(UTC).replace(tzinfo=STATE_TIMEZONE)


def make_state(**parts):
    state = State()
    vars(state).update(parts)
    return state


def make_local_clock_backend(backend, seen=None):
    return LocalClockBackend(backend, lambda: LAST_CALL, [].append if seen is None else seen.append)


def read_state(clock):
    return load_state(clock.get_state()[0])


@pytest.mark.parametrize("ahead", [SKEW, -SKEW, timedelta()])
def test_a_heartbeat_is_as_old_as_this_node_has_known_it(ahead):
    backend = Memory(make_state(last_heartbeats={OTHER: now() + ahead}))
    clock = make_local_clock_backend(backend)
    before = now()
    first = read_state(clock).last_heartbeats[OTHER]
    assert before <= first <= now()
    assert abs(read_state(clock).last_heartbeats[OTHER] - first) < timedelta(milliseconds=10)
    backend.data = dump_state(make_state(last_heartbeats={OTHER: now() + ahead}))
    before = now()
    assert before <= read_state(clock).last_heartbeats[OTHER] <= now()


@pytest.mark.parametrize("ahead", [SKEW, -SKEW])
def test_the_last_call_begins_when_this_node_first_sees_its_end(ahead):
    clock = make_local_clock_backend(Memory(make_state(deadline=now() + ahead)))
    before = now()
    assert before + LAST_CALL <= read_state(clock).deadline <= now() + LAST_CALL


def test_a_time_that_torch_has_not_changed_is_written_back_unchanged():
    remote = make_state(last_heartbeats={OTHER: now() + SKEW, ME: now() - SKEW}, deadline=now() - SKEW, round=1)
    backend = Memory(remote)
    clock = make_local_clock_backend(backend)
    data, token = clock.get_state()
    local = load_state(data)
    local.round, local.last_heartbeats[ME] = 2, (heartbeat := now())
    data, token, is_written = clock.set_state(dump_state(local), token)
    assert (is_written, token) == (True, 1)
    stored = load_state(backend.data)
    assert stored.last_heartbeats == {OTHER: remote.last_heartbeats[OTHER], ME: heartbeat}
    assert (stored.deadline, stored.round) == (remote.deadline, 2)
    assert abs(load_state(data).last_heartbeats[OTHER] - now()) < timedelta(seconds=10)


def test_a_write_with_an_old_token_is_refused():
    backend = Memory(make_state(round=1, last_heartbeats={OTHER: now() + SKEW}))
    clock = make_local_clock_backend(backend)
    data, token = clock.get_state()
    backend.set_state(dump_state(make_state(round=5)), token)
    data, token, is_written = clock.set_state(data, token)
    assert (load_state(data).round, token, is_written) == (5, 1, False)


def test_on_state_is_called_with_each_state():
    states = []
    clock = make_local_clock_backend(Memory(make_state(round=1)), states)
    _, token = clock.get_state()
    clock.set_state(dump_state(make_state(round=2)), token)
    assert [state.round for state in states] == [1, 2]


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("created",)


def make_state_with_waiting(thing):
    state = State()
    state.wait_list = {thing}
    return dump_state(state)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"no pickle", id="not a pickle"),
        pytest.param(pickle.dumps(RunsCode()), id="a pickle that runs code"),
        pytest.param(make_state_with_waiting(1), id="a set of numbers"),
        pytest.param(make_state_with_waiting(Node("address", "pid", 1)), id="a node with parts of wrong types"),
        pytest.param(
            dump_state(make_state(last_heartbeats={OTHER: datetime(2020, 1, 1, tzinfo=None if STATE_TIMEZONE else UTC)})),
            id="another kind of time",
        ),
        pytest.param(dump_state(make_state(round="1")), id="a round that is a text"),
        pytest.param(pickle.dumps(io.BytesIO()), id="another object"),
        pytest.param(pickle.dumps(make_state())[:-5], id="a cut state"),
        pytest.param(b"\0" * (MAX_STATE_BYTES + 1), id="too large"),
    ],
)
def test_data_that_no_node_has_written_is_refused_and_runs_nothing(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = Memory(make_state())
    backend.data = data
    with pytest.raises(RendezvousStateError, match="the store does not hold a valid rendezvous state"):
        make_local_clock_backend(backend).get_state()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module", autouse=True)
def _torch_descriptors():
    """Torch's first store of a process leaves three descriptors of its event loops open, for later stores."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gc.collect()


@pytest.fixture
def clients(monkeypatch):
    """Three nodes. The clock of the second is seven minutes ahead of the first's, and that of the third seven behind."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = Rendezvous(f"127.0.0.1:{server.getsockname()[1]}", "job", (1, 3), node_timeout=2)
    made = []
    for ahead in (timedelta(), SKEW, -SKEW):

        def open_skewed_store(*args, ahead=ahead):
            opened = open_store(*args)
            return dataclasses.replace(opened, backend=OtherClock(opened.backend, ahead))

        monkeypatch.setattr(mpwatch.multinode.rendezvous.client, "open_store", open_skewed_store)
        made.append(RendezvousClient(rendezvous))
        made[-1].connect(time.monotonic() + 10)
    yield made
    for client in reversed(made):
        client.close()
    gc.collect()


def read_heartbeats(client):
    return load_state(client._opened_store.backend.get_state()[0]).last_heartbeats


def test_nodes_with_other_clocks_stay_while_alive_and_are_dropped_when_dead(clients, eventually):
    def join(*clients):
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(client.join, time.monotonic() + 30, last_call=20) for client in clients]
            return [call.result() for call in calls]

    assert {formed.group_rank for formed in join(*clients)} == {0, 1, 2}
    at_first = read_heartbeats(clients[0])
    eventually(
        lambda: all(
            heartbeat - at_first[node] > timedelta(seconds=3) for node, heartbeat in read_heartbeats(clients[0]).items()
        ),
        20,
    )
    assert read_heartbeats(clients[0]).keys() == at_first.keys()
    for dead in clients[1:]:
        dead._implementation._handler.stop_heartbeats()
    assert clients[0].join(time.monotonic() + 20, last_call=0.2).group_world_size == 1
