"""A run leaves the host process unchanged: after a success, failure, timeout, failed launch, Ctrl-C; and the host can fork."""

import gc
import locale
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction

import pytest

import mpwatch
from support import failing, functions
from support.process_state import SPAWN, difference, state
from support.programs import command, python


def everything():
    """Return the state of this process that a library might change, `process_state.state` included."""
    return {
        **state(),
        "hooks": (
            sys.excepthook,
            sys.unraisablehook,
            sys.displayhook,
            threading.excepthook,
            sys.gettrace(),
            sys.getprofile(),
        ),
        "warnings": (list(warnings.filters), warnings.showwarning, dict(warnings.onceregistry)),
        "file mode mask": mode_mask(),
        "modules are found": (list(sys.path), list(sys.meta_path), list(sys.path_hooks)),
        "main": (sys.modules["__main__"], dict(vars(sys.modules["__main__"])), list(sys.argv)),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "wake-up descriptor": wakeup_fd(),
        "timers": [signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
        "pending signals": signal.sigpending(),
        "of the kernel": lines_of_status("SigBlk", "SigIgn", "SigCgt", "Uid", "Gid", "NoNewPrivs", "Seccomp"),
        "logging": [(logger, logger.level, list(logger.handlers), logger.propagate) for logger in loggers()],
        "scheduling": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), os.sched_getscheduler(0)),
        "process group": (os.getpgrp(), os.getsid(0)),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "descriptors 0 to 2": [(os.get_blocking(fd), os.get_inheritable(fd)) for fd in range(3)],
        "interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), locale.setlocale(locale.LC_ALL)),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
        "multiprocessing": (multiprocessing.active_children(), dict(vars(multiprocessing.current_process()))),
        "spawning": (multiprocessing.spawn.get_executable(), dict(reduction.ForkingPickler._extra_reducers)),
    }


def mode_mask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def wakeup_fd():
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


def lines_of_status(*names):
    with open("/proc/self/status") as lines:
        return [line for line in lines if line.startswith(names)]


def loggers():
    return [logging.getLogger(), *(logging.getLogger(name) for name in ("mpwatch", "multiprocessing", "asyncio"))]


def assert_unchanged(before, after):
    assert not {name: difference(before[name], after[name]) for name in before if before[name] != after[name]}


def succeeds():
    assert list(mpwatch.run(functions.rank, 2)) == [0, 1]


def fails():
    def raise_on_rank_0():
        return failing.raises_value_error() if failing.rank() == 0 else failing.wait_to_be_stopped()

    with pytest.raises(mpwatch.RunFailedError):
        mpwatch.run(raise_on_rank_0, 2)


def dies():
    with pytest.raises(mpwatch.RunFailedError):
        mpwatch.run(failing.is_killed, 2)


def times_out():
    with pytest.raises(mpwatch.RunTimeoutError):
        mpwatch.run(failing.wait_to_be_stopped, 2, timeout=0.5)


def cannot_be_sent():
    with pytest.raises(mpwatch.LaunchError):
        mpwatch.run(print, 2, args=(threading.Lock(),))


def cannot_be_started():
    environment = {"TOO_LARGE": "x" * (1 << 24)}
    with pytest.raises(mpwatch.LaunchError, match="the environment is too large"):
        mpwatch.run(functions.rank, 2, env=environment)


def is_refused():
    with pytest.raises(ValueError, match="nprocs"):
        mpwatch.run(functions.rank, 0)


def is_interrupted():
    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(failing.interrupts_its_watcher, 2, grace_period=5)


def is_terminated():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(mpwatch.RunFailedError, match="SIGTERM"):
            mpwatch.run(failing.interrupts_its_watcher, 2, args=(signal.SIGTERM,), grace_period=5)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


OFF_THE_MAIN_THREAD = (succeeds, fails, dies, times_out, cannot_be_sent, cannot_be_started, is_refused)


def name(outcome):
    return outcome.__name__


@pytest.mark.parametrize("outcome", [*OFF_THE_MAIN_THREAD, is_interrupted, is_terminated], ids=name)
def test_a_run_leaves_the_host_unchanged(outcome):
    """Also off the main thread, where Python delivers no signals."""
    before = everything()
    outcome()
    if outcome in OFF_THE_MAIN_THREAD:
        with ThreadPoolExecutor() as threads:
            threads.submit(outcome).result()
    assert_unchanged(before, everything())


@pytest.fixture
def _unusual_settings(tmp_path, monkeypatch):
    """A host with settings of its own, each unlike the default."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGALRM, lambda *_: None)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    mask = os.umask(0o027)
    signal.setitimer(signal.ITIMER_REAL, 3600, 3600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    monkeypatch.setenv("RANK", "7")
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.umask(mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(wakeup)
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures("_unusual_settings")
@pytest.mark.parametrize("outcome", [succeeds, fails, cannot_be_started], ids=name)
def test_settings_of_the_host_stay(outcome):
    before = everything()
    outcome()
    after = everything()
    timers = zip(before.pop("timers"), after.pop("timers"), strict=True)
    assert_unchanged(before, after)
    assert all(now == (pytest.approx(left, abs=60), interval) for (left, interval), now in timers)


def fork():
    """Do two runs in a fork of this program. Return its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        assert not {"cProfile", "wsgiref"} & set(sys.modules)
        import cProfile  # noqa: F401 - a fork can import modules
        import wsgiref.util  # noqa: F401

        thread = threading.Thread(target=sum, args=([1],))
        thread.start()
        thread.join()
        assert list(mpwatch.run(functions.rank, 2)) == [0, 1]
        with pytest.raises(mpwatch.RunFailedError) as caught:
            mpwatch.run(failing.raises_value_error, 2)
        assert isinstance(caught.value.__cause__, ValueError)
        print("the child is done", flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.exit(0)  # as any program, exit hooks of multiprocessing and all


def wait_twice(barrier):
    barrier.wait()
    barrier.wait()
    return functions.rank()


def fork_during_a_run():
    barrier, codes = SPAWN.Barrier(3), []

    def fork_between_barriers():
        barrier.wait()
        codes.append(fork())
        barrier.wait()

    thread = threading.Thread(target=fork_between_barriers)
    mpwatch.run(failing.is_killed, 1, check=False)
    thread.start()
    print(list(mpwatch.run(wait_twice, 2, args=(barrier,))))
    thread.join()
    assert codes == [0], codes


def test_a_fork_during_a_run_works():
    """Another thread forks. The child holds the run's descriptors; the run must end while the child lives."""
    done = python("-W", "ignore::DeprecationWarning", *command(fork_during_a_run))
    assert (done.stdout, done.stderr) == ("the child is done\n[0, 1]\n", "")
