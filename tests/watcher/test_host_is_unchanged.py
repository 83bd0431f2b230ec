"""A run leaves the host process unchanged: after a success, failure, timeout, failed launch, Ctrl-C; and the host can fork."""

import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import reduction, resource_tracker

import pytest

import mpwatch
from support import failing, functions
from support.process_state import SPAWN, difference, state
from support.programs import command, in_own_process, python


def everything():
    """Return the state of this process that a library might change, `process_state.state` included."""
    return {
        **state(),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "warnings": (list(warnings.filters), warnings.showwarning, dict(warnings.onceregistry)),
        "file mode mask": mode_mask(),
        "modules are found": (list(sys.path), list(sys.meta_path), list(sys.path_hooks)),
        "main": (sys.modules["__main__"], dict(vars(sys.modules["__main__"])), list(sys.argv)),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "wake-up descriptor": wakeup_fd(),
        "timers": [signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
        "pending signals": signal.sigpending(),
        "of the kernel": lines_of_status("SigBlk", "SigIgn", "SigCgt", "Uid", "Gid", "NoNewPrivs", "Seccomp"),
        "logging": [
            (logger.level, list(logger.handlers), logger.propagate)
            for logger in map(logging.getLogger, (None, "mpwatch", "multiprocessing", "asyncio"))
        ],
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


def raise_on_rank_0():
    return failing.raises_value_error() if failing.rank() == 0 else failing.wait_to_be_stopped()


OUTCOMES = {
    "it succeeds": (None, functions.rank, {}),
    "a rank fails": (mpwatch.RunFailedError, raise_on_rank_0, {}),
    "a rank dies": (mpwatch.RunFailedError, failing.is_killed, {}),
    "it times out": (mpwatch.RunTimeoutError, failing.wait_to_be_stopped, {"timeout": 0.5}),
    "it cannot be sent": (mpwatch.LaunchError, print, {"args": (threading.Lock(),)}),
    "it cannot be started": (mpwatch.LaunchError, functions.rank, {"env": {"TOO_LARGE": "x" * (1 << 24)}}),
    "it is refused": (ValueError, functions.rank, {"nprocs": 0}),
    "it is interrupted": (KeyboardInterrupt, failing.interrupts_its_watcher, {"grace_period": 5}),
    "it is terminated": (
        mpwatch.RunFailedError,
        failing.interrupts_its_watcher,
        {"args": (signal.SIGTERM,), "grace_period": 5},
    ),
}


def do_run(error, fn, options):
    with pytest.raises(error) if error else nullcontext():
        mpwatch.run(fn, **{"nprocs": 2, **options})


def make_unusual_settings():
    resource_tracker.ensure_running()  # it lives until the program ends
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGALRM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    os.umask(0o027)
    signal.setitimer(signal.ITIMER_REAL, 3600, 3600)
    os.chdir(tempfile.gettempdir())
    os.environ["RANK"] = "7"
    sys.excepthook = partial(sys.__excepthook__)
    threading.excepthook = partial(threading.__excepthook__)


@pytest.mark.parametrize("name", OUTCOMES)
@in_own_process
def test_a_run_leaves_the_host_unchanged(name):
    """Also off the main thread, where Python delivers no signals."""
    make_unusual_settings()
    mpwatch.run(functions.rank, 1)  # modules that it imports change copyreg
    before = everything()
    do_run(*OUTCOMES[name])
    if OUTCOMES[name][1] is not failing.interrupts_its_watcher:
        with ThreadPoolExecutor() as threads:
            threads.submit(do_run, *OUTCOMES[name]).result()
    after = everything()
    timers = zip(before.pop("timers"), after.pop("timers"), strict=True)
    changed = {name: difference(before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, changed
    assert all(now == (pytest.approx(left, abs=60), interval) for (left, interval), now in timers)


def fork():
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        assert "wsgiref" not in sys.modules
        import wsgiref.util  # noqa: F401 - a fork can import modules

        assert list(mpwatch.run(functions.rank, 2)) == [0, 1]
        assert isinstance(mpwatch.run(failing.raises_value_error, 2, check=False).root_cause.exception, ValueError)
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
    thread.start()
    print(list(mpwatch.run(wait_twice, 2, args=(barrier,))))
    thread.join()
    assert codes == [0], codes


def test_a_fork_during_a_run_works():
    """Another thread forks. The child holds the run's descriptors; the run must end while the child lives."""
    done = python("-W", "ignore::DeprecationWarning", *command(fork_during_a_run))
    assert (done.stdout, done.stderr) == ("the child is done\n[0, 1]\n", "")
