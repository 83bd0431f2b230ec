"""Mistakes in calls of the public functions; mypy and pyright must report each of them, and nothing else. Never run."""

from collections.abc import Callable
from typing import Any, Unpack

import mpwatch
from mpwatch.integrations import dask, ray, submitit

cluster: Any = None


def train(lr: float) -> float:
    return lr


def launch(fn: Callable[..., float], **options: Unpack[mpwatch.RunOptions]) -> mpwatch.RunResult[float]:
    """A function of a library that passes the options on."""
    return mpwatch.run(fn, 2, **options)


launch(train, args=(0.1,), timeout=60, max_restarts=mpwatch.RestartPolicy(2), backend=mpwatch.Backend("gloo", timeout=60))
launch(train, timeuot=60)  # type: ignore[call-arg]
launch(train, max_restarts="2")  # type: ignore[arg-type]

mpwatch.run(train)  # type: ignore[call-overload]
mpwatch.run(train, 2, timeuot=60)  # type: ignore[call-overload]
mpwatch.run(train, 2, timeout="60")  # type: ignore[call-overload]
mpwatch.run(train, 2, backend=mpwatch.Backend("gloo", stall=3))  # type: ignore[call-arg]
mpwatch.run(train, 2, stop=3600)  # type: ignore[call-overload]
mpwatch.run(train, 2, debug="local")  # type: ignore[call-overload]
mpwatch.submit(train, 2, timeuot=60)  # type: ignore[call-overload]
mpwatch.submit(train, 2, env=3)  # type: ignore[call-overload]
mpwatch.main(train, 2, check=False)  # type: ignore[call-overload]
mpwatch.main(train, 2, keep_going="yes")  # type: ignore[call-overload]
mpwatch.WorkerGroup(2, max_restarts=3)  # type: ignore[call-arg]
mpwatch.WorkerGroup(2, heartbeat_timeout="60")  # type: ignore[arg-type]
mpwatch.map(train, [0.1], 2, timeout=60)  # type: ignore[call-overload]
mpwatch.map(train, [0.1], 2, on_error="ignore")  # type: ignore[call-overload]
mpwatch.map(train, [0.1], 2, max_restarts=0.5)  # type: ignore[call-overload]
ray.run(train, 2, nodes=2, timeuot=60)  # type: ignore[call-arg]
dask.run(cluster, train, 2, nodes=2, grace_period="1")  # type: ignore[arg-type]
submitit.run(cluster, train, 2, nodes=2, rendezvous=None)  # type: ignore[call-arg]
spec = mpwatch.WorkerSpec(fn=train, nprocs=2, timeuot=60)  # type: ignore[call-arg]
mpwatch.run(spec, timeout=60)  # type: ignore[call-overload]
