"""Take one measurement, of one launcher and one measure, in the process of the launching script. Print the figures as JSON.

Return values are checked: a launcher that loses values gets no figure.
"""

import importlib
import json
import os
import resource
import statistics
import time
from pathlib import Path

import tasks
from launchers import LAUNCH, WARM
from measures import MEASURES
from nodes import nodes_failure, nodes_loss, nodes_start
from teed import tee

WARM_UP = 20  # calls


def take_measurement(name: str, launcher: str, ranks: str, folder: str) -> None:
    measure = MEASURES[name]
    for module in measure.imports:
        importlib.import_module(module)
    figures = PROCEDURES[measure.procedure](measure, launcher, int(ranks), folder)
    print(json.dumps(figures))


def launch(measure, launcher, ranks, folder):
    call, task = LAUNCH[launcher](), getattr(tasks, measure.task)
    args = (folder, make_array(measure.argument_mb)) if measure.argument_mb else (folder,)
    began = time.monotonic()
    values = call(task, ranks, args)
    figures = {"total": time.monotonic() - began}
    if measure.task.startswith("return_"):
        means = [mean_of(value) for value in values]
        figures["read"] = time.monotonic() - began
        assert means == list(range(ranks)), means
    for name in {"entered", "read"} & set(measure.figures) - figures.keys():
        figures[name] = max(read_figures(folder, name, ranks)) - began
    figures["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return figures


def failure(measure, launcher, ranks, folder):
    os.mkfifo(f"{folder}/arrivals")
    call, task = LAUNCH[launcher](), getattr(tasks, measure.task)
    try:
        call(task, ranks, (folder,))
    except Exception:
        noticed = time.monotonic()
    else:
        raise AssertionError(f"{launcher} has not reported the failure")
    (failed,) = read_figures(folder, "failed", 1)
    return {"noticed": noticed - failed}


def restart(measure, launcher, ranks, folder):
    """Time the first start and the restart of the same call."""
    os.mkfifo(f"{folder}/arrivals")
    call = LAUNCH[launcher](restarts=1)
    began = time.monotonic()
    call(getattr(tasks, measure.task), ranks, (folder,))
    (failed,) = read_figures(folder, "failed", 1)
    entered = max(read_figures(folder, "entered", ranks)) - began
    restarted = max(read_figures(folder, "restarted", ranks)) - failed
    return {"entered": entered, "restarted": restarted, "restart_ratio": restarted / entered}


def warm(measure, launcher, ranks, folder):
    task = getattr(tasks, measure.task)
    with WARM[launcher](ranks, folder) as call:
        for _ in range(WARM_UP):
            call(tasks.do_nothing)
        seconds = [time_one_call(call, task, measure.argument_mb, ranks, number) for number in range(measure.calls)]
    return {"call": statistics.median(seconds)}


def time_one_call(call, task, megabytes, ranks, number):
    """Time a call with a new array: to send the same array twice may cost less."""
    args = (make_array(megabytes, last=number),) if megabytes else ()
    began = time.monotonic()
    values = call(task, *args)
    ended = time.monotonic()
    assert len(values) == ranks, values
    assert not args or values == [number] * ranks, values
    return ended - began


def idle(measure, launcher, ranks, folder):
    call, task = LAUNCH[launcher](), getattr(tasks, measure.task)
    call(task, ranks, (folder, os.getpid(), measure.seconds))
    (cpu_per_hour,) = read_figures(folder, "cpu_per_hour", 1)
    return {"cpu_per_hour": cpu_per_hour}


def report(measure, launcher, ranks, folder):
    LAUNCH[launcher](**dict(measure.options))(getattr(tasks, measure.task), ranks, (folder,))
    return {name: max(read_figures(folder, name, ranks)) for name in measure.figures}


NODE_PROCEDURES = nodes_start, nodes_failure, nodes_loss
PROCEDURES = {
    procedure.__name__: procedure for procedure in (launch, failure, restart, warm, idle, tee, report, *NODE_PROCEDURES)
}


def make_array(megabytes, last=None):
    import numpy as np

    array = np.empty(megabytes * 250_000, dtype="float32")
    array.reshape(-1, tasks.PERIOD)[:] = np.arange(tasks.PERIOD)
    if last is not None:
        array[-1] = last
    return array


def mean_of(values):
    import numpy as np

    return float(np.asarray(values).mean(dtype="float64"))


def read_figures(folder, name, ranks):
    numbers = [float(path.read_text()) for path in Path(folder).glob(f"{name}-*")]
    assert len(numbers) == ranks, f"{len(numbers)} of {ranks} ranks have written {name!r}"
    return numbers
