"""Nodes that meet lose no time: they look often at first, and wait for nobody who is known not to come."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mpwatch.errors import LaunchError
from mpwatch.multinode.node_machine import NodeMachine, Rejoin, ReportAttempt
from mpwatch.multinode.protocol.messages import AttemptDecision, JobConfig, LostNode, NextStep, NodeInfo, RestartHistory
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.torch_handler import LEAST_LOOK, MOST_LOOK, pause
from mpwatch.multinode.rendezvous.torch_state import read
from mpwatch.options.rendezvous import Rendezvous

SOON = 0.2  # seconds
LONG = 20.0  # seconds of a last call that nobody is to wait for
PATIENCE = 30.0  # seconds


@pytest.fixture(scope="module", autouse=True)
def _what_torch_keeps():
    """The first store of a process leaves descriptors, of its event loops, for the later ones."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def engines():
    """Three of one job that one of them would be enough for; in the end they are closed, the one that serves the store last."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    made = [RendezvousClient(Rendezvous(f"127.0.0.1:{port}", "job", (1, 4), is_host=not number)) for number in range(3)]
    for engine in made:
        engine.connect(time.monotonic() + PATIENCE)
    yield made
    for engine in reversed(made):
        engine.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def join(pool, engines, **terms):
    calls = [pool.submit(engine.join, time.monotonic() + PATIENCE, **terms) for engine in engines]
    return lambda: [call.result().group_world_size for call in calls]


def await_state(engine, condition):
    deadline = time.monotonic() + PATIENCE
    while not condition(read(engine._opened.backend.get_state()[0])):
        assert time.monotonic() < deadline
        time.sleep(SOON / 10)


def test_survivors_that_are_all_there_wait_for_nobody(engines, pool):
    survivors = engines[:2]
    began = time.monotonic()
    assert join(pool, survivors, last_call=LONG, enough=2)() == [2, 2]
    assert join(pool, survivors, last_call=LONG, enough=2)() == [2, 2]
    assert time.monotonic() - began < LONG / 2


def test_survivors_wait_for_a_newcomer_that_they_know_of(engines, pool):
    *survivors, newcomer = engines
    assert join(pool, survivors, last_call=LONG, enough=2)() == [2, 2]
    joined = join(pool, [newcomer], last_call=LONG)
    await_state(newcomer, lambda state: state.wait_list)
    began = time.monotonic()
    assert join(pool, survivors, last_call=LONG, enough=2)() == [3, 3]
    assert joined() == [3]
    assert time.monotonic() - began < LONG / 2


def test_a_newcomer_that_is_quicker_than_a_survivor_is_not_taken_for_it(engines, pool):
    first, second, newcomer = engines
    assert join(pool, [first, second], last_call=LONG, enough=2)() == [2, 2]
    joined = join(pool, [newcomer], last_call=LONG)
    await_state(newcomer, lambda state: state.wait_list)
    second._meeting._withdraw()  # as its join begins
    returned = join(pool, [first], last_call=LONG, enough=2)
    await_state(newcomer, lambda state: len(state.participants) == 2)
    assert join(pool, [second], last_call=LONG, enough=2)() == returned() == joined() == [3]


def test_survivors_that_are_not_all_there_have_a_last_call(engines, pool):
    assert join(pool, engines[:1], last_call=SOON)() == [1]
    assert join(pool, engines[:1], last_call=SOON, enough=2)() == [1]


def test_a_node_looks_several_times_a_second_whether_a_round_has_formed(engines, monkeypatch):
    looks, backend = [], engines[0]._opened.backend
    monkeypatch.setattr(backend, "get_state", lambda get=backend.get_state: looks.append(1) or get())
    with pytest.raises(LaunchError):
        engines[0].join(time.monotonic() + 1.0, last_call=LONG)
    assert len(looks) >= 5  # torch would have looked once or twice


def test_it_looks_the_less_often_the_longer_it_has_waited_and_the_more_nodes_there_are():
    assert [pause(waited, 2) for waited in (0, 2, 5, 10, 600)] == [LEAST_LOOK, 0.2, 0.5, MOST_LOOK, MOST_LOOK]
    assert [pause(0, nodes) for nodes in (10, 50, 100, 1000)] == [0.1, 0.5, MOST_LOOK, MOST_LOOK]


def test_a_member_knows_how_many_of_its_round_will_come_again():
    card = NodeInfo(1, "host", "host", 2, "default", False, 10.0, "nonce", JobConfig(()), RestartHistory())
    member = NodeMachine(card, size=4, min_nodes=1, max_restarts=0, node_timeout=2, now=0)
    verdict = AttemptDecision(0, NextStep.RE_RENDEZVOUS, RestartHistory(1), gone=(LostNode(3, "lost", 6, 2, "silent"),))
    assert member.hear(verdict) == [ReportAttempt(verdict), Rejoin(RestartHistory(1), nodes=3)]
