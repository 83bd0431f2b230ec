"""What must hold with every engine: the test class of an engine is a subclass of `Cases`."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import mpwatch
from engines import functions
from mpwatch import events
from support.process_state import is_alive
from support.programs import ENV
from support.runs import failed

END_SECONDS = 10.0  # after the death of the driver


class Cases:
    """Needs two fixtures: `run` is the function of the engine, which takes fn, the ranks of each node and the options.
    `driver` is the code of a program that runs `show_pid` on two ranks of each of two nodes, and its arguments.
    """

    def test_the_values_of_all_ranks_come_back(self, run):
        result = run(functions.report, 2, nodes=2)
        assert [rank for rank, *_ in result] == [0, 1, 2, 3]
        assert [int(array[-1]) for *_, array in result] == [0, 1, 2, 3]
        assert [worker.group_rank for worker in result.workers] == [0, 0, 1, 1]
        assert not any(is_alive(pid) for _, pid, *_ in result)
        assert len({watcher for _, _, watcher, _ in result}) == 2
        result[0][-1][0] = 7  # it can be written to

    def test_a_failure_is_that_on_one_machine(self, run):
        """Except for the names of the nodes."""
        expected = failed(functions.raise_in_rank_3, 4)
        with pytest.raises(mpwatch.RunFailedError) as found:
            run(functions.raise_in_rank_3, 2, nodes=2)
        assert type(found.value.__cause__) is type(expected.__cause__) is functions.RankError
        first_line = str(found.value).partition("\n")[0]
        assert re.sub(r" on node \d \(.*?\)", "", first_line) == str(expected).partition("\n")[0]

    def test_ctrl_c_stops_all_nodes(self, run):
        """It is pressed as soon as the ranks are called."""
        pids = []

        def observe(event):
            if isinstance(event, events.WorkerStarted):
                pids.append(event.pid)
            if isinstance(event, events.CallStarted):
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            run(functions.wait, 2, nodes=2, on_event=observe)
        assert pids
        assert not any(map(is_alive, pids))

    def test_a_lost_node_is_replaced(self, run):
        """Kill the watcher of rank 2 when all ranks have started. All ranks are restarted."""
        pids, killed = {}, []

        def kill(event):
            if isinstance(event, events.WorkerStarted) and not killed:
                pids[event.ranks[0]] = event.pid
                if len(pids) == 4:
                    killed.append(find_parent(pids[2]))
                    os.kill(killed[0], signal.SIGKILL)

        result = run(functions.wait_for_second_start, 2, nodes=2, max_restarts=2, node_timeout=3.0, on_event=kill)
        assert [(rank, restarts) for rank, restarts, _ in result] == [(rank, 1) for rank in range(4)]
        watchers = {watcher for *_, watcher in result}
        assert len(watchers - set(killed)) == len(watchers) == 2
        wait_until(lambda: not any(map(is_alive, pids.values())))

    def test_the_ranks_end_with_the_driver(self, driver, signum=signal.SIGKILL):
        with start_driver(*driver) as program:
            pids = []
            while len(pids) < 4:
                line = program.stdout.readline()
                assert line
                if "pid " in line:
                    pids.append(int(line.rpartition("pid ")[2]))
            assert all(is_alive(pid) for pid in pids)
            program.send_signal(signum)
            wait_until(lambda: not any(is_alive(pid) for pid in pids), END_SECONDS)


def check_begin_without_room(run):
    """Run a job of up to three nodes on a cluster of two."""
    assert list(run(functions.wait_for_world_size, 1, nodes=(1, 3), args=(2,), last_call_timeout=5.0)) == [0, 1]


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


def start_driver(code, *arguments, stderr=subprocess.DEVNULL):
    """Start a program that runs the function `show_pid` on ranks."""
    program = DRIVER + textwrap.indent(code, "    ")
    env = {**os.environ, "PYTHONPATH": ENV["PYTHONPATH"], "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
