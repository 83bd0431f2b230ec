"""Functions for ranks that resist their end."""

import os
import signal
import time

from support.acts import act, parse_action
from support.failing import raises_value_error, rank, state_of, wait_to_be_stopped


def resist(action, pid, ended_at):
    """Rank 0 does this. If it waits, rank 1 raises then. The time of the exception or the return is in `ended_at`."""
    *preparations, end = parse_action(action)
    if rank() == 0:
        for prepare in preparations:
            prepare()
        pid.value = os.getpid()
        ended_at.value = time.monotonic()
        return end()
    if action.endswith("returns"):
        return "the other value"
    if action.endswith("raises"):
        wait_to_be_stopped()
    while not is_waiting(pid.value, action):
        os.sched_yield()
    ended_at.value = time.monotonic()
    return raises_value_error()


def is_waiting(pid, action):
    if pid and action.endswith("execs_a_program_that_waits"):
        with open(f"/proc/{pid}/comm") as text:
            return text.read() == "sleep\n" and state_of(pid) == "S"
    return state_of(pid) == ("T" if action.endswith("suspends_itself") else "S")


# ---- ranks whose end the watcher sees late, or not at all


def send_a_part_of_a_message_and_die(pid):
    """A child in a session of its own keeps the sockets open."""
    if rank() == 0:
        wait_to_be_stopped()
    if os.fork() == 0:
        os.setsid()
        pid.value = os.getpid()
        signal.alarm(60)
        signal.pause()
    while not pid.value:
        os.sched_yield()
    act("sends_half_a_message and is_killed")


def fail_beside_a_frozen_rank(cgroup, pid, failed_at):
    state = f"{cgroup}/freezer.state"
    if rank() == 0:
        pid.value = os.getpid()
        for file, text in ((f"{cgroup}/cgroup.procs", str(pid.value)), (state, "FROZEN")):
            with open(file, "w") as opened:
                opened.write(text)
        wait_to_be_stopped()
    while open(state).read() != "FROZEN\n":
        os.sched_yield()
    failed_at.value = time.monotonic()
    raises_value_error()
