"""Functions for ranks that fail or wait, for tests of several features. A rank imports this module, so it imports little."""

import ctypes
import os
import signal
import threading

import mpwatch


def rank():
    return mpwatch.current_worker().rank


def wait_to_be_stopped():
    while True:
        signal.pause()


def call_on_rank_1(action, barrier, *args):
    """Call `action` on rank 1 once all ranks run. The other ranks wait until they are stopped."""
    barrier.wait()
    if rank() == 1:
        return action(*args)
    return wait_to_be_stopped()


class KeywordOnlyError(Exception):
    """An exception that plain pickle cannot rebuild: it takes two arguments that are not in `args`."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")
        self.code = code
        self.detail = detail


def raises_value_error():
    raise ValueError("the batch is bad")  # THE-LINE


def raises_keyword_only_error():
    raise KeywordOnlyError(7, detail="two arguments")


def raises_from_another_error():
    try:
        return {"größe": "äöü 漢字", "ratio": 1 / len("")}  # after wide characters
    except ZeroDivisionError as error:
        raise RuntimeError("the second") from error


def recurses():
    recurses()


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def crashes():
    ctypes.string_at(0)


def state_of(pid):
    if not pid:
        return None
    with open(f"/proc/{pid}/stat") as text:
        return text.read().rpartition(")")[2].split()[0]


def wait_in_a_thread():
    threading.Event().wait()


def interrupts_its_watcher(signum=signal.SIGINT):
    if rank() == 0:
        os.kill(os.getppid(), signum)
    wait_to_be_stopped()
