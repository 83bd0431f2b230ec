"""Values that will never come are not waited for."""

import threading
import time

import pytest

from mpwatch import Rendezvous
from mpwatch.elastic.link import NOBODY_LEFT, Link
from mpwatch.elastic.talk.exchange import Exchange, ExchangeError
from mpwatch.spec import WorkerSpec


def exchange():
    return Exchange([b""], "", size=2, attempt=0, world_size=2)


def waits_in_vain(one):
    began = time.monotonic()
    with pytest.raises(ExchangeError, match=NOBODY_LEFT):
        one.wait(60.0)
    return time.monotonic() - began


@pytest.mark.parametrize("is_first", [True, False])
def test_who_waits_for_values_learns_that_the_others_are_gone(is_first):
    """However the end of the node's thread and the wish for them fall together."""
    link, one = Link(WorkerSpec(fn=int, nprocs=1, rendezvous=Rendezvous("127.0.0.1:1", "job", 2))), exchange()
    link._meet = lambda: None  # there is nobody to meet any more
    link._hands = type("Hands", (), {"close": lambda self: None})()
    thread = threading.Thread(target=link._carry_out)
    if is_first:
        link.exchange(one)
    thread.start()
    thread.join()
    if not is_first:
        link.exchange(one)
    assert waits_in_vain(one) < 1.0
