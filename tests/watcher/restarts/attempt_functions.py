"""Functions for ranks that are restarted. They act by the attempt. The module is small, since every such rank imports it."""

import os
import signal

import mpwatch
from support.failing import rank, wait_to_be_stopped

VARIABLES = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")


def attempt():
    return mpwatch.current_worker().restart_count


def describe_self():
    me = mpwatch.current_worker()
    return me.restart_count, me.master_port, {name: os.environ[name] for name in VARIABLES}, os.getpid()


def fails(failures, failing=1, barriers=None):
    if barriers is not None:
        barriers[attempt()].wait()
    if attempt() < failures:
        if rank() == failing:
            raise ValueError(f"attempt {attempt()}")
        wait_to_be_stopped()
    return describe_self()


def raises_by_itself(failures):
    if attempt() < failures + rank():
        raise ValueError(f"attempt {attempt()}")
    return attempt()


def raises_once_then_waits():
    if attempt() == 0:
        raise ValueError("the first time")
    wait_to_be_stopped()


def ends(*ways):
    way = ways[attempt()]
    if way == "exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(way)


def starts_a_helper_and_is_restarted(folder):
    """Start a process, and write its pid and that of the rank into a file. Then rank 1 is killed, once.

    Restarted ranks return whether the old processes have a directory in /proc, and whether the helper runs.
    """
    if attempt() > 0:
        (folder / "restarted").touch()
        old_rank, helper = (folder / str(rank())).read_text().split()
        return os.path.exists(f"/proc/{old_rank}"), is_running(helper)
    helper = os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
    (folder / str(rank())).write_text(f"{os.getpid()} {helper}")
    if rank() == 1:
        while not (folder / "0").exists():
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "restarted").exists():
        os.sched_yield()
    return None


def is_running(pid):
    return os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"


def runs_until_one_was_restarted(barrier, end):
    if rank() != 1 or attempt() == 0:
        barrier.wait()
    if rank() == 1 and attempt() == 0:
        raise ValueError("the first time")
    end.wait()
    return describe_self()


def fails_while_another_awaits_its_restart(has_failed):
    if rank() == 0:
        raise ValueError("restart, please")
    if rank() == 1:
        has_failed.wait()
        raise KeyError("no restart")
    wait_to_be_stopped()


def has_a_late_heartbeat_once(was_noticed, next_was_noticed):
    mpwatch.heartbeat()
    if rank() == 1:
        was_noticed.wait()
    while not next_was_noticed.wait(0.01):
        mpwatch.heartbeat()
    return True


def fails_on_odd_ranks(end):
    if rank() == 1:
        raise ValueError("bad shard")
    if rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    assert end.wait(60)
    return 10 * rank()


def fails_when_the_others_have_returned(end):
    values = [None, CannotBeUnpickled(), lambda: 1]  # plain pickle refuses the lambda
    if rank() < 3:
        return values[rank()]
    assert end.wait(60)
    raise ValueError("bad shard")


class CannotBeUnpickled:
    def __reduce__(self):
        return os.stat, ("/not/here",)
