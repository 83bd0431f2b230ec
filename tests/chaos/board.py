"""The function of the ranks of a history; and the times of what happened in it, each in a file of its folder.

Times are of CLOCK_MONOTONIC.
"""

import time
from pathlib import Path

from chaos.histories import History
from support.acts import parse_action
from support.failing import rank

CALLED, ENDED, TIMER_FIRED = "called", "ended", "timer fired"  # in the host program
START_SECONDS = 0.4  # from the call of `run` until all ranks run, on an idle machine


def run_rank(history: History, folder: str):
    plan = history.plans[rank()]
    if not plan.at_once:
        time.sleep(max(0.0, read_time(folder, CALLED) + START_SECONDS + plan.delay - time.monotonic()))
    *preparations, end = parse_action(plan.action)
    for prepare in preparations:
        prepare()
    record_time(folder, rank())
    return end()


def record_time(folder: str | Path, event: object) -> None:
    """Record that this happens now. An int is a rank whose action ends."""
    Path(folder, f"time of {event}").write_text(str(time.monotonic()))


def read_time(folder: str | Path, event: object) -> float | None:
    try:
        return float(Path(folder, f"time of {event}").read_text())
    except (FileNotFoundError, ValueError):  # nothing is recorded yet
        return None
