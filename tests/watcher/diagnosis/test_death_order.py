"""The order of events that the watcher notices in one wake-up: the selector's clock, and the times of deaths."""

import os

from mpwatch import Worker
from mpwatch.watcher.diagnosis.death_order import DeathClock
from mpwatch.watcher.diagnosis.observations import RankObservations
from mpwatch.watcher.processes.selector import Selector


def test_the_selector_returns_descriptors_in_the_order_in_which_they_became_ready():
    pipes = [os.pipe() for _ in range(8)]
    with Selector() as selector:
        for number, (read_end, _) in enumerate(pipes):
            selector.add(read_end, lambda number=number: number)
        for number in (3, 7, 0, 5):
            os.write(pipes[number][1], b"x")
        assert [handler() for handler in selector.wait(0)] == [3, 7, 0, 5]
        selector.remove(pipes[7][0])
        assert {handler() for handler in selector.wait(0)} == {3, 0, 5}
    for fds in pipes:
        for fd in fds:
            os.close(fd)


def test_the_selector_does_not_wait_longer_than_asked():
    with Selector() as selector:
        assert selector.wait(0) == []
        assert selector.wait(-1) == []


def observe_rank():
    ranks = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "role_rank": 0, "role_world_size": 1}
    return RankObservations(Worker(**ranks, run_id="test", master_addr="localhost", master_port=1))


def test_a_death_is_between_the_messages_read_before_and_after_it():
    clock, first, second = DeathClock(), observe_rank(), observe_rank()
    clock.record_message(3.0)
    clock.record_death(first)
    clock.record_message(5.0)
    clock.record_death(second)
    clock.record_message(4.0)  # arrives late
    assert 3.0 <= first.died_at < 4.0
    assert second.died_at == 5.0


def test_a_rank_seen_to_be_dying_died_before_the_messages_read_after_it():
    clock, rank = DeathClock(), observe_rank()
    clock.record_dying(rank)
    clock.record_message(5.0)
    assert rank.died_at < 5.0
    assert not rank.has_exited


def test_a_message_long_after_its_time_stamp_moves_no_death_of_an_earlier_wakeup():
    """As after a prompt of a debugger, at which the exception waits."""
    clock, earlier, now = DeathClock(), observe_rank(), observe_rank()
    clock.record_death(earlier)
    noticed_at = earlier.died_at
    clock.start_wakeup()
    clock.record_death(now)
    clock.record_message(1.0)
    assert earlier.died_at == noticed_at
    assert now.died_at < 1.0


def test_the_death_of_a_stopped_rank_is_not_before_the_first_signal():
    """Another rank had raised before, and its message arrives late."""
    clock, stopped = DeathClock(), observe_rank()
    stopped.first_signal_at = 4.0
    clock.record_death(stopped)
    clock.record_message(3.0)
    assert stopped.died_at == 4.0
