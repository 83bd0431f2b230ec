"""Ranks start, and end, whatever else the program does: it forks, is PID 1, mocks the start, or is in an odd folder."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.programs import ENV, call, command, python
from support.thoroughness import choose
from watcher.processes import starting_programs

STARTS, INSTANTS = choose(5, 200), choose(5, 50)
LONGEST_START = 2.0  # seconds
IN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


def test_a_child_that_the_program_forks_meanwhile_delays_no_start():
    assert call(starting_programs.fork_at_each_pipe, timeout=20).stdout == "[0, 1]\n"


@pytest.mark.timeout(60 + STARTS * LONGEST_START)
def test_ranks_start_beside_forks():
    done = call(starting_programs.start_beside_forks, STARTS, timeout=None)
    seconds = list(map(float, done.stdout.split()[1:]))
    assert len(seconds) == STARTS
    print(f"{STARTS} starts: the longest one took {max(seconds):.2f} s")
    assert max(seconds) < LONGEST_START


def test_ranks_start_without_proc():
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    program = "mount -t tmpfs none /proc && exec \"$0\" -c 'import mpwatch; print(*mpwatch.run(int, 2))'"
    done = python(within=("unshare", "-m", "sh", "-c", program))
    assert done.stdout == "0 0\n", done.stderr


class TaggedProgram:
    """A program that an environment variable marks, together with all processes that it starts or forks."""

    def __init__(self, name, function, *args):
        self._tag = f"{name}-{os.getpid()}".encode()
        arguments = [sys.executable, *command(function, *args)]
        env = {**ENV, "MPWATCH_TEST_TAG": self._tag.decode()}
        self.process = subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid, _ in self._find():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def _find(self):
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                if self._tag in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append((pid, Path(f"/proc/{pid}/cmdline").read_bytes()))
        return found

    def find_left(self):
        """Return the ranks and the guardian. The resource tracker lives as long as the children that the program has forked."""
        return [line for _, line in self._find() if b"\0mpwatch\0" in line]


def test_no_rank_outlives_a_watcher_that_is_killed_before_its_guardian_knows_the_rank(eventually):
    with TaggedProgram("unknown", starting_programs.be_killed_before_the_guardian_knows_the_rank) as program:
        assert program.process.wait(20) == -signal.SIGKILL
        eventually(lambda: not program.find_left(), seconds=2)


@pytest.mark.parametrize("instant", range(INSTANTS))
def test_a_kill_beside_forks_leaves_nothing(instant, eventually):
    """From the first start of a rank on, over half a second in which several ranks start."""
    with TaggedProgram(f"instant-{instant}", starting_programs.start_beside_forks, 1000) as program:
        program.process.stdout.readline()
        until = time.monotonic() + 0.5 * instant / INSTANTS
        while time.monotonic() < until:
            os.sched_yield()
        program.process.kill()
        assert program.process.wait(20) == -signal.SIGKILL
        eventually(lambda: not program.find_left(), seconds=1)


@pytest.mark.parametrize("is_subreaper", [False, True])
def test_helpers_that_the_program_adopts_are_reaped(is_subreaper):
    if not is_subreaper and subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    call(starting_programs.adopt_helpers, is_subreaper, within=() if is_subreaper else IN_NAMESPACE)


@pytest.mark.parametrize("real_starts", [0, 1], ids=["guardian", "rank"])
@pytest.mark.parametrize("pid", [1, 0, -1, "a mock"])
def test_a_pid_that_is_no_pid_gets_no_signal(pid, real_starts):
    error, signals = call(starting_programs.start_with_a_false_pid, pid, real_starts).stdout.splitlines()
    assert f"os.posix_spawnp returned {pid!r}, which is not the pid of a new process" in error
    assert signals == "signals: []"


def test_the_guardian_kills_no_number_that_stands_for_many_processes():
    assert call(starting_programs.order_false_pids).stdout == "[4711, 4711]\n"


SCRIPT = """
import os, sys
from multiprocessing import resource_tracker
import mpwatch

resource_tracker.ensure_running()  # of multiprocessing, which runs it in the current folder
os.chdir(sys.argv[1])
print(list(mpwatch.run(os.getcwd, 1)))
"""


def test_modules_in_the_current_folder_do_not_replace_those_of_python(tmp_path):
    folder, script = tmp_path / "current", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(SCRIPT)
    for name in ("signal", "selectors", "struct", "socket", "json"):
        (folder / f"{name}.py").write_text("import sys; open('ran', 'a').write(f'{__name__}: {sys.orig_argv}'); sys.exit(1)")
    done = python(str(script), str(folder), cwd=tmp_path, check=False)
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    assert done.stdout == f"[{str(folder)!r}]\n", done.stderr
