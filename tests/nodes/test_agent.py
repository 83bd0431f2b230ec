"""An Agent on each node, also with a rendezvous handler of torch, and the exit status of `mpwatch.main`."""

import importlib
import signal

import pytest
from torch import distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

import mpwatch
from mpwatch import Rendezvous, WorkerSpec
from mpwatch.multinode import Agent
from nodes import tasks
from nodes.harness import AT_ONCE, NODE_TIMEOUT
from nodes.test_jobs import values_of
from support.programs import python


@pytest.fixture(scope="module", autouse=True)
def _what_torch_keeps():
    """Create a store first: it leaves descriptors of its event loops in the process, which later stores use."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_importing_multinode_does_not_import_torch():
    out = python("-c", "import sys, mpwatch.multinode; print(mpwatch.multinode.__all__, 'torch' in sys.modules)").stdout
    assert out == "['Agent', 'WorkerGroupInfo'] False\n"


def test_an_agent_knows_its_ranks(job):
    job.start_several(2, tasks.get_worker_info, 2, through="agent")
    outcomes = job.outcomes()
    values_of(outcomes)
    for outcome in outcomes:
        (group_rank,) = {value["group_rank"] for value in outcome.values.values()}
        assert outcome.group == {
            "ranks": list(outcome.values),
            "group_rank": group_rank,
            "group_world_size": 2,
            "state": "SUCCEEDED",
        }


def test_nodes_that_join_by_a_handler_of_torch_restart_together(job):
    job.start_several(2, nprocs=2, through="handler", max_restarts=1)
    first = job.await_world(4)
    at = first[3].order("raise", "once")
    assert job.await_end(first) - at < AT_ONCE
    second = job.await_world(4)
    assert {process.worker["restart_count"] for process in second} == {1}
    assert second[0].round != first[0].round
    second.order("return", "done")
    outcomes = job.outcomes()
    assert values_of(outcomes) == ["done"] * 4
    assert [outcome.restarts for outcome in outcomes] == [1, 1]


def test_without_restarts_all_nodes_have_the_exit_code_of_the_root_cause(job):
    job.start_several(2, through="handler")
    world = job.await_world(2)
    at = world[1].order("exit", 7)
    for outcome in job.outcomes():
        assert outcome.exit_code == 7
        assert outcome.ended - at < 2 * AT_ONCE
        assert outcome.root_cause["rank"] == 1
        assert outcome.group["state"] == "FAILED"


def test_with_a_handler_the_job_goes_on_without_a_node_that_has_left(job):
    job.rendezvous["nnodes"] = 1, 2
    kept, leaving = job.start_several(2, through="handler")
    first = job.await_world(2)
    at = leaving.send(signal.SIGTERM)
    assert job.await_end(first) - at < AT_ONCE
    leaving.exit_status()
    job.await_world(1).order("return")
    values_of([kept.outcome()])


def test_with_a_handler_a_killed_node_is_lost_in_time(job):
    kept, lost = job.start_several(2, through="handler")
    world = job.await_world(2)
    killed_at = lost.kill()
    assert job.await_end(world) - killed_at < NODE_TIMEOUT + 1
    assert "no sign of life" in kept.outcome().reason


@pytest.mark.parametrize(("order", "status"), [(("exit", 7), 7), (("raise", "x"), 1), (("be_killed",), 137)])
def test_main_exits_with_the_status_of_the_root_cause_on_every_node(job, order, status):
    job.start_several(2, through="main")
    job.await_world(2)[1].order(*order)
    assert [(outcome.error, outcome.text) for outcome in job.outcomes()] == [("SystemExit", str(status))] * 2


def test_an_agent_needs_a_spec_with_a_rendezvous():
    with pytest.raises(ValueError, match=r"use mpwatch\.run"):
        Agent(WorkerSpec(fn=print, nprocs=1))
    with pytest.raises(TypeError, match="spec must be a WorkerSpec"):
        Agent(print)
    spec = WorkerSpec(fn=print, nprocs=1, rendezvous=Rendezvous("localhost", run_id="job", nnodes=1))
    with pytest.raises(TypeError, match="get_rendezvous_handler"):
        Agent(spec, rdzv_handler="c10d")
    assert Agent(spec).get_worker_group().state is mpwatch.WorkerState.UNKNOWN


def make_handler(nnodes, **settings):
    """Return a handler of torch with a store in this process."""
    parameters = RendezvousParameters("c10d", "", "job", nnodes, nnodes, **settings)
    return create_handler(dist.HashStore(), C10dRendezvousBackend(dist.HashStore(), "job"), parameters)


def make_spec(**options):
    return WorkerSpec(
        fn=print, nprocs=1, rendezvous=Rendezvous(**{"endpoint": "127.0.0.1", "run_id": "job", "nnodes": 1, **options})
    )


def test_a_handler_must_be_of_this_job_and_must_not_give_up_nodes_that_run():
    handler = make_handler(1)
    Agent(make_spec(), rdzv_handler=handler)
    with pytest.raises(ValueError, match=r"'job', and spec\.rendezvous has 'another'"):
        Agent(make_spec(run_id="another"), rdzv_handler=handler)
    with pytest.raises(ValueError, match=r"cut off for 10 s.* node_timeout=15\.4 at most"):
        Agent(make_spec(node_timeout=20), rdzv_handler=handler)


def test_the_store_of_a_handler_may_be_in_the_same_process():
    result = Agent(make_spec(), rdzv_handler=make_handler(1, last_call_timeout=1)).run()
    assert dict(result.return_values) == {0: None}


def test_too_few_nodes_at_a_handler_are_reported():
    with pytest.raises(mpwatch.LaunchError, match=r"'job'.* \(c10d\): no round had formed after \d\.\d s"):
        Agent(make_spec(nnodes=2), rdzv_handler=make_handler(2, join_timeout=1)).run()


def test_a_closed_handler_cannot_join_its_job():
    handler = make_handler(1)
    handler.set_closed()
    with pytest.raises(mpwatch.LaunchError, match=r"closed: that job is over"):
        Agent(make_spec(), rdzv_handler=handler).run()


def test_an_agent_at_the_import_of_a_module_is_refused_in_the_rank(tmp_path, monkeypatch):
    (tmp_path / "launches.py").write_text(
        "import os, mpwatch, mpwatch.multinode\n"
        "def fn(): pass\n"
        "here = mpwatch.Rendezvous('localhost:29400', run_id='job', nnodes=1)\n"
        "spec = mpwatch.WorkerSpec(fn=fn, nprocs=1, rendezvous=here)\n"
        "if 'RANK' in os.environ:\n"
        "    mpwatch.multinode.Agent(spec).run()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    launches = importlib.import_module("launches")
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(launches.fn, 1)
    assert "at the import of module launches, line 6 (" in str(caught.value.__cause__)
