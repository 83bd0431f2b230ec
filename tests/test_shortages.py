"""The host is short of something: a launch that fails says of what, a run under way keeps its verdict, and nothing is left.

Each test makes the shortage, in a program of its own where it would harm the tests.
"""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import functions
import pytest
import saboteurs
import witness
from conftest import SPAWN
from programs import ENV, python

import mpwatch

PIDS = Path("/sys/fs/cgroup/pids")
IMPORTS = "import os, resource, signal, sys, threading, conftest, functions, saboteurs, witness\nfrom witness import attempt, limit\n"
OTHER_USER = 1_000_000_000 + os.getpid()  # whose processes are those of one test


def lines_of(program, *args, within=()):
    """What a program prints that has `witness` at hand."""
    return python("-c", IMPORTS + program, *args, within=within).stdout.splitlines()


def needs(*command, why):
    """Skip where such a command does not work, for that is what the test is made with."""
    try:
        done = subprocess.run([*command, "true"], capture_output=True, check=False, timeout=20)
    except FileNotFoundError:
        pytest.skip(why)
    if done.returncode:
        pytest.skip(f"{why}: {done.stderr.decode().strip()}")


def another_user():
    """What makes a program one of a user who has no others, is under all limits, and may read what the tests are made of."""
    caps = "+dac_override,+dac_read_search"
    within = ("setpriv", f"--reuid={OTHER_USER}", "--clear-groups", f"--inh-caps=-all,{caps}", f"--ambient-caps=-all,{caps}")
    needs(*within, why="no other user can be made here: that takes root, and setpriv")
    return within


# ------------------------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("is_captured", [False, True])
def test_every_step_of_a_launch_may_lack_a_descriptor(is_captured, tmp_path):
    """From none that is left to as many as it takes: there is no step in between that fails in another way."""
    logs = mpwatch.LogSpec(tmp_path) if is_captured else None
    for spare in range(60):
        came = witness.attempt(short=partial(witness.leave_descriptors, spare), logs=logs)
        if came == "values [0, 1]":
            break
        assert came.startswith("LaunchError "), came
        assert "Too many open files" in came
        assert "ulimit -n" in came
    assert 10 < spare < (60 if is_captured else 40)


def test_many_ranks_lack_descriptors_however_many_have_been_started():
    for spare in range(30, 90, 7):
        with pytest.raises(mpwatch.LaunchError, match=r"rank \d+ could not be started: .*Too many open files"):
            relief = witness.leave_descriptors(spare)
            try:
                mpwatch.run(saboteurs.rank, 32)
            finally:
                relief()


def test_a_first_run_without_descriptors_blames_no_argument():
    """What packs a call is imported at the first run."""
    program = (
        "import os, resource, signal, saboteurs\n"
        "from mpwatch import LaunchError, run\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 100))\n"
        "try: run(saboteurs.rank, 2, args=('x',))\n"
        "except LaunchError as error: print(error)\n"
    )
    said = python("-c", program).stdout
    assert said.startswith("the call could not be packed: OSError: [Errno 24] Too many open files"), said
    assert "ulimit -n" in said


def test_a_call_with_descriptors_of_its_own_may_lack_them():
    """Each connection takes one for as long as the payload is kept."""
    ours, theirs = SPAWN.Pipe()
    with ours, theirs:
        for spare in range(2):
            args = (functions.Adder(theirs), ours)
            came = witness.attempt(print, short=partial(witness.leave_descriptors, spare), args=args)
            assert came.startswith("LaunchError the call could not be packed: OSError: [Errno 24]"), came
            assert "args[" not in came


HELD = """
import array, socket
line = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 100))
for _ in range(2):  # nobody takes them out
    socket.send_fds(line[0], [b"x"], [0] * 30)
print(attempt(len, args=(bytes(10_000),)))
for end in line: end.close()
"""


def test_more_descriptors_on_their_way_than_a_user_may_have():
    (said,) = lines_of(HELD, within=another_user())
    assert re.match(r"LaunchError the call could not be sent to rank [01]: OSError: \[Errno 109\] Too many references", said)
    assert said.endswith("raise the limit of open files (`ulimit -n`), or torch's sharing strategy 'file_system'")


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


def test_a_rank_may_lack_room_for_the_descriptors_of_its_call():
    """The caller has more than its limit allows now, which is the limit that its ranks get."""
    said, *_ = lines_of(NO_ROOM)
    assert said.startswith("START rank 0 could not load the call: OSError: [Errno 24] the descriptors of the call"), said
    assert "see `ulimit -n`" in said


LATER = """
def take_all(soft):
    for _ in range(3): at_work.acquire()
    lift.append(limit(resource.RLIMIT_NOFILE, soft))
    for _ in range(3): go.release()
for ending, soft in [words.split("/") for words in sys.argv[1:]]:
    lift = []
    at_work, go = conftest.SPAWN.Semaphore(0), conftest.SPAWN.Semaphore(0)
    thread = threading.Thread(target=take_all, args=(int(soft),))
    def begin():
        thread.start()
        return lambda: (thread.join(), lift.pop()())
    end = getattr(saboteurs, ending)
    try: print(attempt(saboteurs.ends_in_two_steps, 3, args=(at_work, go, end), grace_period=1, short=begin))
    except OSError as error: print(repr(error))
"""


def test_a_run_under_way_needs_no_more_descriptors():
    """Not for answers, not for verdicts, and not to see that helpers have gone."""
    endings = {
        "rank": "values [0, 1, 2]",
        "raises_picky": "EXCEPTION rank 1 failed first: PickyError: code 7: two arguments (saboteurs.py:",
        "is_killed": "SIGNAL rank 1 was killed by SIGKILL",
        "is_killed_beside_a_helper": "SIGNAL rank 1 was killed by SIGKILL",
    }
    said = [line for line in lines_of(LATER, *(f"{ending}/5" for ending in endings)) if not line.startswith("  ")]
    assert len(said) == len(endings), said
    for line, expected in zip(said, endings.values(), strict=True):
        assert line.startswith(expected)


@pytest.mark.parametrize("what", ["without_descriptors", "under_a_limit_of_files"])
def test_a_rank_that_can_make_no_file_for_its_value_says_why(what):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(getattr(saboteurs, f"returns_much_{what}"), 1)
    said = str(caught.value.root_cause.exception)
    assert said.startswith("the return value could not be packed: OSError: [Errno "), said
    assert ("`ulimit -n`" if what == "without_descriptors" else "`ulimit -f`") in said


def test_a_large_value_takes_a_descriptor_here_for_a_moment():
    said, *_ = lines_of(LATER, "returns_much/5")
    why = r"OSError: its return value could not be taken in: OSError: \[Errno 24\] Too many open files; raise the limit of open"
    assert re.match(rf"EXCEPTION rank \d failed first: {why} files \(`ulimit -n`\)", said), said


def test_where_nothing_can_be_waited_for_any_more_nothing_is_left():
    """poll(2) itself refuses where the limit is below the number of what it is given."""
    said, *_ = lines_of(LATER, "is_killed_beside_a_helper/0")
    assert said == "OSError(22, 'Invalid argument')"


# --------------------------------------------------------------------------------------------------------- processes

PROCESSES = """
def of_group(room):
    with open(f"{sys.argv[1]}/pids.current") as file: used = int(file.read())
    with open(f"{sys.argv[1]}/pids.max", "w") as file: file.write(str(used + room))
    return lambda: None
def of_user(room):
    return limit(resource.RLIMIT_NPROC, 1 + len(conftest.children()) + room)
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


def check_processes(said):
    assert said[0].startswith(f"LaunchError the ranks cannot be watched: {MANY}"), said
    assert said[1].startswith(f"LaunchError the ranks cannot be watched: {MANY}")
    assert said[2].startswith(f"LaunchError rank 0 could not be started: {MANY}")
    assert said[3].startswith(f"LaunchError rank 1 could not be started: {MANY}")
    assert said[4:] == ["values [0, 1]"] * 2


def test_a_container_with_room_for_some_processes(pids_group):
    check_processes(lines_of(PROCESSES, str(pids_group)))


def test_a_user_with_room_for_some_processes():
    check_processes(lines_of(PROCESSES, "of user", within=another_user()))


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
    """multiprocessing's resource tracker is started by the first that gets so far, and stays."""
    said = python("-c", "import os, sys, functions\n" + FIRST, str(pids_group)).stdout.splitlines()
    launches, left = said[::2], said[1::2]
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


def test_no_memory_for_the_payload_is_not_the_argument_s_fault():
    (said,) = lines_of(LITTLE + "print(attempt(len, args=(data,), short=short))", "40", "text")
    assert said.startswith("LaunchError the call could not be packed: there is not enough memory; free some"), said
    assert "args[" not in said
    assert "bytes" not in said


def test_no_memory_for_the_call_in_a_rank():
    """The caller had enough, and lowered its limit, which its ranks get."""
    program = LITTLE + (
        "from mpwatch import RunFailedError, run\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used() + (600 << 20), -1))\n"
        "def env(worker): resource.setrlimit(resource.RLIMIT_AS, (used() + (40 << 20), -1)); return {}\n"
        "try: run(len, 2, args=(data,), env=env)\n"
        "except RunFailedError as error: print(error.root_cause.kind.name, type(error.__cause__).__name__, error)\n"
    )
    said, *_ = lines_of(program, "0", "bytes")
    assert said.startswith("START MemoryError rank "), said
    assert "could not load the call: MemoryError" in said


def test_no_memory_for_the_interpreter_of_a_rank(tmp_path):
    """Nor for the guardian's."""
    starved = tmp_path / "python"
    run = f'ulimit -v 6000\nexec {sys.executable} "$@"\n'
    gone = tmp_path / "gone"  # the guardian, before the rank is: else nobody has told it anything since
    guardian = f'case "$*" in *guardian/main.py*) ({run}); : > {gone}; exit 1;; esac\n'
    starved.write_text(f"#!/bin/sh\n{guardian}until [ -e {gone} ]; do :; done\n{run}")
    starved.chmod(0o755)
    program = "import multiprocessing\nmultiprocessing.set_executable(sys.argv[1])\nprint(attempt(nprocs=1))\n"
    done = python("-c", IMPORTS + program, str(starved))
    assert done.stdout.startswith("START rank 0 never started: its interpreter ended with exit code "), done
    assert "memory" in done.stdout.lower() or "failed to map" in done.stdout  # in the loader's words, or the interpreter's
    assert "the guardian is gone" in done.stderr


RETURNED = LITTLE + "print(attempt(FN, 1, args=(150 << 20,), short=short))"


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (180, "OSError: its return value could not be taken in: OSError: [Errno 12] Cannot allocate memory"),
        (250, "MemoryError"),
    ],
)
def test_no_memory_here_for_what_a_rank_returns(size, why):
    """For the file that it comes in, or for what is made of that."""
    said, *_ = lines_of(RETURNED.replace("FN", "bytes"), str(size), "none")
    assert said.startswith(f"EXCEPTION rank 0 failed first: {why}"), said


def test_no_memory_to_pack_what_a_rank_returns_is_not_its_type_s_fault():
    said, *_ = lines_of(RETURNED.replace("FN", "'x'.ljust"), "250", "none")
    assert said.startswith("EXCEPTION rank 0 failed first: MemoryError: there is not enough memory to pack the return value")
    assert "is of type" not in said
    assert "return plain data instead" not in said


@pytest.mark.parametrize(
    ("size", "what"), [(100_000, "the call could not be packed"), (1_000_000, "rank 0 could not be started")]
)
def test_files_in_memory_have_the_limit_of_files(size, what):
    """RLIMIT_FSIZE; Python has SIGXFSZ ignored."""
    program = "print(attempt(len, args=(bytes(500_000),), short=lambda: limit(resource.RLIMIT_FSIZE, int(sys.argv[1]))))"
    (said,) = lines_of(program, str(size))
    assert said.startswith(f"LaunchError {what}: OSError: [Errno 27] File too large; raise the limit of file sizes"), said
    assert "args[" not in said


# ------------------------------------------------------------------------------------ shared memory, temporary folders

IN_NAMESPACE = ("unshare", "--mount", "sh", "-c")
FULL = "mount -t tmpfs -o size=4k mpwatch-test /dev/shm && echo x > /dev/shm/full && "
READ_ONLY = "mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp && "


@pytest.mark.parametrize("mount", [FULL, READ_ONLY, FULL + READ_ONLY], ids=["/dev/shm full", "/tmp read-only", "both"])
def test_neither_shared_memory_nor_temporary_files_are_needed(mount):
    within = (*IN_NAMESPACE, mount + 'exec "$@"', "sh")
    needs(*within, why="no mounts of its own can be made here")
    program = (
        "import tempfile\n"
        "if '/dev/shm' in sys.argv[1]:\n"
        "    try: open('/dev/shm/more', 'wb').write(bytes(8192)); print('there is room')\n"
        "    except OSError: os.unlink('/dev/shm/more')\n"
        "print(attempt(len, args=(bytes(1 << 20),)))\n"
        "print(attempt(saboteurs.raises_value_error, 1))\n"
    )
    fine, failed, *_ = lines_of(program, mount, within=within)
    assert fine == "values [1048576, 1048576]"
    assert failed.startswith("EXCEPTION rank 0 failed first: ValueError: the batch is bad")


@pytest.mark.parametrize("folder", [None, "/nowhere/at/all", "/proc/self"], ids=["unset", "not there", "read-only"])
def test_the_temporary_folder_may_be_any(folder):
    env = {name: value for name, value in ENV.items() if name not in ("TMPDIR", "TEMP", "TMP", "HOME")}
    env |= {} if folder is None else {"TMPDIR": folder}
    assert python("-c", IMPORTS + "print(attempt())", env=env).stdout == "values [0, 1]\n"


def test_a_folder_that_has_been_removed_is_said_to_be():
    program = "import tempfile\nos.chdir(tempfile.mkdtemp())\nos.rmdir(os.getcwd())\nfrom mpwatch import run\nrun(functions.rank, 1)"
    done = python("-c", IMPORTS + program, check=False)
    assert "LaunchError: rank 0 could not be started: FileNotFoundError" in done.stderr
    assert "does the folder that this program runs in" in done.stderr


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
VERDICTS = {  # by which ends without a result are told from each other where their status is lost: by none
    "rank": ("values [0, 1]",),
    "raises_picky": ("EXCEPTION rank 0 failed first: PickyError: code 7: two arguments",),
    "exits_with_3": ("EXIT rank 0 ended with exit code 3 and no result",),
    "vanishes_with_7": ("LOST rank 0 ", "EXIT rank 0 ended with exit code 7"),
    "is_killed": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGKILL"),
    "is_terminated": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGTERM"),
    "crashes": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGSEGV"),
    "outlasts": ("RunTimeoutError the run did not end",),
}
STATUSES = """
import collections
for name in sys.argv[1:]:
    options = {"timeout": 0.7} if name == "outlasts" else {}
    print(attempt(saboteurs.only_rank_0, args=(getattr(saboteurs, name),), **options), flush=True)
interrupt = lambda: threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
try: attempt(saboteurs.interrupts_its_watcher, grace_period=5)
except KeyboardInterrupt: print("KeyboardInterrupt", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("prepare", PREPARE)
def test_whose_children_s_status_is_lost_is_told_what_there_is_to_tell(prepare):
    said = [line for line in lines_of(PREPARE[prepare] + STATUSES, *VERDICTS) if line[:1].isalpha()]
    assert len(said) == len(VERDICTS) + 1, said
    for line, (name, verdicts) in zip(said, VERDICTS.items(), strict=False):
        allowed = verdicts if prepare == "reaped by others" else verdicts[:1]
        assert line.startswith(allowed), name
    assert said[-1] == "KeyboardInterrupt"
