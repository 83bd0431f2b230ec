"""Programs that start ranks in a difficult environment. It imports little, since ranks import it."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import mpwatch
from mpwatch.guardian import main as guardian
from mpwatch.watcher.processes.process import RankPopen
from support import failing

FORK_SECONDS = 0.1  # of a program that forks ten times a second
PR_SET_CHILD_SUBREAPER = 36


def fork_child_that_stays():
    pid = os.fork()
    if not pid:
        signal.pause()
    return pid


def end(children):
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def fork_at_each_pipe():
    """Fork as another thread could at the worst moments: when the watcher has made a pipe or a socket pair."""
    children = []

    def forking(make):
        def make_and_fork(*args):
            made = make(*args)
            children.append(fork_child_that_stays())
            return made

        return make_and_fork

    with mock.patch("os.pipe", forking(os.pipe)), mock.patch("socket.socketpair", forking(socket.socketpair)):
        print(list(mpwatch.run(failing.rank, 2)))
    end(children)


def be_killed_before_the_guardian_knows_the_rank(start=RankPopen.start):
    """The child that was forked before holds the watcher's ends of all connections to the rank."""

    def start_and_die(*args, **options):
        start(*args, **options)
        fork_child_that_stays()
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(RankPopen, "start", start_and_die):
        mpwatch.run(failing.wait_to_be_stopped, 1)


def start_beside_forks(starts):
    """Start a rank again and again while a thread forks. Print how many seconds each start and end has taken."""
    children = []
    is_over = threading.Event()

    def fork_on_and_on():
        while not is_over.wait(FORK_SECONDS):
            children.append(fork_child_that_stays())

    thread = threading.Thread(target=fork_on_and_on)
    thread.start()
    os.write(1, b"go\n")
    for _ in range(starts):
        began_at = time.monotonic()
        mpwatch.run(failing.rank, 1)
        print(time.monotonic() - began_at, flush=True)
    is_over.set()
    thread.join()
    end(children)


def zombies_of(pid):
    children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [child for child in children if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()]


def leave_helpers():
    """Start two helpers in the process group of the rank. The first attempt fails; the second counts what is left of it."""
    zombies = zombies_of(os.getppid())
    for _ in range(2):
        os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", "import signal; signal.pause()"], os.environ)
    assert mpwatch.current_worker().restart_count
    return zombies


def adopt_helpers(is_subreaper):
    if is_subreaper:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        assert os.getpid() == 1
    assert list(mpwatch.run(leave_helpers, 1, max_restarts=1)) == [[]]
    assert zombies_of(os.getpid()) == []


def start_with_a_false_pid(pid, real_starts):
    """The start of a process returns a number that is no pid, as in tests of users that mock it. Nothing gets a signal."""
    signals = []

    def start(*args, spawn=os.posix_spawnp, **options):
        starts.append(1)
        return spawn(*args, **options) if len(starts) <= real_starts else pid

    starts = []
    kill = os.kill
    with (
        mock.patch(
            "os.kill", lambda pid, number: kill(pid, number) if type(pid) is int and pid > 1 else signals.append(pid)
        ),
        mock.patch("os.killpg", lambda pgid, number: signals.append(pgid)),
        mock.patch("subprocess.Popen", return_value=mock.Mock(pid=pid)),
        mock.patch("os.posix_spawnp", start),
    ):
        try:
            mpwatch.run(failing.rank, 1)
        except mpwatch.LaunchError as error:
            print(error)
    print("signals:", signals)


def order_false_pids():
    killed = []
    orders, watcher = socket.socketpair()
    watcher.send(b"+1\n+0\n+4711\n")
    watcher.close()
    with (
        mock.patch("os.kill", lambda pid, _: killed.append(pid)),
        mock.patch("os.killpg", lambda pid, _: killed.append(pid)),
    ):
        guardian.main(orders.fileno())
    print(killed)
