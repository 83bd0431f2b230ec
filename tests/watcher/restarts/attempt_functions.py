"""Functions for ranks that are restarted. They act by the attempt. The module is small, since every such rank imports it."""

import os
import signal
import sys

import mpwatch

VARIABLES = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")


def attempt():
    return mpwatch.current_worker().restart_count


def rank():
    return mpwatch.current_worker().rank


def wait_to_be_stopped():
    while True:
        signal.pause()


def describe_self():
    me = mpwatch.current_worker()
    return me.restart_count, me.master_port, {name: os.environ[name] for name in VARIABLES}, os.getpid()


def fails(failures, failing=1, barriers=None, error=ValueError):
    """Raise in the first `failures` attempts on rank `failing`, once all ranks run; the others wait. Later describe the rank."""
    if barriers is not None:
        barriers[attempt()].wait()
    if attempt() < failures:
        if rank() == failing:
            raise error(f"attempt {attempt()}")
        wait_to_be_stopped()
    return describe_self()


def raises_by_itself(failures):
    """Raise in the first attempts: rank n in the first `failures` + n."""
    if attempt() < failures + rank():
        raise ValueError(f"attempt {attempt()}")
    return attempt()


def raises_then_waits(*failures):
    """Raise in the first attempts: rank n in the first `failures[n]`. Then wait to be stopped."""
    if attempt() < failures[rank()]:
        raise ValueError(f"attempt {attempt()}")
    wait_to_be_stopped()


def raises_then_sets(event):
    if attempt() == 0:
        raise ValueError("attempt 0")
    event.set()


def always_raises(error=ValueError):
    raise error(f"attempt {attempt()} of rank {rank()}")


def exits_with(*codes):
    sys.exit(codes[attempt()])


def ends(*ways):
    """End in another way in each attempt."""
    way = ways[attempt()]
    if way == "exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "raise":
        raise ValueError("the third time")
    return way


def starts_a_helper(folder, failures):
    """Start a process, and write its pid and that of the rank into a file. Rank 1 is killed in the first attempts."""
    helper = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", "import signal; signal.pause()"], os.environ)
    (folder / f"{attempt()}-{rank()}").write_text(f"{os.getpid()} {helper}")
    if attempt() < failures:
        if rank() == 1:
            while not (folder / f"{attempt()}-0").exists():
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGKILL)
        wait_to_be_stopped()
    return attempt()


def runs_until_one_was_restarted(all_run, end, failing=1):
    """Raise once on rank `failing`, when the others run. These run until that rank was restarted."""
    if rank() == failing:
        if attempt() == 0:
            all_run.wait()
            raise ValueError("the first time")
        end.wait()
    else:
        all_run.wait()
        end.wait()
    return describe_self()


def raises_when_stopped(barrier):
    """Raise on rank 1 in the first attempt, and then on rank 0 when it is stopped."""

    def stop(*_):
        raise KeyError("when stopped")

    if attempt() == 0:
        signal.signal(signal.SIGTERM, stop)
        barrier.wait()
        if rank() == 1:
            raise ValueError("the first")
        wait_to_be_stopped()
    return attempt()


def ignores_sigterm_in_the_first_attempt(barriers):
    if attempt() == 0:
        if rank() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        barriers[0].wait()
        if rank() == 1:
            raise ValueError("the first time")
        wait_to_be_stopped()
    return attempt()


def reports(*steps):
    mpwatch.report(step=steps[attempt()])
    raise ValueError(f"after step {steps[attempt()]}")


def raises_after_a_heartbeat(error):
    mpwatch.heartbeat()
    always_raises(error)


def has_a_late_heartbeat_once(was_noticed, next_was_noticed):
    """Send no heartbeat on rank 1 until that was noticed. Then both ranks send them until that was noticed, too."""
    mpwatch.heartbeat()
    if rank() == 1:
        was_noticed.wait()
    while not next_was_noticed.wait(0.01):
        mpwatch.heartbeat()
    return True


def stops_its_heartbeats(failures=9):
    mpwatch.heartbeat()
    if attempt() < failures:
        wait_to_be_stopped()
    return attempt()


def returns_in_the_second_attempt(value):
    if attempt() == 0:
        raise ValueError("the first time")
    return value()


def waits_in_the_second_attempt():
    if attempt() == 0:
        raise ValueError("the first time")
    wait_to_be_stopped()


def fails_while_another_awaits_its_restart(has_failed):
    """Raise on rank 0, which is to be restarted after a delay. Then raise on rank 1, which is not to be restarted."""
    if rank() == 0:
        raise ValueError("restart, please")
    if rank() == 1:
        has_failed.wait()
        raise KeyError("no restart")
    wait_to_be_stopped()


def raises_once_on_rank_1_then_waits():
    if rank() == 1 and attempt() == 0:
        raise ValueError("the first time")
    wait_to_be_stopped()


class CountsItsPickling:
    """An argument that counts how often it is pickled."""

    def __init__(self):
        self.times = 0

    def __reduce__(self):
        self.times += 1
        return str, ("an argument",)


class CannotBeUnpickled:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise LookupError("not here")


class CannotBePickled:
    def __reduce__(self):
        raise TypeError("not to be sent")


class SlowToPickle(ValueError):
    """An exception whose pickling takes until `may_exit` is set. Until then its rank does not exit."""

    def __init__(self, text, is_pickling, may_exit):
        super().__init__(text)
        self.events = is_pickling, may_exit

    def __reduce__(self):
        is_pickling, may_exit = self.events
        is_pickling.set()
        may_exit.wait()
        return ValueError, self.args[:1]


def fails_while_another_is_stopped(is_pickling, may_exit):
    """Raise on rank 1, which then does not exit. Meanwhile raise on rank 0, which is not to be restarted."""
    if rank() == 0:
        is_pickling.wait()
        raise KeyError("no restart")
    if attempt() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SlowToPickle("restart, please", is_pickling, may_exit)
    wait_to_be_stopped()


def interrupts_its_parent_when_stopped(barrier):
    """Raise on rank 1. Rank 0 handles the SIGTERM that follows: it sends SIGINT to its parent."""

    def stop(*_):
        os.kill(os.getppid(), signal.SIGINT)

    signal.signal(signal.SIGTERM, stop)
    barrier.wait()
    if rank() == 1:
        raise ValueError("the first")
    while True:  # SIGINT makes the watcher kill all ranks
        signal.pause()


def rank_0_returns_before_rank_1_fails(event):
    """Raise on rank 1 in the first attempt, after rank 0 has returned."""
    me = mpwatch.current_worker()
    if me.rank == 1 and me.restart_count == 0:
        assert event.wait(30)
        raise ValueError("late")
