"""What ranks do in their first life, and in a later one. A light module: every rank of the tests of restarts imports it."""

import os
import signal
import sys

import mpwatch

VARIABLES = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")


def life():
    return mpwatch.current_worker().restart_count


def rank():
    return mpwatch.current_worker().rank


def wait_to_be_stopped():
    while True:
        signal.pause()


def who():
    me = mpwatch.current_worker()
    return me.restart_count, me.master_port, {name: os.environ[name] for name in VARIABLES}, os.getpid()


def fails(lives, failing=1, meet=None, error=ValueError):
    """This rank raises in so many lives, when all have met; the others wait for that. Then all say who they are."""
    if meet is not None:
        meet[life()].wait()
    if life() < lives:
        if rank() == failing:
            raise error(f"life {life()}")
        wait_to_be_stopped()
    return who()


def raises_by_itself(lives):
    """Each rank in so many lives, rank n in n more."""
    if life() < lives + rank():
        raise ValueError(f"life {life()}")
    return life()


def raises_then_waits(*lives):
    """Each rank raises in so many lives."""
    if life() < lives[rank()]:
        raise ValueError(f"life {life()}")
    wait_to_be_stopped()


def always_raises(error=ValueError):
    raise error(f"life {life()} of rank {rank()}")


def exits_with(*codes):
    sys.exit(codes[life()])


def dies(*ways):
    """In another way each time."""
    way = ways[life()]
    if way == "exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "raise":
        raise ValueError("the third time")
    return way


def has_a_helper(folder, lives):
    """Leaves its pid and its helper's, for those who come after it, and looks whether those before it are gone."""
    helper = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", "import signal; signal.pause()"], os.environ)
    (folder / f"{life()}-{rank()}").write_text(f"{os.getpid()} {helper}")
    if life() < lives:
        if rank() == 1:
            while not (folder / f"{life()}-0").exists():
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGKILL)
        wait_to_be_stopped()
    return life()


def goes_on(turn, end, failing=1):
    """Rank `failing` fails once the others are at work; they go on until it has lived again."""
    if rank() == failing:
        if life() == 0:
            turn.wait()
            raise ValueError("the first time")
        end.wait()
    else:
        turn.wait()
        end.wait()
    return who()


def raises_when_it_is_stopped(barrier):
    """Rank 0 in its first life, since rank 1 has failed."""

    def stop(*_):
        raise KeyError("in its turn")

    if life() == 0:
        signal.signal(signal.SIGTERM, stop)
        barrier.wait()
        if rank() == 1:
            raise ValueError("the first")
        wait_to_be_stopped()
    return life()


def is_deaf_the_first_time(meet):
    if life() == 0:
        if rank() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        meet[0].wait()
        if rank() == 1:
            raise ValueError("the first time")
        wait_to_be_stopped()
    return life()


def reports(*steps):
    mpwatch.report(step=steps[life()])
    raise ValueError(f"after step {steps[life()]}")


def beats_and_raises(error):
    mpwatch.heartbeat()
    always_raises(error)


def is_late_once(noticed, heard):
    """Rank 1 says nothing until that was noticed; then both beat until that was heard."""
    mpwatch.heartbeat()
    if rank() == 1:
        noticed.wait()
    while not heard.wait(0.01):
        mpwatch.heartbeat()
    return True


def falls_silent(lives=9):
    mpwatch.heartbeat()
    if life() < lives:
        wait_to_be_stopped()
    return life()


def returns_the_second_time(value):
    if life() == 0:
        raise ValueError("the first time")
    return value()


def waits_the_second_time():
    if life() == 0:
        raise ValueError("the first time")
    wait_to_be_stopped()


def fails_for_good_beside_one_that_waits(has_failed):
    """Rank 0 fails, and would be started again after a while; then rank 1 fails, and is not worth it."""
    if rank() == 0:
        raise ValueError("again, please")
    if rank() == 1:
        has_failed.wait()
        raise KeyError("not again")
    wait_to_be_stopped()


def waits_the_second_time_if_rank_1():
    if rank() == 1 and life() == 0:
        raise ValueError("the first time")
    wait_to_be_stopped()


class CountsItsPickling:
    """Where it was made."""

    def __init__(self):
        self.times = 0

    def __reduce__(self):
        self.times += 1
        return str, ("an argument",)


class Unbuildable:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise LookupError("not here")


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not to be sent")


class TellsItInItsOwnTime(ValueError):
    """What can be pickled of it comes when its rank is allowed to: until then that one is there, and deaf to SIGTERM."""

    def __init__(self, text, is_telling, may_end):
        super().__init__(text)
        self.events = is_telling, may_end

    def __reduce__(self):
        is_telling, may_end = self.events
        is_telling.set()
        may_end.wait()
        return ValueError, self.args[:1]


def fails_for_good_while_another_ends(is_telling, may_end):
    """Rank 1 fails, and takes its time to end; meanwhile rank 0 fails for good."""
    if rank() == 0:
        is_telling.wait()
        raise KeyError("for good")
    if life() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise TellsItInItsOwnTime("again, please", is_telling, may_end)
    wait_to_be_stopped()


def interrupts_its_parent_when_it_is_stopped(barrier):
    """Rank 0, since rank 1 has failed."""

    def stop(*_):
        os.kill(os.getppid(), signal.SIGINT)

    signal.signal(signal.SIGTERM, stop)
    barrier.wait()
    if rank() == 1:
        raise ValueError("the first")
    while True:  # SIGINT is for the watcher, and makes it hurry
        signal.pause()


def one_returns_before_the_other_fails(event):
    """In the first attempt."""
    me = mpwatch.current_worker()
    if me.rank == 1 and me.restart_count == 0:
        assert event.wait(30)
        raise ValueError("late")
