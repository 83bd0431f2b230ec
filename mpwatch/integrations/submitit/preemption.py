"""The signal of submitit, which asks the ranks to stop at the same step before the job loses its machines."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import submitit

import mpwatch


def preemption_signal() -> signal.Signals:
    return signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]


def was_preempted(result: mpwatch.RunResult[Any]) -> bool:
    """Return whether the signal has ended the function before it was ready."""
    was_cut_short = result.stopped_at is not None or result.state is not mpwatch.WorkerState.SUCCEEDED
    return was_cut_short and preemption_signal().name in result.stop_cause


@contextmanager
def ignore_sigterm() -> Iterator[None]:
    """Ignore SIGTERM in this process, because SLURM sends SIGTERM together with the signal of submitit."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
