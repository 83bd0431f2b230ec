"""What one node's process does: it calls `mpwatch.run`, once, and tells what came of it, and what that has left, as JSON."""

import gc
import json
import os
import platform
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from pkgutil import resolve_name

import torch.distributed
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as engine
import torch.distributed.elastic.rendezvous.registry as torch_s
from conftest import difference, state

import mpwatch
from mpwatch.multinode import Agent
from mpwatch.multinode.rendezvous import clock_skew

from . import tasks

FAILURE = (
    "rank",
    "local_rank",
    "pid",
    "hostname",
    "exit_code",
    "signal",
    "summary",
    "traceback",
    "stack",
    "evidence",
    "is_secondary",
)
LAG = 1.0  # seconds
ELSEWHERE = ("shared memory", "temporary files")  # which all nodes share; the job looks at its own folder


def call(request, tell):
    """Run what was asked for; `tell` is a descriptor for what came of it. Signals come as they come to any program."""
    resource_tracker.ensure_running()  # multiprocessing's own helper, which lives as long as its program
    if request["skew_seconds"]:
        skew_clock(request["skew_seconds"])
    _warm_up()
    before = what_is_there()
    outcome = {"hostname": platform.node(), "clocks": [time.time(), engine.datetime.now(UTC).timestamp()]}
    if request["beforehand"]:
        getattr(tasks, request["beforehand"])()
    outcome["began"] = time.monotonic()
    try:
        outcome |= _what_comes_of(request)
    finally:
        outcome["ended"] = time.monotonic()
    gc.collect()
    after = _what_stays(before)
    outcome["left"] = {name: repr(difference(before[name], after[name])) for name in before if before[name] != after[name]}
    outcome["modules"] = sorted(name for name in sys.modules if name.startswith("mpwatch.multinode"))
    _write(tell, json.dumps(outcome).encode())


def _warm_up():
    """Libuv, which torch's store is made with, keeps a pipe of its own from its first use on, and another in each fork."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def serve_store(request, tell):
    """Be the one who serves the store, and nothing else, until this process is killed."""
    host, port = request["endpoint"]
    store = torch.distributed.TCPStore(host, port, is_master=True, wait_for_workers=False)
    _write(tell, b"serving")
    os.close(tell)
    signal.pause()
    del store


def skew_clock(seconds):
    """This node's clock is off by so much, as far as Python can tell; that of its ranks is not."""
    true_time = time.time

    class Skewed(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls):  # of which torch thinks in its versions before 2.6
            return cls.now(UTC).replace(tzinfo=None)

    engine.datetime = clock_skew.datetime = Skewed
    time.time = lambda: true_time() + seconds


def what_is_there():
    """In this process; the threads of compiled code, too: the store's, for example."""
    there = {name: value for name, value in state().items() if name not in ELSEWHERE}
    return there | {"threads of the kernel": _names_of_threads()}


def _what_stays(before):
    """What there is now. The kernel may show a thread for a moment after it has been joined, by torch for example."""
    deadline = time.monotonic() + LAG
    while (now := what_is_there())["threads of the kernel"] != before[
        "threads of the kernel"
    ] and time.monotonic() < deadline:
        os.sched_yield()
    return now


def _names_of_threads():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended since
            names.append((task / "comm").read_text().strip())
    return sorted(names)


def _what_comes_of(request):
    options = dict(request["options"])
    if isinstance(options.get("env"), str):
        options["env"] = getattr(tasks, options["env"])
    if request["rendezvous"] is not None:
        options["rendezvous"] = mpwatch.Rendezvous(**_typed(request["rendezvous"]))
    function, options["nprocs"] = resolve_name(request["function"]), request["nprocs"]
    try:
        if request["through"] in ("agent", "handler"):
            return _what_comes_of_an_agent(function, options, has_handler=request["through"] == "handler")
        result = getattr(mpwatch, request["through"])(function, progress=False, **options)
    except mpwatch.RunFailedError as error:
        return {**_of_error(error), "exit_code": error.exit_code, **_of_result(error.result)}
    except BaseException as error:
        traceback.print_exc()
        return _of_error(error)
    return _of_result(result)


def _what_comes_of_an_agent(function, options, *, has_handler):
    handler = _handler_of_torch(options["rendezvous"]) if has_handler else None
    agent = Agent(mpwatch.WorkerSpec(fn=function, progress=False, **options), rdzv_handler=handler)
    assert agent.get_worker_group().workers == ()
    try:
        result = agent.run(check=False)
        code = None if result.state.name == "SUCCEEDED" else mpwatch.RunFailedError(result).exit_code
        group = agent.get_worker_group()
        told = {name: getattr(group, name) for name in ("group_rank", "group_world_size")}
        ranks = [worker.rank for worker in group.workers]
        return {**_of_result(result), "exit_code": code, "group": {**told, "ranks": ranks, "state": group.state.name}}
    finally:
        if handler is not None:
            handler.shutdown()


def _handler_of_torch(rendezvous):
    """As a user of torch's would have it."""
    least, most = rendezvous.nnodes
    settings = {"is_host": rendezvous.is_host, "last_call_timeout": rendezvous.options["last_call_timeout"]}
    beats = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3, "read_timeout": 10}
    parameters = torch_s.RendezvousParameters(
        "c10d",
        rendezvous.endpoint,
        rendezvous.run_id,
        least,
        most,
        local_addr=rendezvous.local_addr,
        **settings,
        **beats,
    )
    return torch_s.get_rendezvous_handler(parameters)


def _typed(terms):
    """Of what JSON knows, only a tuple is something else."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in terms.items()}


def _of_error(error):
    return {"error": type(error).__name__, "text": str(error), "cause": _of_exception(error.__cause__)}


def _of_exception(error):
    if error is None:
        return None
    lines = traceback.format_exception(error)
    return {"type": type(error).__name__, "text": str(error), "traceback": "".join(lines)}


def _of_result(result):
    return {
        "state": result.state.name,
        "values": dict(result.return_values),
        "failures": {rank: _of_failure(failure) for rank, failure in result.failures.items()},
        "root_cause": _of_failure(result.root_cause),
        "workers": [{name: getattr(worker, name) for name in tasks.WHO} for worker in result.workers],
        "worker_states": {rank: state.name for rank, state in result.worker_states.items()},
        "attempts": [_of_attempt(attempt) for attempt in result.attempts],
        "restarts": result.restarts,
        "reason": result.reason,
        "not_restarted": result.not_restarted,
        "events": [event.name for event in result.events],
        "blamed": {event.ranks[0]: event.is_root_cause for event in result.events if event.name == "worker_failed"},
    }


def _of_attempt(attempt):
    cause = attempt.root_cause
    return {"number": attempt.number, "state": attempt.state.name, "cause": None if cause is None else cause.rank}


def _of_failure(failure):
    if failure is None:
        return None
    told = {name: getattr(failure, name) for name in FAILURE}
    return {**told, "kind": failure.kind.name, "exception": _of_exception(failure.exception)}


def _write(fd, data):
    while data:
        data = data[os.write(fd, data) :]
