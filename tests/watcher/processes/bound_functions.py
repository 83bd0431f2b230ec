"""Functions for ranks that are bound to CPUs. It imports little: every rank of these tests imports it."""

import os
import sys
import threading

import mpwatch


def get_affinity():
    """Return the CPUs on which each thread of this rank may run: one set, if all have the same."""
    return {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}


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
    of_fork = eval(os.read(reader, 1000))
    os.close(reader)
    os.close(writer)
    return sys.affinity_at_start, *get_affinity(), *of_thread, of_fork


def get_own_affinity():
    return os.sched_getaffinity(0)


def get_affinity_of_item(item):
    return item, os.sched_getaffinity(0)


def fail_at_first():
    """Fail in the first attempt, in rank 0. Later return the affinity and the number of restarts."""
    me = mpwatch.current_worker()
    if me.rank == 0 and me.restart_count == 0:
        os._exit(3)
    return me.restart_count, os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"]


def get_devices():
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "RANK")
    return [os.environ[name] for name in names]
