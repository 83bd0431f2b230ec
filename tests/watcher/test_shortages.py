"""Tests of shortages on the host: descriptors, processes, memory, folders, exit codes of children.

The error of a failed launch names the resource. A running run still reports the root cause. Nothing is left behind. A test
that would harm the other tests makes its shortage in a program of its own.
"""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import mpwatch
from support import failing, functions, one_run
from support.process_state import SPAWN
from support.programs import ENV, python
from watcher import shortage_functions

PIDS = Path("/sys/fs/cgroup/pids")
IMPORTS = (
    "import os, resource, signal, sys, threading\n"
    "from support import failing, functions, one_run\n"
    "from support.one_run import attempt, limit\n"
    "from support.process_state import SPAWN, children\n"
    "from watcher import shortage_functions\n"
)
OTHER_USER = 1_000_000_000 + os.getpid()  # has no other processes than those of one test


def run_program(program, *args, within=()):
    """Run a program that can use `support.one_run`, and return the lines that it prints."""
    return python("-c", IMPORTS + program, *args, within=within).stdout.splitlines()


def skip_unless_works(*command, why):
    """Skip the test if a command that it needs does not work here."""
    try:
        done = subprocess.run([*command, "true"], capture_output=True, check=False, timeout=20)
    except FileNotFoundError:
        pytest.skip(why)
    if done.returncode:
        pytest.skip(f"{why}: {done.stderr.decode().strip()}")


def command_of_other_user():
    """Return a command that runs a program as a user without other processes, with all limits, who may read the tests."""
    caps = "+dac_override,+dac_read_search"
    within = ("setpriv", f"--reuid={OTHER_USER}", "--clear-groups", f"--inh-caps=-all,{caps}", f"--ambient-caps=-all,{caps}")
    skip_unless_works(*within, why="no other user can be made here: that takes root, and setpriv")
    return within


# ------------------------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("is_captured", [False, True])
def test_every_step_of_a_launch_without_descriptors_raises_launch_error(is_captured, tmp_path):
    """The number of free descriptors grows from zero until the run succeeds."""
    logs = mpwatch.LogSpec(tmp_path) if is_captured else None
    for spare in range(60):
        line = one_run.attempt(short=partial(one_run.leave_descriptors, spare), logs=logs)
        if line == "values [0, 1]":
            break
        assert line.startswith("LaunchError "), line
        assert "Too many open files" in line
        assert "ulimit -n" in line
    assert 10 < spare < (60 if is_captured else 40)


def test_descriptors_run_out_after_some_ranks_have_been_started():
    for spare in range(30, 90, 7):
        with pytest.raises(mpwatch.LaunchError, match=r"rank \d+ could not be started: .*Too many open files"):
            restore_limit = one_run.leave_descriptors(spare)
            try:
                mpwatch.run(failing.rank, 32)
            finally:
                restore_limit()


def test_a_first_run_without_descriptors_blames_no_argument():
    """The first run imports the modules that pack a call."""
    program = (
        "import os, resource, signal\nfrom support import failing\n"
        "from mpwatch import LaunchError, run\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 100))\n"
        "try: run(failing.rank, 2, args=('x',))\n"
        "except LaunchError as error: print(error)\n"
    )
    output = python("-c", program).stdout
    assert output.startswith("the call could not be packed: OSError: [Errno 24] Too many open files"), output
    assert "ulimit -n" in output


def test_descriptors_run_out_for_the_descriptors_of_a_call():
    """Each connection in the arguments needs a descriptor until the payload is closed."""
    ours, theirs = SPAWN.Pipe()
    with ours, theirs:
        for spare in range(2):
            args = (functions.Adder(theirs), ours)
            line = one_run.attempt(print, short=partial(one_run.leave_descriptors, spare), args=args)
            assert line.startswith("LaunchError the call could not be packed: OSError: [Errno 24]"), line
            assert "args[" not in line


IN_FLIGHT = """
import array, socket
line = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 100))
for _ in range(2):  # no process receives them
    socket.send_fds(line[0], [b"x"], [0] * 30)
print(attempt(len, args=(bytes(10_000),)))
for end in line: end.close()
"""


def test_more_descriptors_in_flight_than_a_user_may_have():
    (output,) = run_program(IN_FLIGHT, within=command_of_other_user())
    assert re.match(
        r"LaunchError the call could not be sent to rank [01]: OSError: \[Errno 109\] Too many references", output
    )
    assert output.endswith("raise the limit of open files (`ulimit -n`), or use torch's sharing strategy 'file_system'")


NO_ROOM = """
low = [os.open(os.devnull, os.O_RDONLY) for _ in range(60)]
pipes = [os.fdopen(fd, "wb", 0) for _ in range(40) for fd in os.pipe()]
class Pipes:
    def __reduce__(self):
        from multiprocessing import reduction
        return list, ([reduction.DupFd(pipe.fileno()) for pipe in pipes],)
def lower(worker):
    while low: os.close(low.pop())
    lift.append(limit(resource.RLIMIT_NOFILE, 60))
    return {}
lift = []
from mpwatch import RunFailedError, run
try: run(len, 1, args=(Pipes(),), env=lower)
except RunFailedError as error:
    print(error.root_cause.kind.name, error)
"""


def test_a_rank_has_no_room_for_the_descriptors_of_its_call():
    """The caller has more descriptors than its lowered limit allows. Its ranks inherit the limit."""
    output, *_ = run_program(NO_ROOM)
    assert output.startswith("START rank 0 could not load the call: OSError: [Errno 24] the descriptors of the call"), output
    assert "see `ulimit -n`" in output


LATER = """
def take_all(soft):
    for _ in range(3): at_work.acquire()
    lift.append(limit(resource.RLIMIT_NOFILE, soft))
    for _ in range(3): go.release()
for ending, soft in [words.split("/") for words in sys.argv[1:]]:
    lift = []
    at_work, go = SPAWN.Semaphore(0), SPAWN.Semaphore(0)
    thread = threading.Thread(target=take_all, args=(int(soft),))
    def begin():
        thread.start()
        return lambda: (thread.join(), lift.pop()())
    end = getattr(shortage_functions, ending)
    try: print(attempt(shortage_functions.ends_after_the_host_acted, 3, args=(at_work, go, end), grace_period=1, short=begin))
    except OSError as error: print(repr(error))
"""


def test_a_running_run_needs_no_more_descriptors():
    """Neither for answers, nor for a diagnosis, nor to wait for the end of helpers."""
    endings = {
        "rank": "values [0, 1, 2]",
        "raises_keyword_only_error": "EXCEPTION rank 1 failed first: KeywordOnlyError: code 7: two arguments (failing.py:",
        "is_killed": "SIGNAL rank 1 was killed by SIGKILL",
        "is_killed_beside_a_helper": "SIGNAL rank 1 was killed by SIGKILL",
    }
    output = [line for line in run_program(LATER, *(f"{ending}/5" for ending in endings)) if not line.startswith("  ")]
    assert len(output) == len(endings), output
    for line, expected in zip(output, endings.values(), strict=True):
        assert line.startswith(expected)


@pytest.mark.parametrize("shortage", ["without_free_descriptors", "under_a_file_size_limit"])
def test_a_rank_that_cannot_open_a_file_for_its_return_value(shortage):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(getattr(shortage_functions, f"returns_1_mib_{shortage}"), 1)
    output = str(caught.value.root_cause.exception)
    assert output.startswith("the return value could not be packed: OSError: [Errno "), output
    assert ("`ulimit -n`" if shortage == "without_free_descriptors" else "`ulimit -f`") in output


def test_the_watcher_needs_a_descriptor_to_receive_a_large_value():
    output, *_ = run_program(LATER, "returns_1_mib/5")
    why = r"OSError: the watcher could not receive its return value: OSError: \[Errno 24\] Too many open files; raise the limit of open"
    assert re.match(rf"EXCEPTION rank \d failed first: {why} files \(`ulimit -n`\)", output), output


def test_nothing_is_left_if_poll_fails():
    """poll(2) fails if it gets more descriptors than the limit of open files."""
    output, *_ = run_program(LATER, "is_killed_beside_a_helper/0")
    assert output == "OSError(22, 'Invalid argument')"


# --------------------------------------------------------------------------------------------------------- processes

PROCESSES = """
def of_group(room):
    with open(f"{sys.argv[1]}/pids.current") as file: used = int(file.read())
    with open(f"{sys.argv[1]}/pids.max", "w") as file: file.write(str(used + room))
    return lambda: None
def of_user(room):
    return limit(resource.RLIMIT_NPROC, 1 + len(children()) + room)
if sys.argv[1] != "of user":
    with open(f"{sys.argv[1]}/cgroup.procs", "w") as file: file.write(str(os.getpid()))
for room in range(6):
    print(attempt(short=lambda: (of_user if sys.argv[1] == "of user" else of_group)(room)))
"""
MANY = "BlockingIOError: [Errno 11] Resource temporarily unavailable; raise the limit of processes (`ulimit -u`, or pids.max"


@pytest.fixture
def pids_group(eventually):
    folder = PIDS / f"mpwatch-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no group for the number of processes can be made in {PIDS}: {error}")
    (folder / "pids.max").write_text("max")
    yield folder

    def is_removed():
        try:
            folder.rmdir()
        except OSError:
            return False
        return True

    eventually(is_removed)  # multiprocessing's resource tracker ends after its program


def check_processes(output):
    assert output[0].startswith(f"LaunchError the ranks cannot be watched: {MANY}"), output
    assert output[1].startswith(f"LaunchError the ranks cannot be watched: {MANY}")
    assert output[2].startswith(f"LaunchError rank 0 could not be started: {MANY}")
    assert output[3].startswith(f"LaunchError rank 1 could not be started: {MANY}")
    assert output[4:] == ["values [0, 1]"] * 2


def test_a_container_with_room_for_some_processes(pids_group):
    check_processes(run_program(PROCESSES, str(pids_group)))


def test_a_user_with_room_for_some_processes():
    check_processes(run_program(PROCESSES, "of user", within=command_of_other_user()))


FIRST = """
import subprocess
with open(f"{sys.argv[1]}/cgroup.procs", "w") as file: file.write(str(os.getpid()))
from mpwatch import LaunchError, run
for room in range(6):
    with open(f"{sys.argv[1]}/pids.max", "w") as file: file.write(str(1 + room))
    try: print(list(run(functions.rank, 2)))
    except LaunchError as error: print(error)
    with open(f"{sys.argv[1]}/pids.current") as file: print(file.read().strip())
"""


def test_a_first_run_with_room_for_some_processes(pids_group):
    """The first run that can start multiprocessing's resource tracker does so, and the tracker stays."""
    output = python("-c", "import os, sys\nfrom support import functions\n" + FIRST, str(pids_group)).stdout.splitlines()
    launches, left = output[::2], output[1::2]
    assert [text.partition(":")[0] for text in launches] == [
        "the ranks cannot be watched",
        "the ranks cannot be watched",
        "rank 0 could not be started",
        "rank 0 could not be started",
        "rank 1 could not be started",
        "[0, 1]",
    ]
    assert all("raise the limit of processes" in text for text in launches[:5])
    assert left == ["1", "1", "1", "2", "2", "2"]


# ------------------------------------------------------------------------------------------------------------ memory

LITTLE = """
size = int(sys.argv[1]) << 20
def used():
    with open("/proc/self/statm") as file: return int(file.read().split()[0]) * resource.getpagesize()
data = {"bytes": bytes, "text": lambda size: "x" * size}.get(sys.argv[2], lambda _: b"")(100 << 20)
short = lambda: limit(resource.RLIMIT_AS, used() + size)
"""


def test_no_memory_for_the_payload_blames_no_argument():
    (output,) = run_program(LITTLE + "print(attempt(len, args=(data,), short=short))", "40", "text")
    assert output.startswith("LaunchError the call could not be packed: there is not enough memory; free some"), output
    assert "args[" not in output
    assert "bytes" not in output


def test_no_memory_for_the_call_in_a_rank():
    """The caller has enough memory, then lowers its limit. Its ranks inherit the limit."""
    program = LITTLE + (
        "from mpwatch import RunFailedError, run\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used() + (600 << 20), -1))\n"
        "def env(worker): resource.setrlimit(resource.RLIMIT_AS, (used() + (40 << 20), -1)); return {}\n"
        "try: run(len, 2, args=(data,), env=env)\n"
        "except RunFailedError as error: print(error.root_cause.kind.name, type(error.__cause__).__name__, error)\n"
    )
    output, *_ = run_program(program, "0", "bytes")
    assert output.startswith("START MemoryError rank "), output
    assert "could not load the call: MemoryError" in output


def test_no_memory_for_the_interpreter_of_a_rank(tmp_path):
    """There is no memory for the guardian's interpreter either."""
    starved = tmp_path / "python"
    run = f'ulimit -v 6000\nexec {sys.executable} "$@"\n'
    gone = tmp_path / "gone"  # the rank waits until the guardian is gone, so that the watcher notices it
    guardian = f'case "$*" in *guardian/main.py*) ({run}); : > {gone}; exit 1;; esac\n'
    starved.write_text(f"#!/bin/sh\n{guardian}until [ -e {gone} ]; do :; done\n{run}")
    starved.chmod(0o755)
    program = "import multiprocessing\nmultiprocessing.set_executable(sys.argv[1])\nprint(attempt(nprocs=1))\n"
    done = python("-c", IMPORTS + program, str(starved))
    assert done.stdout.startswith("START rank 0 never started: its interpreter ended with exit code "), done
    assert (
        "memory" in done.stdout.lower() or "failed to map" in done.stdout
    )  # a message of the loader, or of the interpreter
    assert "the guardian is gone" in done.stderr


RETURNED = LITTLE + "print(attempt(FN, 1, args=(150 << 20,), short=short))"


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (180, "OSError: the watcher could not receive its return value: OSError: [Errno 12] Cannot allocate memory"),
        (250, "MemoryError"),
    ],
)
def test_the_watcher_has_no_memory_for_a_return_value(size, why):
    """There is none for the mapping of its file, or for the unpickled value."""
    output, *_ = run_program(RETURNED.replace("FN", "bytes"), str(size), "none")
    assert output.startswith(f"EXCEPTION rank 0 failed first: {why}"), output


def test_no_memory_to_pack_a_return_value_does_not_blame_its_type():
    output, *_ = run_program(RETURNED.replace("FN", "'x'.ljust"), "250", "none")
    assert output.startswith(
        "EXCEPTION rank 0 failed first: MemoryError: there is not enough memory to pack the return value"
    )
    assert "is of type" not in output
    assert "return plain data instead" not in output


@pytest.mark.parametrize(
    ("size", "what"), [(100_000, "the call could not be packed"), (1_000_000, "rank 0 could not be started")]
)
def test_the_limit_of_file_sizes_counts_for_files_in_memory(size, what):
    """Python ignores SIGXFSZ, so a write beyond RLIMIT_FSIZE fails with EFBIG."""
    program = "print(attempt(len, args=(bytes(500_000),), short=lambda: limit(resource.RLIMIT_FSIZE, int(sys.argv[1]))))"
    (output,) = run_program(program, str(size))
    assert output.startswith(f"LaunchError {what}: OSError: [Errno 27] File too large; raise the limit of file sizes"), (
        output
    )
    assert "args[" not in output


# ------------------------------------------------------------------------------------ shared memory, temporary folders

IN_NAMESPACE = ("unshare", "--mount", "sh", "-c")
FULL = "mount -t tmpfs -o size=4k mpwatch-test /dev/shm && echo x > /dev/shm/full && "
READ_ONLY = "mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp && "


@pytest.mark.parametrize("mount", [FULL, READ_ONLY, FULL + READ_ONLY], ids=["/dev/shm full", "/tmp read-only", "both"])
def test_runs_need_neither_dev_shm_nor_a_temporary_folder(mount):
    within = (*IN_NAMESPACE, mount + 'exec "$@"', "sh")
    skip_unless_works(*within, why="no mounts of its own can be made here")
    program = (
        "import tempfile\n"
        "if '/dev/shm' in sys.argv[1]:\n"
        "    try: open('/dev/shm/more', 'wb').write(bytes(8192)); print('there is room')\n"
        "    except OSError: os.unlink('/dev/shm/more')\n"
        "print(attempt(len, args=(bytes(1 << 20),)))\n"
        "print(attempt(failing.raises_value_error, 1))\n"
    )
    fine, failed, *_ = run_program(program, mount, within=within)
    assert fine == "values [1048576, 1048576]"
    assert failed.startswith("EXCEPTION rank 0 failed first: ValueError: the batch is bad")


@pytest.mark.parametrize("folder", [None, "/nowhere/at/all", "/proc/self"], ids=["unset", "not there", "read-only"])
def test_runs_do_not_depend_on_the_temporary_folder(folder):
    env = {name: value for name, value in ENV.items() if name not in ("TMPDIR", "TEMP", "TMP", "HOME")}
    env |= {} if folder is None else {"TMPDIR": folder}
    assert python("-c", IMPORTS + "print(attempt())", env=env).stdout == "values [0, 1]\n"


def test_the_error_names_a_removed_working_directory():
    program = "import tempfile\nos.chdir(tempfile.mkdtemp())\nos.rmdir(os.getcwd())\nfrom mpwatch import run\nrun(functions.rank, 1)"
    done = python("-c", IMPORTS + program, check=False)
    assert "LaunchError: rank 0 could not be started: FileNotFoundError" in done.stderr
    assert "check that the current folder of this program" in done.stderr


# ------------------------------------------------------------------------------------------ the status of dead children

PREPARE = {
    "SIGCHLD ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n",
    "reaped by others": (
        "def reap():\n"
        "    while True:\n"
        "        try: os.waitpid(-1, 0)\n"
        "        except ChildProcessError: pass\n"
        "threading.Thread(target=reap, daemon=True).start()\n"
    ),
}
VERDICTS = {  # the first one: if every exit code is lost. The others: if other code sometimes reaps a rank first
    "rank": ("values [0, 1]",),
    "raises_keyword_only_error": ("EXCEPTION rank 0 failed first: KeywordOnlyError: code 7: two arguments",),
    "exits_with_3": ("EXIT rank 0 ended with exit code 3 and no result",),
    "calls_os_exit_with_7": ("LOST rank 0 ", "EXIT rank 0 ended with exit code 7"),
    "is_killed": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGKILL"),
    "is_terminated": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGTERM"),
    "crashes": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGSEGV"),
    "keeps_waiting": ("RunTimeoutError the run did not end",),
}
STATUSES = """
import collections
for name in sys.argv[1:]:
    options = {"timeout": 0.7} if name == "keeps_waiting" else {}
    print(attempt(shortage_functions.call_on_rank_0, args=(getattr(shortage_functions, name),), **options), flush=True)
interrupt = lambda: threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
try: attempt(failing.interrupts_its_watcher, grace_period=5)
except KeyboardInterrupt: print("KeyboardInterrupt", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("prepare", PREPARE)
def test_a_host_that_loses_the_exit_codes_of_its_children(prepare):
    output = [line for line in run_program(PREPARE[prepare] + STATUSES, *VERDICTS) if line[:1].isalpha()]
    assert len(output) == len(VERDICTS) + 1, output
    for line, (name, verdicts) in zip(output, VERDICTS.items(), strict=False):
        allowed = verdicts if prepare == "reaped by others" else verdicts[:1]
        assert line.startswith(allowed), name
    assert output[-1] == "KeyboardInterrupt"
