"""The program of one node: call `mpwatch.run` once, and write the outcome and what the run has left, as JSON."""

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

import mpwatch
from mpwatch.multinode.rendezvous import clock_skew
from nodes import tasks
from support.process_state import difference, state

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
KERNEL_LAG_SECONDS = 1.0  # seconds
SHARED = ("shared memory", "temporary files")  # which all nodes share; Job.close checks the folder of the job


def call(request, pipe):
    """Run the request, and write the outcome to the descriptor `pipe`."""
    resource_tracker.ensure_running()  # a helper of multiprocessing, which runs as long as the program
    if request["skew_seconds"]:
        skew_clock(request["skew_seconds"])
    _warm_up()
    before = take_inventory()
    outcome = {"hostname": platform.node(), "clocks": [time.time(), engine.datetime.now(UTC).timestamp()]}
    if request["beforehand"]:
        getattr(tasks, request["beforehand"])()
    outcome["started"] = time.monotonic()
    try:
        outcome |= _run(request)
    finally:
        outcome["ended"] = time.monotonic()
    gc.collect()
    after = _take_late_inventory(before)
    outcome["left"] = {name: repr(difference(before[name], after[name])) for name in before if before[name] != after[name]}
    outcome["modules"] = sorted(name for name in sys.modules if name.startswith("mpwatch.multinode"))
    _write(pipe, json.dumps(outcome).encode())


def _warm_up():
    """Create a store first: libuv, which torch's store uses, keeps a pipe from its first use on, and another in each fork."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def serve_store(request, pipe):
    """Serve the store until this process is killed."""
    host, port = request["endpoint"]
    store = torch.distributed.TCPStore(host, port, is_master=True, wait_for_workers=False)
    _write(pipe, b"serving")
    os.close(pipe)
    signal.pause()
    del store


def skew_clock(seconds):
    """Set Python's clock of this node wrong by so many seconds. The clock of its ranks stays right."""
    true_time = time.time

    class Skewed(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls):  # torch before 2.6 calls it
            return cls.now(UTC).replace(tzinfo=None)

    engine.datetime = clock_skew.datetime = Skewed
    time.time = lambda: true_time() + seconds


def take_inventory():
    """Return what this process holds. It includes threads of compiled code, such as those of the store."""
    there = {name: value for name, value in state().items() if name not in SHARED}
    return there | {"threads of the kernel": _thread_names()}


def _take_late_inventory(before):
    """Return what this process holds now. The kernel may still show a thread for a moment after it has been joined."""
    deadline = time.monotonic() + KERNEL_LAG_SECONDS
    while (now := take_inventory())["threads of the kernel"] != before[
        "threads of the kernel"
    ] and time.monotonic() < deadline:
        os.sched_yield()
    return now


def _thread_names():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended since
            names.append((task / "comm").read_text().strip())
    return sorted(names)


def _run(request):
    options = dict(request["options"])
    if isinstance(options.get("env"), str):
        options["env"] = getattr(tasks, options["env"])
    if isinstance(options.get("max_restarts"), dict):
        options["max_restarts"] = mpwatch.RestartPolicy(**options["max_restarts"])
    if isinstance(options.get("stop"), dict):
        options["stop"] = mpwatch.StopPolicy(**options["stop"])
    if isinstance(options.get("backend"), dict):
        options["backend"] = mpwatch.Backend(**options["backend"])
    if "per_rank" in options:  # for JSON
        options["args"] = [mpwatch.PerRank(options.pop("per_rank"))]
    if request["rendezvous"] is not None:
        options["rendezvous"] = mpwatch.Rendezvous(**_restore_tuples(request["rendezvous"]))
    function, options["nprocs"] = resolve_name(request["function"]), request["nprocs"]
    try:
        result = getattr(mpwatch, request["through"])(function, progress=False, **options)
    except mpwatch.RunFailedError as error:
        return {**_describe_error(error), "exit_code": error.exit_code, **_describe_result(error.result)}
    except BaseException as error:
        traceback.print_exc()
        return _describe_error(error)
    return _describe_result(result)


def _restore_tuples(options):
    """Restore the tuples that JSON has turned into lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _describe_error(error):
    return {"error": type(error).__name__, "text": str(error), "cause": _describe_exception(error.__cause__)}


def _describe_exception(error):
    if error is None:
        return None
    lines = traceback.format_exception(error)
    return {"type": type(error).__name__, "text": str(error), "traceback": "".join(lines)}


def _describe_result(result):
    try:
        missing = list(result) and ""
    except LookupError as error:
        missing = str(error)
    return {
        "size": len(result),
        "missing": missing,
        "state": result.state.name,
        "values": dict(result.return_values),
        "failures": {rank: _describe_failure(failure) for rank, failure in result.failures.items()},
        "root_cause": _describe_failure(result.root_cause),
        "workers": [{name: getattr(worker, name) for name in tasks.WORKER_FIELDS} for worker in result.workers],
        "worker_states": {rank: state.name for rank, state in result.worker_states.items()},
        "attempts": [_describe_attempt(attempt) for attempt in result.attempts],
        "restarts": result.restarts,
        "reason": result.reason,
        "notes": list(result.notes),
        "stopped_at": result.stopped_at,
        "stop_cause": result.stop_cause,
        "events": [event.name for event in result.events],
        "blamed": {event.ranks[0]: event.is_root_cause for event in result.events if event.name == "worker_failed"},
    }


def _describe_attempt(attempt):
    cause = attempt.root_cause
    return {"number": attempt.number, "state": attempt.state.name, "cause": None if cause is None else cause.rank}


def _describe_failure(failure):
    if failure is None:
        return None
    facts = {name: getattr(failure, name) for name in FAILURE}
    return {**facts, "kind": failure.kind.name, "exception": _describe_exception(failure.exception)}


def _write(fd, data):
    while data:
        data = data[os.write(fd, data) :]
