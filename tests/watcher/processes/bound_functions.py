"""Functions for ranks that are bound to CPUs. It imports little: every rank of these tests imports it."""

import os
import sys
import threading

import mpwatch


def get_affinity():
    return os.sched_getaffinity(0)


def get_affinity_of_item(item):
    return item, os.sched_getaffinity(0)


def get_affinities():
    """Return the affinity at the start of the interpreter, of all threads now, of a new thread and of a forked process."""
    of_thread = []
    thread = threading.Thread(target=lambda: of_thread.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, repr(os.sched_getaffinity(0)).encode())
        os._exit(0)
    os.wait()
    of_all_now = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    return sys.affinity_at_start, *of_all_now, *of_thread, eval(os.read(reader, 1000))


def fail_at_first():
    """Fail in the first attempt, in rank 0. Later return the number of restarts and what the rank is bound to."""
    me = mpwatch.current_worker()
    if me.rank == 0 and me.restart_count == 0:
        os._exit(3)
    return me.restart_count, os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"]


def get_devices():
    return [os.environ[name] for name in ("ZE_AFFINITY_MASK", "LOCAL_RANK", "RANK")]
