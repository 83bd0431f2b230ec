"""One measurement: one launcher, one measure, in the process of the launching script. The figures are a line of JSON.

Values are checked as they come: a launcher that loses some has no figure.
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

__all__ = ["take"]

WARM_UP = 20  # calls


def take(name: str, launcher: str, ranks: str, folder: str) -> None:
    measure = MEASURES[name]
    for module in measure.needs:
        importlib.import_module(module)
    figures = WAYS[measure.way](measure, launcher, int(ranks), folder)
    print(json.dumps(figures))


def launch(measure, launcher, ranks, folder):
    call, task = LAUNCH[launcher](), getattr(tasks, measure.task)
    args = (folder, an_array(measure.argument_mb)) if measure.argument_mb else (folder,)
    began = time.monotonic()
    values = call(task, ranks, args)
    figures = {"whole": time.monotonic() - began}
    if measure.task.startswith("give"):
        means = [mean_of(value) for value in values]
        figures["read"] = time.monotonic() - began
        assert means == list(range(ranks)), means
    for what in {"entered", "read"} & set(measure.figures) - figures.keys():
        figures[what] = max(told(folder, what, ranks)) - began
    figures["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return figures


def failure(measure, launcher, ranks, folder):
    os.mkfifo(f"{folder}/door")
    call, task = LAUNCH[launcher](), getattr(tasks, measure.task)
    try:
        call(task, ranks, (folder,))
    except Exception:
        noticed = time.monotonic()
    else:
        raise AssertionError(f"{launcher} has not noticed")
    (failed,) = told(folder, "failed", 1)
    return {"noticed": noticed - failed}


def restart(measure, launcher, ranks, folder):
    """The first start is of the same call."""
    os.mkfifo(f"{folder}/door")
    call = LAUNCH[launcher](restarts=1)
    began = time.monotonic()
    call(getattr(tasks, measure.task), ranks, (folder,))
    (failed,) = told(folder, "failed", 1)
    entered, again = max(told(folder, "entered", ranks)) - began, max(told(folder, "again", ranks)) - failed
    return {"entered": entered, "again": again, "again_by_entered": again / entered}


def warm(measure, launcher, ranks, folder):
    task = getattr(tasks, measure.task)
    with WARM[launcher](ranks, folder) as call:
        for _ in range(WARM_UP):
            call(tasks.nothing)
        took = [one_call(call, task, measure.argument_mb, ranks, number) for number in range(measure.calls)]
    return {"call": statistics.median(took)}


def one_call(call, task, megabytes, ranks, number):
    """A new array each time: what has been sent once is not the same again."""
    args = (an_array(megabytes, last=number),) if megabytes else ()
    began = time.monotonic()
    values = call(task, *args)
    ended = time.monotonic()
    assert len(values) == ranks, values
    assert not args or values == [number] * ranks, values
    return ended - began


def idle(measure, launcher, ranks, folder):
    call, task = LAUNCH[launcher](), getattr(tasks, measure.task)
    call(task, ranks, (folder, os.getpid(), measure.seconds))
    (burnt,) = told(folder, "burnt", 1)
    return {"burnt": burnt}


def report(measure, launcher, ranks, folder):
    LAUNCH[launcher](**dict(measure.options))(getattr(tasks, measure.task), ranks, (folder,))
    return {what: max(told(folder, what, ranks)) for what in measure.figures}


OF_NODES = nodes_start, nodes_failure, nodes_loss
WAYS = {way.__name__: way for way in (launch, failure, restart, warm, idle, tee, report, *OF_NODES)}


def an_array(megabytes, last=None):
    import numpy as np

    array = np.empty(megabytes * 250_000, dtype="float32")
    array.reshape(-1, tasks.PERIOD)[:] = np.arange(tasks.PERIOD)
    if last is not None:
        array[-1] = last
    return array


def mean_of(values):
    import numpy as np

    return float(np.asarray(values).mean(dtype="float64"))


def told(folder, what, ranks):
    numbers = [float(path.read_text()) for path in Path(folder).glob(f"{what}-*")]
    assert len(numbers) == ranks, f"{len(numbers)} of {ranks} ranks have told when they {what}"
    return numbers
