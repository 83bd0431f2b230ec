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
from mpwatch import events
from support.process_state import is_alive
from support.programs import ENV

END_SECONDS = 10.0  # after the death of the driver

FAILURES = [
    (functions.raise_in_rank_3, {}),
    pytest.param(functions.exit_in_rank_3, {}, marks=pytest.mark.slow),
    pytest.param(functions.kill_rank_3, {}, marks=pytest.mark.slow),
    pytest.param(functions.return_lock_in_rank_3, {}, marks=pytest.mark.slow),
    (functions.make_closure_over_lock(), {}),
    (functions.wait, {"grace_period": -1}),
]


def check_values(result):
    """Check the result of `functions.report` in two ranks on each of two nodes. Return the pids of the watchers."""
    assert [rank for rank, *_ in result] == [0, 1, 2, 3]
    assert [int(array[-1]) for *_, array in result] == [0, 1, 2, 3]
    assert [worker.group_rank for worker in result.workers] == [0, 0, 1, 1]
    assert not any(is_alive(pid) for _, pid, *_ in result)
    result[0][-1][0] = 7  # it can be written to
    watchers = {watcher for _, _, watcher, _ in result}
    assert len(watchers) == 2
    return watchers


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


def check_large_values(run):
    size = 50 << 20
    for rank, array in enumerate(run(functions.return_bytes, 2, nodes=2, args=(size,))):
        assert array.nbytes == size
        assert int(array[-1]) == rank
        array[0] = 7  # it can be written to


def check_begin_without_room(run):
    """Run a job of up to three nodes on a cluster of two."""
    assert list(run(functions.wait_for_world_size, 1, nodes=(1, 3), args=(2,), last_call_timeout=5.0)) == [0, 1]


def check_ctrl_c(run):
    """Press Ctrl-C as soon as the ranks are called. All ranks are gone when `run` raises."""
    pids = RankPids()

    def interrupt(event):
        pids(event)
        if isinstance(event, events.CallStarted):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(functions.wait, 2, nodes=2, on_event=interrupt)
    assert pids.pids
    assert not any(is_alive(pid) for pid in pids.pids.values())


def interrupt(*_, **__):
    """Be interrupted by Ctrl-C: as an observer at each event, or in the place of a function that waits."""
    raise KeyboardInterrupt


class RankPids:
    """An observer that notes the process of each rank that has started."""

    def __init__(self):
        self.pids = {}

    def __call__(self, event):
        if isinstance(event, events.WorkerStarted):
            self.pids[event.ranks[0]] = event.pid


class KillWatchers(RankPids):
    """Kills the watchers of some ranks when all of these ranks have started, `total` in all. This is done once."""

    def __init__(self, ranks, total):
        super().__init__()
        self.ranks, self.total, self.killed = ranks, total, set()

    def __call__(self, event):
        super().__call__(event)
        if len(self.pids) == self.total and not self.killed:
            self.first_pids = dict(self.pids)
            self.killed = {find_parent(self.pids[rank]) for rank in self.ranks}
            for watcher in self.killed:
                os.kill(watcher, signal.SIGKILL)


def check_loss_of_a_node(run):
    """Kill the watcher of rank 2. A new node takes its place, and all ranks are restarted."""
    kill = KillWatchers([2], total=4)
    result = run(functions.wait_for_second_start, 2, nodes=2, max_restarts=2, node_timeout=3.0, on_event=kill)
    assert [(rank, restarts) for rank, restarts, _ in result] == [(rank, 1) for rank in range(4)]
    watchers = {watcher for *_, watcher in result}
    assert len(watchers) == 2
    assert watchers.isdisjoint(kill.killed)
    wait_until(lambda: not any(is_alive(pid) for pid in kill.first_pids.values()))


def check_loss_of_all_nodes(run):
    """Lose both nodes at the same time. New nodes restart the ranks."""
    kill = KillWatchers([0, 1], total=2)
    result = run(functions.wait_for_second_start, 1, nodes=2, max_restarts=1, node_timeout=3.0, on_event=kill)
    assert [(rank, restarts) for rank, restarts, _ in result] == [(0, 1), (1, 1)]
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
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)


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
