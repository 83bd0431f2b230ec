"""Functions for ranks while the host lacks a resource."""

import os
import resource

from support.failing import (
    calls_os_exit_with_7,
    crashes,
    exits_with_3,
    interrupts_its_watcher,
    is_killed,
    is_terminated,
    raises_keyword_only_error,
    rank,
    returns_1_mib,
    wait_to_be_stopped,
)

__all__ = [
    "call_on_rank_0",
    "calls_os_exit_with_7",
    "crashes",
    "ends_after_the_host_acted",
    "exits_with_3",
    "interrupts_its_watcher",
    "is_killed",
    "is_killed_beside_a_helper",
    "is_terminated",
    "keeps_waiting",
    "raises_keyword_only_error",
    "rank",
    "returns_1_mib",
    "returns_1_mib_under_a_file_size_limit",
    "wait_to_be_stopped",
]  # tests choose one by its name


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


def keeps_waiting():
    wait_to_be_stopped()


def is_killed_beside_a_helper():
    is_killed()


def call_on_rank_0(action):
    if rank() == 0 or action is rank:
        return action()
    return wait_to_be_stopped()


def returns_1_mib_under_a_file_size_limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    return returns_1_mib()
