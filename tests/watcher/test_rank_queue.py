"""Which call of a WorkerGroup may begin, without processes."""

import time

import pytest

from mpwatch.watcher.rank_queue import RankQueue, Ticket

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def enter(queue, *ranks):
    ticket = Ticket(ranks)
    queue.enter(ticket)
    return ticket


def granted(*tickets):
    return [ticket.is_granted.is_set() and not ticket.has_left for ticket in tickets]


def test_calls_of_different_ranks_run_at_the_same_time():
    queue = RankQueue(3)
    first, second, third = enter(queue, 0), enter(queue, 1, 2), enter(queue, 2)
    assert granted(first, second, third) == [True, True, False]
    queue.leave(second)
    assert granted(third) == [True]


def test_a_call_does_not_overtake_one_that_waits_for_its_rank():
    queue = RankQueue(3)
    first, all_ranks, later = enter(queue, 0), enter(queue, 0, 1, 2), enter(queue, 1)
    assert granted(all_ranks, later) == [False, False]
    queue.leave(first)
    assert granted(all_ranks, later) == [True, False]
    queue.leave(all_ranks)
    assert granted(later) == [True]


def test_a_call_that_leaves_before_it_begins():
    queue = RankQueue(2)
    first, second, third = enter(queue, 0), enter(queue, 0, 1), enter(queue, 1)
    queue.leave(second)
    queue.leave(second)
    assert granted(first, second, third) == [True, False, True]


def test_calls_that_step_back_keep_their_places():
    queue = RankQueue(3)
    first, second, third, later = enter(queue, 0), enter(queue, 1), enter(queue, 2), enter(queue, 0, 1)
    all_ranks = Ticket(range(3))
    queue.step_back(first, all_ranks)
    queue.step_back(second, all_ranks)
    assert granted(first, second, third, all_ranks, later) == [False, False, True, False, False]
    queue.leave(third)
    assert granted(first, second, all_ranks) == [False, False, True]
    queue.leave(all_ranks)
    assert granted(first, second, later) == [True, True, False]


def test_a_thread_that_waits_for_a_ticket_that_leaves():
    queue = RankQueue(1)
    first, second = enter(queue, 0), enter(queue, 0)
    queue.leave(second)
    assert not second.wait()
    assert first.wait()


def test_a_call_that_has_left_may_step_back():
    """Another thread has cancelled the call. The thread of the call must not wait for ever."""
    queue = RankQueue(2)
    cancelled, all_ranks = enter(queue, 0), Ticket(range(2))
    queue.leave(cancelled)
    queue.step_back(cancelled, all_ranks)
    assert cancelled.is_granted.is_set()
    assert not cancelled.wait()
    assert granted(all_ranks) == [True]


def test_a_signal_handler_may_cancel_a_call():
    queue = RankQueue(1)
    first, second = enter(queue, 0), enter(queue, 0)
    with queue._lock:  # a handler runs in the thread that has the lock
        queue.leave(second)
    queue.leave(first)
    assert granted(enter(queue, 0)) == [True]


def test_many_calls_cost_little():
    queue = RankQueue(2)
    tickets = [enter(queue, 0) for _ in range(20_000)]
    began = time.process_time()
    for ticket in reversed(tickets):
        queue.leave(ticket)
    assert time.process_time() - began < 2.0


def test_an_exception_does_not_lose_a_start():
    """Ctrl-C may come in the thread that has just made the ranks free for another call."""
    queue, starts = RankQueue(1), []

    def start():
        starts.append("start")
        if len(starts) == 1:
            raise KeyboardInterrupt

    first, second = enter(queue, 0), Ticket([0], start)
    queue.enter(second)
    with pytest.raises(KeyboardInterrupt):
        queue.leave(first)
    queue.leave(first)
    queue.leave(first)
    assert starts == ["start", "start"]


@hypothesis.given(st.lists(st.one_of(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 9))))
def test_any_order_of_calls(steps):
    """A set enters the queue; a number ends the call, or cancels it."""
    queue, tickets = RankQueue(4), []
    for step in steps:
        if isinstance(step, int):
            if tickets:
                queue.leave(tickets.pop(step % len(tickets)))
        else:
            tickets.append(enter(queue, *step))
        for index, ticket in enumerate(tickets):
            earlier = [other for other in tickets[:index] if set(other.ranks) & set(ticket.ranks)]
            assert ticket.is_granted.is_set() == (not earlier)
