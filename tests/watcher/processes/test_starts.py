"""Ranks start, and end, whatever else the program does: it forks, is PID 1, mocks the start, or is in an odd folder."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import mpwatch
from support import functions
from support.programs import call, in_own_process, python

IN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
PR_SET_CHILD_SUBREAPER = 36


@in_own_process
def test_children_that_the_program_forks_meanwhile_delay_no_start():
    """They are forked as another thread could at the worst moments: when the watcher has made a pipe or a socket pair."""
    forked = []

    def forking(make):
        def make_and_fork(*args):
            made = make(*args)
            forked.append(os.fork() or signal.pause())
            return made

        return make_and_fork

    signal.alarm(20)
    with mock.patch("os.pipe", forking(os.pipe)), mock.patch("socket.socketpair", forking(socket.socketpair)):
        assert list(mpwatch.run(functions.rank, 2)) == [0, 1]
    assert forked
    for pid in forked:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def write_much():
    return sum(os.write(fd, b"text\n") for fd in (1, 2) for _ in range(2000))


@in_own_process
def test_standard_streams_that_the_program_has_closed_lead_nowhere():
    os.closerange(0, 3)
    assert list(mpwatch.run(write_much, 2)) == [20_000, 20_000]


def zombies_of(pid):
    found = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [child for child in found if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()]


def adopt_helpers(is_subreaper):
    def leave_helpers():
        """Start two helpers in the process group of the rank. The first attempt fails; the second counts what is left."""
        zombies = zombies_of(os.getppid())
        for _ in range(2):
            os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", "import signal; signal.pause()"], os.environ)
        assert mpwatch.current_worker().restart_count
        return zombies

    if is_subreaper:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        assert os.getpid() == 1
    assert list(mpwatch.run(leave_helpers, 1, max_restarts=1)) == [[]]
    assert zombies_of(os.getpid()) == []


@pytest.mark.parametrize("is_subreaper", [False, True], ids=["PID 1 of a container", "subreaper"])
def test_helpers_that_the_program_adopts_are_reaped(is_subreaper):
    if not is_subreaper and subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    call(adopt_helpers, is_subreaper, within=() if is_subreaper else IN_NAMESPACE)


@in_own_process
def test_a_mock_of_a_process_gets_no_signal():
    """As in tests of users that mock the start of processes. `int()` of a mock is 1: that would be the init of a container."""
    signals = []
    process = mock.MagicMock()
    starts = {"os.posix_spawn": process.pid, "os.posix_spawnp": process.pid, "subprocess.Popen": process}
    patches = [mock.patch(name, return_value=value) for name, value in starts.items()]
    patches += [mock.patch(name, lambda *args: signals.append(args)) for name in ("os.kill", "os.killpg")]
    for patch in patches:
        patch.start()
    with pytest.raises(mpwatch.LaunchError, match="is not the pid of a new process"):
        mpwatch.run(functions.rank, 1)
    assert signals == []


def test_modules_in_the_current_folder_do_not_replace_those_of_python(tmp_path):
    folder, script = tmp_path / "current", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(
        "import os, sys, mpwatch\n"
        "from multiprocessing import resource_tracker\n"
        "resource_tracker.ensure_running()  # of multiprocessing, which runs it in the current folder\n"
        "os.chdir(sys.argv[1])\n"
        "print(list(mpwatch.run(os.getcwd, 1)))\n"
    )
    for name in ("signal", "selectors", "struct", "socket", "json"):
        (folder / f"{name}.py").write_text("import sys; open('ran', 'a').write(f'{__name__}: {sys.orig_argv}'); sys.exit(1)")
    done = python(str(script), str(folder), cwd=tmp_path, check=False)
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    assert done.stdout == f"[{str(folder)!r}]\n", done.stderr


def test_the_kernel_gives_the_master_port_to_no_program_that_asks_for_any_port():
    def fn():
        port = mpwatch.current_worker().master_port
        for _ in range(2000):
            with socket.socket() as other:
                other.bind(("", 0))
                assert other.getsockname()[1] != port
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
        return "listened"

    assert list(mpwatch.run(fn, 1)) == ["listened"]


def test_ps_shows_which_rank_of_which_run_a_process_is():
    def fn():
        return Path("/proc/self/cmdline").read_bytes().decode().split("\0")[:-1]

    fn.__qualname__ = "tr\0\N{LATIN SMALL LETTER A WITH DIAERESIS}\ud800in\x1b[2J" + "x" * 100
    result = mpwatch.run(fn, 2)
    name, run = "fn=tr???in?[2J" + "x" * 69, f"run={result.workers[0].run_id[:8]}"
    assert [command[-4:] for command in result] == [["mpwatch", f"rank={rank}/2", name, run] for rank in (0, 1)]
