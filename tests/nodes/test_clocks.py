"""What torch's engine sees of times and states, where the clocks of hosts differ and not everybody who writes is a node."""

import dataclasses
import gc
import io
import os
import pickle
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

sys.path.insert(0, str(Path(__file__).parent.parent))

import mpwatch.multinode.rendezvous.client
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.clock_skew import LocalClockBackend
from mpwatch.multinode.rendezvous.open_store import open_store
from mpwatch.multinode.rendezvous.torch_state import MAX_BYTES, ZONE, Node, State, read, write
from mpwatch.options.rendezvous import Rendezvous

ME, OTHER = Node("here", 1, 1), Node("there", 1, 2)
LAST_CALL = timedelta(seconds=3)
AGES = timedelta(minutes=7)


class Memory(RendezvousBackend):
    """A backend in memory. The tokens are numbers."""

    def __init__(self, state):
        self.name_of_it, self.data, self.token = "memory", write(state), 0

    @property
    def name(self):
        return self.name_of_it

    def get_state(self):
        return self.data, self.token

    def set_state(self, state, token=None):
        taken = token == self.token
        if taken:
            self.data, self.token = state, self.token + 1
        return self.data, self.token, taken


class OtherClock(RendezvousBackend):
    """The store as a host sees it whose clock is ahead of ours, or behind."""

    def __init__(self, backend, ahead):
        self.backend, self.ahead = backend, ahead

    @property
    def name(self):
        return self.backend.name

    def shifted(self, data, by):
        state = read(data)
        state.last_heartbeats = {node: beat + by for node, beat in state.last_heartbeats.items()}
        state.deadline = state.deadline and state.deadline + by
        return write(state)

    def get_state(self):
        response = self.backend.get_state()
        return response and (self.shifted(response[0], -self.ahead), response[1])

    def set_state(self, state, token=None):
        response = self.backend.set_state(self.shifted(state, self.ahead), token)
        return response and (self.shifted(response[0], -self.ahead), *response[1:])


def now():
    return datetime.now(UTC).replace(tzinfo=ZONE)


def a_state(**parts):
    state = State()
    vars(state).update(parts)
    return state


def clock_over(backend, told=None):
    return LocalClockBackend(backend, lambda: LAST_CALL, [].append if told is None else told.append)


def seen(clock):
    return read(clock.get_state()[0])


@pytest.mark.parametrize("ahead", [AGES, -AGES, timedelta()])
def test_a_sign_of_life_is_as_old_as_we_have_known_it(ahead):
    backend = Memory(a_state(last_heartbeats={OTHER: now() + ahead}))
    clock = clock_over(backend)
    before = now()
    first = seen(clock).last_heartbeats[OTHER]
    assert before <= first <= now()
    assert abs(seen(clock).last_heartbeats[OTHER] - first) < timedelta(milliseconds=10)
    backend.data = write(a_state(last_heartbeats={OTHER: now() + ahead}))
    before = now()
    assert before <= seen(clock).last_heartbeats[OTHER] <= now()


@pytest.mark.parametrize("ahead", [AGES, -AGES])
def test_a_round_waits_as_long_as_we_say_from_when_we_have_seen_it(ahead):
    clock = clock_over(Memory(a_state(deadline=now() + ahead)))
    before = now()
    assert before + LAST_CALL <= seen(clock).deadline <= now() + LAST_CALL


def test_what_torch_has_not_changed_goes_back_as_it_was():
    theirs = a_state(last_heartbeats={OTHER: now() + AGES, ME: now() - AGES}, deadline=now() - AGES, round=1)
    backend = Memory(theirs)
    clock = clock_over(backend)
    data, token = clock.get_state()
    ours = read(data)
    ours.round, ours.last_heartbeats[ME] = 2, (beat := now())
    data, token, taken = clock.set_state(write(ours), token)
    assert (taken, token) == (True, 1)
    stored = read(backend.data)
    assert stored.last_heartbeats == {OTHER: theirs.last_heartbeats[OTHER], ME: beat}
    assert (stored.deadline, stored.round) == (theirs.deadline, 2)
    assert abs(read(data).last_heartbeats[OTHER] - now()) < timedelta(seconds=10)


def test_a_write_that_came_too_late_is_not_taken():
    backend = Memory(a_state(round=1, last_heartbeats={OTHER: now() + AGES}))
    clock = clock_over(backend)
    data, token = clock.get_state()
    backend.set_state(write(a_state(round=5)), token)
    data, token, taken = clock.set_state(data, token)
    assert (read(data).round, token, taken) == (5, 1, False)


def test_each_state_is_told_as_it_comes():
    told = []
    clock = clock_over(Memory(a_state(round=1)), told)
    _, token = clock.get_state()
    clock.set_state(write(a_state(round=2)), token)
    assert [state.round for state in told] == [1, 2]


class Thief:
    def __reduce__(self):
        return os.mkdir, ("stolen",)


def a_set_of(thing):
    state = State()
    state.wait_list = {thing}
    return write(state)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"no pickle", id="no pickle"),
        pytest.param(pickle.dumps(Thief()), id="what calls something"),
        pytest.param(a_set_of(1), id="other things"),
        pytest.param(a_set_of(Node("address", "pid", 1)), id="a node of other things"),
        pytest.param(
            write(a_state(last_heartbeats={OTHER: datetime(2020, 1, 1, tzinfo=None if ZONE else UTC)})),
            id="another kind of time",
        ),
        pytest.param(write(a_state(round="1")), id="a round that is no number"),
        pytest.param(pickle.dumps(io.BytesIO()), id="another object"),
        pytest.param(pickle.dumps(a_state())[:-5], id="half a state"),
        pytest.param(b"\0" * (MAX_BYTES + 1), id="too much"),
    ],
)
def test_what_no_node_has_written_does_no_harm(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = Memory(a_state())
    backend.data = data
    with pytest.raises(RendezvousStateError, match="what the store holds is no state of a rendezvous"):
        clock_over(backend).get_state()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module", autouse=True)
def _what_torch_keeps():
    """The first store of a process leaves three descriptors, of its event loops, for the later ones."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gc.collect()


@pytest.fixture
def engines(monkeypatch):
    """Three nodes; the clock of the second is minutes ahead of the first's, and that of the third minutes behind."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        terms = Rendezvous(f"127.0.0.1:{server.getsockname()[1]}", "job", (1, 3), node_timeout=2)
    made = []
    for ahead in (timedelta(), AGES, -AGES):

        def skewed(*args, ahead=ahead):
            opened = open_store(*args)
            return dataclasses.replace(opened, backend=OtherClock(opened.backend, ahead))

        monkeypatch.setattr(mpwatch.multinode.rendezvous.client, "open_store", skewed)
        made.append(RendezvousClient(terms))
        made[-1].connect(time.monotonic() + 10)
    yield made
    for engine in reversed(made):
        engine.close()
    gc.collect()


def beats(engine):
    return read(engine._opened.backend.get_state()[0]).last_heartbeats


def test_nodes_with_other_clocks_are_neither_dropped_nor_kept_when_they_are_dead(engines, eventually):
    def join(*engines):
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(engine.join, time.monotonic() + 30, last_call=20) for engine in engines]
            return [call.result() for call in calls]

    assert {formed.group_rank for formed in join(*engines)} == {0, 1, 2}
    met = beats(engines[0])
    eventually(lambda: all(beat - met[node] > timedelta(seconds=3) for node, beat in beats(engines[0]).items()), 20)
    assert beats(engines[0]).keys() == met.keys()
    for dead in engines[1:]:
        dead._meeting._handler.stop()
    assert engines[0].join(time.monotonic() + 20, last_call=0.2).group_world_size == 1
