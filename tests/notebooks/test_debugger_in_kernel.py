"""`breakpoint()` in a rank opens pdb in the notebook cell that called."""

import re

import pytest

from notebooks.kernels import Kernel

COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of source lines, on Python 3.14
DEFINITIONS = """
import multiprocessing
import mpwatch
def train(ranks, n):
    rank = mpwatch.current_worker().rank
    values = {"rank": rank}
    if rank in ranks:
        breakpoint()
    return rank + n
def fail(event):
    rank = mpwatch.current_worker().rank
    secret = f"secret of rank {rank}"
    if rank == 1:
        event.wait()
        raise ValueError("boo")
    wait(event)
def wait(event):
    import threading
    event.set()
    threading.Event().wait()
event = multiprocessing.get_context("spawn").Event()
"""


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    assert kernel.run(DEFINITIONS) == []
    yield kernel
    kernel.close()


def test_all_ranks_stop(kernel):
    answers = ["p values", "ll", "w", "ranks", "all p values", "all c"]
    text = COLOURS.sub("", kernel.converse("print(list(mpwatch.run(train, 2, args=([0, 1], 1))))", answers))
    assert ") (Pdb) p values\n{'rank': " in text
    assert "        breakpoint()\n" in text  # the source of the cell
    assert re.search(r"\(Pdb\) w\n> Cell In\[\d+\]\([78]\)train\(\)\n", text)
    assert "/ipykernel_" not in text
    assert "ranks 0-1: at a prompt (Cell In[" in text
    assert "rank 0: {'rank': 0}\nrank 1: {'rank': 1}\n" in text
    assert text.endswith("[1, 2]\n")


def test_post_mortem(kernel):
    answers = ["p secret", "rank 0", "q"]
    text = kernel.converse("mpwatch.run(fail, 2, args=(event,), debug='post_mortem')", answers)
    assert "(rank 1) (Pdb) p secret\n'secret of rank 1'\n" in text
    assert "rank 0: in wait (Cell In[" in text
    assert "rank 1 failed first: ValueError: boo (Cell In[" in text
