"""Functions that ranks call with items, for tests of `mpwatch.map`. A rank imports this module, so it imports little."""

import os
import signal
import threading
import time

import mpwatch


def square(number):
    return number * number


def identity(item):
    return item


def fail_at_seven(number):
    if number == 7:
        raise ValueError("seven")
    return number


def kill_itself_at_zero(number):
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def append_line_and_die_at_seven(path_and_number):
    path, number = path_and_number
    with open(path, "a") as file:
        file.write(f"{number}\n")
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def succeed_at_third_attempt(path):
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) < 3:
        os._exit(3)
    return "done"


def count_calls(_):
    worker = mpwatch.current_worker()
    count = worker.state["count"] = worker.state.get("count", 0) + 1
    return worker.rank, worker.world_size, count


def hang_at_one(number):
    if number == 1:
        threading.Event().wait()
    return number


def sleep_unless_first(number):
    if number:
        time.sleep(1000)


def make_lock(number):
    return threading.Lock() if number == 1 else number


def make_bad_value(number):
    return BadValue(number) if number == 1 else number


class BadValue:
    """It can be pickled, but not unpickled."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return refuse, (self.number,)


def refuse(number):
    raise ValueError(f"{number} cannot be rebuilt")


def ignore_interrupts_unless_first(number):
    while number:
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            continue
