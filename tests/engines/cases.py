"""What must hold with every engine. `run` is the function of an engine that takes fn, the ranks of each node and the options."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import mpwatch
from engines import functions
from support.process_state import is_alive
from support.programs import ENV

EXAMPLES = Path(__file__).parents[2] / "examples"
END_SECONDS = 10.0  # after the death of the driver

FAILURES = [
    (functions.raise_in_rank_3, {}),
    pytest.param(functions.exit_in_rank_3, {}, marks=pytest.mark.slow),
    pytest.param(functions.kill_rank_3, {}, marks=pytest.mark.slow),
    pytest.param(functions.return_lock_in_rank_3, {}, marks=pytest.mark.slow),
    (functions.make_closure_over_lock(), {}),
    (functions.wait, {"grace_period": -1}),
]


def check_failure(run, fn, options):
    """Check that four ranks on two nodes fail as four ranks on one machine do."""
    with pytest.raises(Exception, match="") as expected:
        mpwatch.run(fn, 4, **options)
    with pytest.raises(Exception, match="") as found:
        run(fn, 2, nodes=2, **options)
    assert type(found.value) is type(expected.value)
    assert type(found.value.__cause__) is type(expected.value.__cause__)
    assert _normalize(str(found.value)) == _normalize(str(expected.value))


def _normalize(text):
    """Leave out the nodes, which a run on one machine does not have, and what depends on the instant of a stop."""
    lines = re.sub(r" on node \d \(.*?\)", "", text).splitlines()
    return [line for line in lines if not line.startswith(("  rank", "  the return values"))]


def check_digits(run):
    """Train the example on two nodes of two ranks."""
    pytest.importorskip("sklearn")
    sys.path.append(str(EXAMPLES))
    try:
        import train_digits
    finally:
        sys.path.remove(str(EXAMPLES))
    result = run(train_digits.train, 2, nodes=2, args=(3,), kwargs={"verbose": False}, backend="gloo")
    assert len(result) == 4
    assert result[0].losses == result[3].losses
    assert result[0].accuracy >= 0.85


def check_four_nodes(run):
    """Run one rank on each of four nodes."""
    result = run(functions.report_pid, 1, nodes=4)
    assert [rank for rank, _, _ in result] == [0, 1, 2, 3]
    assert [worker.group_rank for worker in result.workers] == [0, 1, 2, 3]
    with pytest.raises(mpwatch.RunFailedError, match=r"rank 3 on node 3 .*: RankError: the disk is full"):
        run(functions.raise_in_rank_3, 1, nodes=4)


def check_begin_without_room(run, caplog):
    """Run a job of up to three nodes on a cluster of two. It does not wait for the third one."""
    caplog.set_level("INFO", "mpwatch")
    assert list(run(functions.wait_for_world_size, 1, nodes=(1, 3), args=(2,))) == [0, 1]
    assert "the cluster has no room for more nodes now; the job begins with 2 of at most 3" in caplog.text


def interrupt(*_, **__):
    """Be interrupted by Ctrl-C: as an observer at each event, or in the place of a function that waits."""
    raise KeyboardInterrupt


class RankPids:
    """An observer that notes the process of each rank that has started."""

    def __init__(self):
        self.pids = {}

    def __call__(self, event):
        if isinstance(event, mpwatch.events.WorkerStarted):
            self.pids[event.ranks[0]] = event.pid


class KillAllWatchers(RankPids):
    """Kills the watchers of all ranks as soon as these have started.

    Args:
        ranks: how many ranks there are.
        attempts: in how many attempts.
    """

    def __init__(self, ranks, attempts=1):
        super().__init__()
        self.ranks, self.attempts = ranks, attempts

    def __call__(self, event):
        super().__call__(event)
        if len(self.pids) == self.ranks and event.attempt < self.attempts:
            for watcher in {find_parent(pid) for pid in self.pids.values()}:
                os.kill(watcher, signal.SIGKILL)
            self.pids = {}


def check_loss_of_all_nodes(run):
    """Lose both nodes at the same time. New nodes restart the ranks."""
    result = run(
        functions.wait_for_second_start, 1, nodes=2, max_restarts=1, node_timeout=3.0, on_event=KillAllWatchers(ranks=2)
    )
    assert list(result) == [(0, 1), (1, 1)]
    assert result.restarts == 1


def find_parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until(condition, seconds=30.0):
    """Wait for a state of a cluster, which gives no notice of it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


DRIVER = """
import os, signal, sys

def show_pid():
    os.write(1, f"pid {os.getpid()}\\n".encode())
    signal.pause()

if __name__ == "__main__":
"""


def start_driver(lines, *arguments, stderr=subprocess.DEVNULL):
    """Start a program that runs the function `show_pid` on ranks.

    Args:
        lines: what the program does, with its arguments in `sys.argv`.
        arguments: of the program.
        stderr: see subprocess.Popen.
    """
    program = DRIVER + "".join(f"    {line}\n" for line in lines)
    env = {**os.environ, "PYTHONPATH": ENV["PYTHONPATH"], "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def check_death_of_driver(driver, signum=signal.SIGKILL):
    """Kill the program as soon as its four ranks run. They end, too."""
    with driver:
        pids = []
        while len(pids) < 4:
            line = driver.stdout.readline()
            assert line
            if "pid " in line:
                pids.append(int(line.rpartition("pid ")[2]))
        assert all(is_alive(pid) for pid in pids)
        driver.send_signal(signum)
        wait_until(lambda: not any(is_alive(pid) for pid in pids), END_SECONDS)
