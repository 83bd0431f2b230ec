"""Functions for ranks that are restarted. They act by the attempt. The module is small, since every such rank imports it."""

import os

import mpwatch
from support.acts import act
from support.failing import is_killed, rank, wait_to_be_stopped

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


def ends(*actions):
    return act(actions[attempt()])


def fails_on_odd_ranks(end):
    if rank() == 1:
        raise ValueError("bad shard")
    if rank() == 3:
        is_killed()
    assert end.wait(60)
    return 10 * rank()
