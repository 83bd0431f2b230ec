"""Functions for ranks while the host lacks a resource. It imports little, since ranks import it."""

import os
import resource

from support.failing import is_killed, rank, returns_1_mib, wait_to_be_stopped


def ends_after_the_host_acted(at_work, go, end):
    """Call `end` on rank 1 after the host program has done its part. If `end` returns, call it on the other ranks, too.

    This uses semaphores, since a rank that is stopped while it leaves a barrier would leave the barrier broken for the host.
    """
    at_work.release()
    if end is is_killed_beside_a_helper:
        os.fork() or wait_to_be_stopped()
    go.acquire()
    if rank() == 1 or end in (rank, returns_1_mib):
        return end()
    return wait_to_be_stopped()


def is_killed_beside_a_helper():
    is_killed()


def call_on_rank_0(action):
    if rank() == 0 or action is rank:
        return action()
    return wait_to_be_stopped()


def returns_1_mib_under_a_file_size_limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    return returns_1_mib()
