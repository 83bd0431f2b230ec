"""How ranks and the watcher agree on a step at which all ranks stop, without processes."""

import os
import threading
from contextlib import contextmanager
from tempfile import TemporaryFile

from hypothesis import given
from hypothesis import strategies as st

from mpwatch.wire.shared_memory import SLOT_SIZE, RankSlot, Slot


@contextmanager
def make_ranks(count):
    """Yield what each rank uses, and the watcher's Slot of each rank."""
    with TemporaryFile(buffering=0) as file:
        file.truncate(SLOT_SIZE * count)
        slots = [Slot(file.fileno(), rank) for rank in range(count)]
        for slot in slots:
            slot.clear()
        yield [RankSlot(os.dup(file.fileno()), rank).steps for rank in range(count)], slots


def agree(slots):
    """Do what the watcher does. Return the step after which all ranks stop."""
    for slot in slots:
        slot.hold_steps()
    passed = [slot.read_passed_step() for slot in slots]
    highest = max((step for step in passed if step is not None), default=None)
    for slot in slots:
        slot.agree_on_step(highest)
    return highest


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 7))
def test_all_ranks_stop_at_the_first_step_that_none_has_passed(counts, stride):
    """Each rank has asked so many times when the request comes. `stride` is the distance of two steps."""
    with make_ranks(len(counts)) as (readers, slots):
        for reader, count in zip(readers, counts, strict=True):
            assert not any(reader.should_stop(number * stride) for number in range(count))
        agree(slots)
        first_step = max(counts) * stride
        for reader, count in zip(readers, counts, strict=True):
            answers = {number * stride: reader.should_stop(number * stride) for number in range(count, max(counts) + 2)}
            assert answers == {step: step >= first_step for step in answers}
        assert {slot.read_stopped_step() for slot in slots} == {first_step}


def test_a_rank_waits_until_the_step_is_agreed_on():
    with make_ranks(1) as ((reader,), (slot,)):
        assert not reader.should_stop(3)
        slot.hold_steps()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(reader.should_stop(4)))
        thread.start()
        while slot.read_passed_step() != 3:  # it has asked about step 4, and takes that back
            os.sched_yield()
        assert answers == []
        slot.agree_on_step(7)
        thread.join()
        assert (answers, slot.read_passed_step()) == ([False], 4)


def test_a_lower_step_begins_a_new_round():
    """As in the second epoch of a training. Both ranks have done four steps of the first epoch."""
    with make_ranks(2) as ((first, second), slots):
        assert not any(first.should_stop(step) for step in (0, 1, 1, 2, 3, 0, 1))
        assert not any(second.should_stop(step) for step in (0, 1, 2, 3))
        assert agree(slots) == 5  # the second step of the second epoch
        assert [second.should_stop(step) for step in (0, 1, 2)] == [False, False, True]
        assert first.should_stop(2)
        assert {slot.read_stopped_step() for slot in slots} == {2}


def test_a_round_that_begins_while_the_ranks_are_held_has_not_begun():
    with make_ranks(1) as ((reader,), slots):
        assert not any(reader.should_stop(step) for step in (5, 6))
        assert agree(slots) == 6
        assert reader.should_stop(5)
        assert slots[0].read_passed_step() == 6
