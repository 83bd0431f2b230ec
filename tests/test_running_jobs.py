"""Another terminal, program or notebook looks into the ranks of a program, without disturbing them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import mpwatch
from support import screens
from support.ports import free_port
from support.process_state import SOCKETS
from support.programs import ENV

START = """
import sys
from test_running_jobs import train
import mpwatch
print(mpwatch.run(train, 2, {options}).state.name)
"""
RUN_ID = f"look-in-{os.getpid()}"


def train():
    for step in range(10_000):
        mpwatch.report(step=step, total=10_000, loss=0.5)
        if mpwatch.should_stop(step):
            return
        time.sleep(0.01)  # a step takes time
    raise TimeoutError("nobody has asked for a stop")


@contextmanager
def running(options=""):
    command = [sys.executable, "-c", START.format(options=options)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        try:
            yield program
        finally:
            if program.poll() is None:
                program.kill()


def find_job(which, eventually, ranks=(0, 1)):
    def has_come():
        jobs = [job for job in mpwatch.jobs() if which == job.run_id or which in job.pids]
        return any(tuple(job.progress()) == ranks for job in jobs)

    eventually(has_come, 60.0)
    return mpwatch.attach(which)


def test_a_job_of_another_program_is_seen_and_stopped(eventually):
    with running() as program:
        job = find_job(program.pid, eventually)
        assert (job.pids, job.fn, job.ranks, job.state.name) == ((program.pid,), "train", (0, 1), "HEALTHY")
        assert abs(time.time() - job.started_at) < 60
        assert "in train" in job.stacks()[1]
        assert job.collectives() == {}
        progress = job.progress()[1]
        assert (progress.total, progress.metrics, 0 <= progress.elapsed < 60) == (10_000, {"loss": 0.5}, True)
        assert re.fullmatch(rf"<Job \w+: train on 2 ranks, HEALTHY, process {program.pid}>", repr(job))
        job.request_stop()
        assert program.communicate()[0] == "SUCCEEDED\n"
        with pytest.raises(LookupError, match="the job has ended"):
            job.stacks()
        assert "the job has ended" in repr(job)


def test_in_another_terminal(eventually):
    """With rich, the view is drawn in place, and Ctrl-C ends the view only."""

    def enter(*words):
        return screens.Program("-m", "mpwatch", *words, env=ENV, columns=200)  # other jobs may have long names

    with running() as program:
        find_job(program.pid, eventually)
        with enter("ps") as terminal:
            assert terminal.end() == 0
            (row,) = [row for row in terminal.emulator.rows() if row.startswith(str(program.pid))]
            assert re.search(r"\w+  +train +2 +0:\d\d:\d\d +\d+ +HEALTHY$", row)
        with enter("stacks", str(program.pid)) as terminal:
            assert terminal.end() == 0
            assert any("in train" in row for row in terminal.emulator.rows())
        with enter("watch", str(program.pid)) as terminal:
            assert terminal.read_until(lambda rows: any("of 10000" in row or "/10000" in row for row in rows))
            terminal.type(b"\x03")
            assert terminal.end() == 0
        assert program.poll() is None
        with enter("stop", str(program.pid)) as terminal:
            assert terminal.end() == 0
        assert program.communicate()[0] == "SUCCEEDED\n"


def test_a_prompt_of_the_debugger_in_a_rank(eventually):
    """The rank goes on when the visitor leaves, in whatever way."""
    with running() as program:
        job = find_job(program.pid, eventually)
        with screens.Program("-m", "mpwatch", "debug", str(program.pid), "--rank", "1", env=ENV) as terminal:
            assert terminal.read_until(lambda rows: any(row == "(rank 1) (Pdb)" for row in rows))
            terminal.type(b"break train\np 'step', step + 0.5\n")
            assert terminal.read_until(lambda rows: any(re.search(r"\('step', \d+\.5\)", row) for row in rows))
            terminal.type(b"interact\n")
            assert terminal.read_until(lambda rows: any(row == "(rank 1) >>>" for row in rows))
            terminal.type(b"\x04p 'out'\n")
            assert terminal.read_until(lambda rows: any(row.endswith("(Pdb) 'out'") for row in rows))
            terminal.type(b"q\n")
            assert terminal.end() == 0
        with screens.Program("-m", "mpwatch", "debug", str(program.pid), env=ENV) as terminal:
            assert terminal.read_until(lambda rows: any(row == "(rank 0) (Pdb)" for row in rows))
            terminal.type(b"interact\n")
            assert terminal.read_until(lambda rows: any(row == "(rank 0) >>>" for row in rows))
            terminal.process.kill()
        eventually(lambda: job.state.name == "HEALTHY")
        steps = {rank: progress.step for rank, progress in job.progress().items()}
        eventually(lambda: all(progress.step > steps[rank] for rank, progress in job.progress().items()))
        job.request_stop()
        assert program.communicate()[0] == "SUCCEEDED\n"
        with pytest.raises(LookupError, match="rank 0 runs no function here that can be interrupted"):
            job.debug(0)


def test_a_group_is_seen_while_it_is_idle_and_while_it_is_called(eventually):
    with mpwatch.WorkerGroup(2) as group:
        job = mpwatch.attach(group.run(os.getpid)[1])
        assert (job.fn, job.ranks) == ("", (0, 1))
        assert not job.request_stop()  # nothing runs
        call = group.submit(train)
        eventually(lambda: len(job.progress()) == 2)
        job.request_stop()
        assert call.result().state.name == "SUCCEEDED"
        assert call.result().stop_cause == f"request_stop() in process {os.getpid()}"
        assert len(group.run(os.getpid)) == 2


def test_a_job_of_two_nodes(eventually):
    options = f"rendezvous=mpwatch.Rendezvous('127.0.0.1:{free_port()}', '{RUN_ID}', 2)"
    with running(options) as first, running(options) as second:
        job = find_job(RUN_ID, eventually, ranks=(0, 1, 2, 3))
        assert (job.run_id, set(job.pids), job.ranks) == (RUN_ID, {first.pid, second.pid}, (0, 1, 2, 3))
        assert sorted(job.stacks()) == [0, 1, 2, 3]
        job.request_stop()
        assert [program.communicate()[0] for program in (first, second)] == ["SUCCEEDED\n"] * 2


def test_a_killed_program_is_no_job(eventually):
    with running() as program:
        find_job(program.pid, eventually)
        program.kill()
        program.wait()
        assert program.pid not in [pid for job in mpwatch.jobs() for pid in job.pids]
        assert list(SOCKETS.glob(f"{program.pid}-*")) == []
        with pytest.raises(LookupError, match="no such job of this user on this machine has answered"):
            mpwatch.attach(program.pid)


@pytest.mark.slow
def test_a_suspended_program_does_not_answer(eventually):
    with running() as program:
        job = find_job(program.pid, eventually)
        program.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED)
        silent = f"process {program.pid} does not answer; it may be suspended"
        with pytest.raises(TimeoutError, match=silent):
            job.stacks()
        with pytest.raises(LookupError, match=silent):
            mpwatch.attach(program.pid)
        program.send_signal(signal.SIGCONT)
        job.request_stop()
        assert program.communicate()[0] == "SUCCEEDED\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_refused(eventually):
    with running() as program:
        find_job(program.pid, eventually)
        (path,) = SOCKETS.glob(f"{program.pid}-*")
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setuid(65534)
            try:
                socket.socket(socket.AF_UNIX).connect(str(path))
            except PermissionError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_garbage_changes_nothing(eventually):
    with mpwatch.submit(train, 1) as handle:
        job = find_job(os.getpid(), eventually, ranks=(0,))
        (path,) = SOCKETS.glob(f"{os.getpid()}-*")
        questions = b"", b"{", b"[1]\n", b'{"ask": []}\n', b'{"ask": "debug", "rank": []}\n', b"[" * 4000, os.urandom(3000)
        for garbage in questions:
            with socket.socket(socket.AF_UNIX) as visitor:
                visitor.connect(str(path))
                visitor.sendall(garbage)
        job.request_stop()
        assert handle.result().state.name == "SUCCEEDED"
