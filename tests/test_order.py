"""Who was first, when everything is heard of at once: the gate's order, and what it says of deaths."""

import os

from mpwatch import Worker
from mpwatch.watcher.diagnosis.death_order import DeathClock
from mpwatch.watcher.diagnosis.observations import RankObservations
from mpwatch.watcher.processes.selector import Selector


def test_the_gate_tells_in_the_order_in_which_they_became_ready():
    pipes = [os.pipe() for _ in range(8)]
    with Selector() as gate:
        for number, (read_end, _) in enumerate(pipes):
            gate.add(read_end, lambda number=number: number)
        for number in (3, 7, 0, 5):
            os.write(pipes[number][1], b"x")
        assert [handler() for handler in gate.wait(0)] == [3, 7, 0, 5]
        gate.remove(pipes[7][0])
        assert {handler() for handler in gate.wait(0)} == {3, 0, 5}
    for fds in pipes:
        for fd in fds:
            os.close(fd)


def test_the_gate_waits_no_longer_than_it_is_told():
    with Selector() as gate:
        assert gate.wait(0) == []
        assert gate.wait(-1) == []


def rank():
    ranks = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "role_rank": 0, "role_world_size": 1}
    return RankObservations(Worker(**ranks, run_id="test", master_addr="localhost", master_port=1))


def test_a_death_is_before_what_is_heard_after_it_and_after_what_was_heard_before_it():
    order, first, second = DeathClock(), rank(), rank()
    order.start_wakeup()
    order.record_message(3.0)
    order.record_death(first)
    order.record_message(5.0)
    order.record_death(second)
    order.record_message(4.0)  # was on its way for a while
    assert 3.0 <= first.died_at < 4.0
    assert second.died_at == 5.0
    order.start_wakeup()
    order.record_message(1.0)
    assert first.died_at >= 3.0


def test_the_death_of_a_rank_that_was_told_to_stop_is_no_earlier_than_that():
    """Another one had raised before, and was slow to say so."""
    order, stopped = DeathClock(), rank()
    stopped.first_signal_at = 4.0
    order.record_death(stopped)
    order.record_message(3.0)
    assert stopped.died_at == 4.0
