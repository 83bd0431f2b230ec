"""Tests of shortages on the host: descriptors, processes, memory, folders, exit codes of children.

The error of a failed launch names the resource. A running run still reports the root cause. Nothing is left behind. A test
that would harm the other tests makes its shortage in a program of its own.
"""

import contextlib
import itertools
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from multiprocessing import reduction, set_executable
from pathlib import Path

import pytest

import mpwatch
from support import failing
from support.functions import Adder, rank
from support.one_run import attempt, leave_descriptors, limit
from support.process_state import SPAWN, children
from support.programs import ENV, call, in_own_process, python
from watcher import first_runs, shortage_functions

KEYWORD_ONLY_ERROR = "EXCEPTION rank {} failed first: KeywordOnlyError: code 7: two arguments"
PIDS = Path("/sys/fs/cgroup/pids")
OTHER_USERS = itertools.count(1_000_000_000 + 100 * os.getpid())  # a new one for each test: zombies count as processes


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
    user = f"--reuid={next(OTHER_USERS)}"
    within = ("setpriv", user, "--clear-groups", f"--inh-caps=-all,{caps}", f"--ambient-caps=-all,{caps}")
    skip_unless_works(*within, why="no other user can be made here: that takes root, and setpriv")
    return within


# ------------------------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("is_captured", [False, True])
def test_every_step_of_a_launch_without_descriptors_raises_launch_error(is_captured, tmp_path):
    """The number of free descriptors grows from zero until the run succeeds."""
    logs = mpwatch.LogSpec(tmp_path) if is_captured else None
    for spare in range(60):
        line = attempt(short=partial(leave_descriptors, spare), logs=logs)
        if line == "values [0, 1]":
            break
        assert line.startswith("LaunchError "), line
        assert "Too many open files" in line
        assert "ulimit -n" in line
    assert 10 < spare < (60 if is_captured else 40)


def test_descriptors_run_out_after_some_ranks_have_been_started():
    for spare in range(30, 90, 7):
        with pytest.raises(mpwatch.LaunchError, match=r"rank \d+ could not be started: .*Too many open files"):
            restore_limit = leave_descriptors(spare)
            try:
                mpwatch.run(failing.rank, 32)
            finally:
                restore_limit()


def test_a_first_run_without_descriptors_blames_no_argument():
    """The first run imports the modules that pack a call."""
    output = call(first_runs.with_100_descriptors).stdout
    assert output.startswith("the call could not be packed: OSError: [Errno 24] Too many open files"), output
    assert "ulimit -n" in output


def test_descriptors_run_out_for_the_descriptors_of_a_call():
    """Each connection in the arguments needs a descriptor until the payload is closed."""
    ours, theirs = SPAWN.Pipe()
    with ours, theirs:
        for spare in range(2):
            args = (Adder(theirs), ours)
            line = attempt(print, short=partial(leave_descriptors, spare), args=args)
            assert line.startswith("LaunchError the call could not be packed: OSError: [Errno 24]"), line
            assert "args[" not in line


def send_with_descriptors_in_flight():
    line = socket.socketpair()
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, 100))
    for _ in range(2):  # no process receives them
        socket.send_fds(line[0], [b"x"], [0] * 30)
    print(attempt(len, args=(bytes(10_000),)))


def test_more_descriptors_in_flight_than_a_user_may_have():
    (output,) = call(send_with_descriptors_in_flight, within=command_of_other_user()).stdout.splitlines()
    assert re.match(
        r"LaunchError the call could not be sent to rank [01]: OSError: \[Errno 109\] Too many references", output
    )
    assert output.endswith("raise the limit of open files (`ulimit -n`), or use torch's sharing strategy 'file_system'")


@in_own_process
def test_a_rank_has_no_room_for_the_descriptors_of_its_call():
    """The caller has more descriptors than its lowered limit allows. Its ranks inherit the limit."""
    low = [os.open(os.devnull, os.O_RDONLY) for _ in range(60)]
    pipes = [os.fdopen(fd, "wb", 0) for _ in range(40) for fd in os.pipe()]

    class Pipes:
        def __reduce__(self):
            return list, ([reduction.DupFd(pipe.fileno()) for pipe in pipes],)

    def lower(_):
        while low:
            os.close(low.pop())
        limit(resource.RLIMIT_NOFILE, 60)
        return {}

    why = r"OSError: \[Errno 24\] the descriptors of the call .*see `ulimit -n`"
    with pytest.raises(mpwatch.RunFailedError, match=f"^rank 0 could not load the call: {why}") as caught:
        mpwatch.run(len, 1, args=(Pipes(),), env=lower)
    assert caught.value.root_cause.kind is mpwatch.FailureKind.START


def attempt_with_lower_limit(end, soft):
    """Lower the limit of descriptors while three ranks run. Then each rank calls `end`, or waits."""
    at_work, go, restore = SPAWN.Semaphore(0), SPAWN.Semaphore(0), []

    def lower():
        for _ in range(3):
            at_work.acquire()
        restore.append(limit(resource.RLIMIT_NOFILE, soft))
        for _ in range(3):
            go.release()

    def begin():
        thread.start()
        return lambda: (thread.join(), restore.pop()())

    thread = threading.Thread(target=lower)
    args = (at_work, go, end)
    return attempt(shortage_functions.ends_after_the_host_acted, 3, args=args, grace_period=1, short=begin)


@in_own_process
def test_a_running_run_needs_no_more_descriptors():
    """Neither for answers, nor for a diagnosis, nor to wait for the end of helpers."""
    for end, expected in (
        (failing.rank, "values [0, 1, 2]"),
        (failing.raises_keyword_only_error, f"{KEYWORD_ONLY_ERROR.format(1)} (failing.py:"),
        (failing.is_killed, "SIGNAL rank 1 was killed by SIGKILL"),
        (shortage_functions.is_killed_beside_a_helper, "SIGNAL rank 1 was killed by SIGKILL"),
    ):
        line = attempt_with_lower_limit(end, 5)
        assert line.startswith(expected), line


def test_a_rank_that_cannot_write_a_file_for_its_return_value():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(shortage_functions.returns_1_mib_under_a_file_size_limit, 1)
    output = str(caught.value.root_cause.exception)
    assert output.startswith("the return value could not be packed: OSError: [Errno "), output
    assert "`ulimit -f`" in output


@in_own_process
def test_the_watcher_needs_a_descriptor_to_receive_a_large_value():
    line = attempt_with_lower_limit(failing.returns_1_mib, 5)
    why = r"OSError: the watcher could not receive its return value: OSError: \[Errno 24\] Too many open files; raise the limit of open"
    assert re.match(rf"EXCEPTION rank \d failed first: {why} files \(`ulimit -n`\)", line), line


@in_own_process
def test_nothing_is_left_if_poll_fails():
    """poll(2) fails if it gets more descriptors than the limit of open files."""
    with pytest.raises(OSError, match=r"^\[Errno 22\] Invalid argument$"):
        attempt_with_lower_limit(shortage_functions.is_killed_beside_a_helper, 0)


# --------------------------------------------------------------------------------------------------------- processes

MANY = f"BlockingIOError: [Errno 11] Resource temporarily unavailable: {sys.executable!r}; raise the limit of processes (`ulimit"


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


def wait_until_no_thread_counts():
    """Wait for the threads of an earlier run: the kernel counts a thread for a moment after Python has joined it."""
    while len(os.listdir("/proc/self/task")) > 1:
        os.sched_yield()


def run_with_room_in_group(group):
    def leave_room(room):
        wait_until_no_thread_counts()
        used = int(Path(f"{group}/pids.current").read_text())
        Path(f"{group}/pids.max").write_text(str(used + room))
        return lambda: None

    Path(f"{group}/cgroup.procs").write_text(str(os.getpid()))
    for room in range(6):
        print(attempt(short=partial(leave_room, room)))


def run_with_room_of_user():
    def leave_room(room):
        wait_until_no_thread_counts()
        return limit(resource.RLIMIT_NPROC, 1 + len(children()) + room)

    for room in range(6):
        print(attempt(short=partial(leave_room, room)))


def test_a_container_with_room_for_some_processes(pids_group):
    check_processes(call(run_with_room_in_group, str(pids_group)).stdout.splitlines())


def test_a_user_with_room_for_some_processes():
    check_processes(call(run_with_room_of_user, within=command_of_other_user()).stdout.splitlines())


def test_a_first_run_with_room_for_some_processes(pids_group):
    """The first run that can start multiprocessing's resource tracker does so, and the tracker stays."""
    output = call(first_runs.with_room_for_some_processes, str(pids_group)).stdout.splitlines()
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


def leave_memory(mib):
    """Limit the address space of this process to that many MiB more. Return a function that restores the old limit."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limit(resource.RLIMIT_AS, used + (mib << 20))


@in_own_process
def test_no_memory_for_the_payload_blames_no_argument():
    line = attempt(len, args=("x" * (100 << 20),), short=partial(leave_memory, 40))
    assert line.startswith("LaunchError the call could not be packed: there is not enough memory; free some"), line
    assert "args[" not in line
    assert "bytes" not in line


@in_own_process
def test_no_memory_for_the_call_in_a_rank():
    """The caller has enough memory, then lowers its limit. Its ranks inherit the limit."""
    data = bytes(100 << 20)
    leave_memory(600)
    with pytest.raises(mpwatch.RunFailedError, match="could not load the call: MemoryError") as caught:
        mpwatch.run(len, 2, args=(data,), env=lambda _: leave_memory(40) and {})
    error = caught.value
    assert (error.root_cause.kind, type(error.__cause__)) == (mpwatch.FailureKind.START, MemoryError)
    assert str(error).startswith("rank ")


def run_with_executable(path):
    set_executable(path)
    print(attempt(nprocs=1))


def test_no_memory_for_the_interpreter_of_a_rank(tmp_path):
    """There is no memory for the guardian's interpreter either."""
    starved = tmp_path / "python"
    run = f'ulimit -v 6000\nexec {sys.executable} "$@"\n'
    gone = tmp_path / "gone"  # the rank waits until the guardian is gone, so that the watcher notices it
    guardian = f'case "$*" in *guardian/main.py*) ({run}); : > {gone}; exit 1;; esac\n'
    starved.write_text(f"#!/bin/sh\n{guardian}until [ -e {gone} ]; do :; done\n{run}")
    starved.chmod(0o755)
    done = call(run_with_executable, str(starved))
    assert done.stdout.startswith("START rank 0 never started: "), done
    # a message of the interpreter or of the loader; some interpreters crash instead
    assert "memory" in done.stdout.lower() or "failed to map" in done.stdout or "was killed by SIGSEGV" in done.stdout
    assert "the guardian is gone" in done.stderr


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (180, "OSError: the watcher could not receive its return value: OSError: [Errno 12] Cannot allocate memory"),
        (250, "MemoryError"),
    ],
)
@in_own_process
def test_the_watcher_has_no_memory_for_a_return_value(size, why):
    """There is none for the mapping of its file, or for the unpickled value."""
    line = attempt(bytes, 1, args=(150 << 20,), short=partial(leave_memory, size))
    assert line.startswith(f"EXCEPTION rank 0 failed first: {why}"), line


@in_own_process
def test_no_memory_to_pack_a_return_value_does_not_blame_its_type():
    line = attempt("x".ljust, 1, args=(150 << 20,), short=partial(leave_memory, 250))
    why = "MemoryError: there is not enough memory to pack the return value"
    assert line.startswith(f"EXCEPTION rank 0 failed first: {why}"), line
    assert "is of type" not in line
    assert "return plain data instead" not in line


@pytest.mark.parametrize(
    ("size", "what"), [(100_000, "the call could not be packed"), (1_000_000, "rank 0 could not be started")]
)
@in_own_process
def test_the_limit_of_file_sizes_counts_for_files_in_memory(size, what):
    """Python ignores SIGXFSZ, so a write beyond RLIMIT_FSIZE fails with EFBIG."""
    line = attempt(len, args=(bytes(500_000),), short=partial(limit, resource.RLIMIT_FSIZE, size))
    assert line.startswith(f"LaunchError {what}: OSError: [Errno 27] File too large; raise the limit of file sizes"), line
    assert "args[" not in line


# ------------------------------------------------------------------------------------ shared memory, temporary folders

IN_NAMESPACE = ("unshare", "--mount", "sh", "-c")
FULL = "mount -t tmpfs -o size=4k mpwatch-test /dev/shm && echo x > /dev/shm/full && "
READ_ONLY = "mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp && "


def succeed_and_fail(is_full):
    if is_full:
        with pytest.raises(OSError, match="No space left on device"):
            Path("/dev/shm/more").write_bytes(bytes(8192))
        os.unlink("/dev/shm/more")
    print(attempt(len, args=(bytes(1 << 20),)))
    print(attempt(failing.raises_value_error, 1))


@pytest.mark.parametrize("mount", [FULL, READ_ONLY, FULL + READ_ONLY], ids=["/dev/shm full", "/tmp read-only", "both"])
def test_runs_need_neither_dev_shm_nor_a_temporary_folder(mount):
    within = (*IN_NAMESPACE, mount + 'exec "$@"', "sh")
    skip_unless_works(*within, why="no mounts of its own can be made here")
    fine, failed, *_ = call(succeed_and_fail, "/dev/shm" in mount, within=within).stdout.splitlines()
    assert fine == "values [1048576, 1048576]"
    assert failed.startswith("EXCEPTION rank 0 failed first: ValueError: the batch is bad")


@pytest.mark.parametrize("folder", [None, "/nowhere/at/all", "/proc/self"], ids=["unset", "not there", "read-only"])
def test_runs_do_not_depend_on_the_temporary_folder(folder):
    env = {name: value for name, value in ENV.items() if name not in ("TMPDIR", "TEMP", "TMP", "HOME")}
    env |= {} if folder is None else {"TMPDIR": folder}
    program = "from support.one_run import attempt; print(attempt())"
    assert python("-c", program, env=env).stdout == "values [0, 1]\n"


@in_own_process
def test_the_error_names_a_removed_working_directory():
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())
    with pytest.raises(mpwatch.LaunchError, match=r"^rank 0 could not be started: FileNotFoundError") as caught:
        mpwatch.run(rank, 1)
    assert "check that the current folder of this program" in str(caught.value)


# ------------------------------------------------------------------------------------------ the status of dead children


def reap_all_children():
    while True:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


VERDICTS = {  # the first one: if every exit code is lost. The others: if other code sometimes reaps a rank first
    "rank": ("values [0, 1]",),
    "raises_keyword_only_error": (KEYWORD_ONLY_ERROR.format(0),),
    "exits_with_3": ("EXIT rank 0 ended with exit code 3 and no result",),
    "calls_os_exit_with_7": ("LOST rank 0 ", "EXIT rank 0 ended with exit code 7"),
    "is_killed": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGKILL"),
    "is_terminated": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGTERM"),
    "crashes": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGSEGV"),
    "keeps_waiting": ("RunTimeoutError the run did not end",),
}


@pytest.mark.parametrize("how", ["SIGCHLD ignored", "reaped by others"])
@in_own_process
def test_a_host_that_loses_the_exit_codes_of_its_children(how):
    if how == "SIGCHLD ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        threading.Thread(target=reap_all_children, daemon=True).start()
    for name, verdicts in VERDICTS.items():
        options = {"timeout": 0.7} if name == "keeps_waiting" else {}
        line = attempt(shortage_functions.call_on_rank_0, args=(getattr(shortage_functions, name),), **options)
        assert line.startswith(verdicts if how == "reaped by others" else verdicts[:1]), line
    with pytest.raises(KeyboardInterrupt):
        attempt(failing.interrupts_its_watcher, grace_period=5)
    os._exit(0)  # at its end Python would wait for children
