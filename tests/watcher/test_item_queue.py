"""ItemQueue: which items a rank gets next. Pure histories."""

import itertools

import pytest

from mpwatch import FailureKind, ProcessFailure, RestartPolicy
from mpwatch.watcher.item_queue import CHUNK_SECONDS, MAX_CHUNKSIZE, ItemQueue
from mpwatch.watcher.restarts.restart_budget import FailedAttempt

NO_END = 1 << 62


def make_queue(items=range(10), *, chunksize=None, policy=None):
    return ItemQueue(items, chunksize=chunksize, policy=policy or RestartPolicy(0))


def take(queue, now=0.0, end=NO_END):
    return [task.index for task in queue.take_chunk(now, end)]


def make_failed_attempt(exception=None):
    kind = FailureKind.SIGNAL if exception is None else FailureKind.EXCEPTION
    failure = ProcessFailure(rank=0, local_rank=0, pid=1, hostname="host", kind=kind, exit_code=1, exception=exception)
    return FailedAttempt(cause=failure)


def test_chunks_have_the_given_size_and_keep_the_order():
    queue = make_queue(range(5), chunksize=2)
    assert [take(queue) for _ in range(4)] == [[0, 1], [2, 3], [4], []]
    assert queue.is_exhausted


def test_items_are_taken_only_as_far_as_ranks_need_them():
    taken = []
    items = (taken.append(number) or number for number in itertools.count())
    queue = make_queue(items, chunksize=3)
    take(queue)
    assert taken == [0, 1, 2]


def test_no_new_item_is_taken_from_the_end_on():
    queue = make_queue(chunksize=4)
    assert take(queue, end=3) == [0, 1, 2]
    assert take(queue, end=3) == []
    assert not queue.is_exhausted
    assert take(queue, end=4) == [3]


def test_items_that_were_put_back_come_next_and_in_their_order():
    queue = make_queue(chunksize=3)
    chunk = queue.take_chunk(0.0, NO_END)
    queue.put_back(chunk[1:])
    assert queue.has_waiting
    assert [take(queue), take(queue)] == [[1, 2], [3, 4, 5]]


def test_items_that_were_put_back_are_taken_beyond_the_end():
    queue = make_queue(chunksize=3)
    queue.put_back(queue.take_chunk(0.0, NO_END))
    assert take(queue, end=0) == [0, 1, 2]


def test_items_that_must_be_sent_alone():
    queue = make_queue(chunksize=3)
    queue.put_back(queue.take_chunk(0.0, NO_END), singly=True)
    assert [take(queue) for _ in range(4)] == [[0], [1], [2], [3, 4, 5]]


def test_without_a_chunksize_a_chunk_takes_about_the_same_time():
    queue = make_queue(itertools.count())
    sizes = []
    for _ in range(10):
        size = len(take(queue))
        sizes.append(size)
        queue.add_duration(size, size * CHUNK_SECONDS / 16)
    assert sizes == [1, 2, 4, 8, 16, 16, 16, 16, 16, 16]
    queue.add_duration(16, 160.0)
    assert len(take(queue)) == 1


def test_a_chunk_of_items_that_take_no_time_is_bounded():
    queue = make_queue(itertools.count())
    for _ in range(20):
        queue.add_duration(len(take(queue)), 0.0)
    assert len(take(queue)) == MAX_CHUNKSIZE


@pytest.mark.parametrize(("seconds", "may_prefetch"), [(CHUNK_SECONDS, True), (10 * CHUNK_SECONDS, False)])
def test_a_rank_gets_a_second_chunk_only_if_chunks_are_short(seconds, may_prefetch):
    queue = make_queue(chunksize=1)
    assert not queue.may_prefetch
    queue.add_duration(1, seconds)
    assert queue.may_prefetch is may_prefetch


def test_a_failed_item_is_tried_again_after_its_delay_and_before_others():
    queue = make_queue(chunksize=1, policy=RestartPolicy(2, delay=5.0, jitter=0.0))
    (task,) = queue.take_chunk(0.0, NO_END)
    assert queue.fail(task, make_failed_attempt(), now=100.0).delay == 5.0
    assert queue.due_at == 105.0
    assert take(queue, now=104.0) == [1]
    assert queue.take_chunk(105.0, NO_END) == [task]
    assert task.attempts == 1
    assert queue.fail(task, make_failed_attempt(), now=105.0).delay == 10.0
    assert queue.take_chunk(115.0, NO_END) == [task]
    decision = queue.fail(task, make_failed_attempt(), now=115.0)
    assert (decision.delay, decision.no_restart_reason) == (None, "all restarts are used up (max_restarts=2)")
    assert not queue.has_waiting


def test_each_item_has_its_own_restarts():
    queue = make_queue(chunksize=1, policy=RestartPolicy(1))
    first, second = queue.take_chunk(0.0, NO_END) + queue.take_chunk(0.0, NO_END)
    assert [queue.fail(task, make_failed_attempt(), 0.0).delay for task in (first, second, first)] == [0.0, 0.0, None]


def test_retry_if_decides():
    queue = make_queue(chunksize=1, policy=RestartPolicy(1, retry_if=OSError))
    first, second = queue.take_chunk(0.0, NO_END) + queue.take_chunk(0.0, NO_END)
    assert queue.fail(first, make_failed_attempt(FileNotFoundError()), 0.0).delay == 0.0
    assert "`retry_if`" in queue.fail(second, make_failed_attempt(ValueError()), 0.0).no_restart_reason
