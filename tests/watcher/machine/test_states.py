"""The states of a group of ranks: the table, its diagram in ARCHITECTURE.md, and a late rank in a real run."""

from pathlib import Path

import pytest

import mpwatch
from mpwatch import WorkerState
from mpwatch.events import HeartbeatLate, StateChanged
from mpwatch.results.state_transitions import ENDS, TRANSITIONS, check_transition, draw_diagram
from support.process_state import SPAWN
from watcher.restarts import attempt_functions

ARCHITECTURE = Path(__file__).parents[3] / "ARCHITECTURE.md"
FIRST = WorkerState.UNKNOWN


def test_architecture_shows_the_table():
    assert f"```mermaid\n{draw_diagram()}\n```\n" in ARCHITECTURE.read_text()


def test_all_states_are_in_the_table():
    assert set(TRANSITIONS) == set(WorkerState)


def test_every_state_is_reachable_and_leads_to_a_final_state():
    reached, new = set(), {FIRST}
    while new:
        reached |= new
        new = {after for before in new for after in TRANSITIONS[before]} - reached
    assert reached == set(WorkerState)
    leading = set(ENDS)
    while more := {before for before, afters in TRANSITIONS.items() if leading & set(afters)} - leading:
        leading |= more
    assert leading == set(WorkerState)


def test_no_state_follows_a_final_state_or_leads_back_to_the_first():
    assert [state for state, afters in TRANSITIONS.items() if not afters] == list(ENDS)
    assert all(FIRST not in afters for afters in TRANSITIONS.values())
    assert all(before not in afters for before, afters in TRANSITIONS.items())


@pytest.mark.parametrize("before", list(WorkerState))
@pytest.mark.parametrize("after", list(WorkerState))
def test_no_other_change_is_possible(before, after):
    if after in TRANSITIONS[before]:
        check_transition(before, after)
    else:
        with pytest.raises(ValueError, match=f"does not change from {before.name} to {after.name}"):
            check_transition(before, after)


def test_the_states_that_are_running():
    assert {state for state in WorkerState if state.is_running} == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


def test_a_late_rank_makes_the_group_unhealthy_until_its_next_heartbeat():
    was_noticed, next_was_noticed = SPAWN.Event(), SPAWN.Event()
    seen = []

    def observe(event):
        seen.append(event)
        if isinstance(event, StateChanged):
            if event.after is WorkerState.UNHEALTHY:
                was_noticed.set()
            if event.before is WorkerState.UNHEALTHY:
                next_was_noticed.set()

    result = mpwatch.run(
        attempt_functions.has_a_late_heartbeat_once,
        2,
        args=(was_noticed, next_was_noticed),
        heartbeat_timeout=3.0,
        on_event=observe,
    )
    assert list(result) == [True, True]
    late = next(event for event in seen if isinstance(event, HeartbeatLate))
    assert (late.ranks, late.heartbeat_timeout) == ((1,), 3.0)
    assert 1.5 <= late.silent_seconds < 3.0
    states = [event.after.name for event in seen if isinstance(event, StateChanged)]
    assert states == ["INIT", "HEALTHY", "UNHEALTHY", "HEALTHY", "SUCCEEDED"]


def test_a_late_rank_that_stays_silent_has_failed():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(attempt_functions.stops_its_heartbeats, 2, heartbeat_timeout=0.5)
    events = caught.value.result.events
    late = [event for event in events if isinstance(event, HeartbeatLate)]
    assert sorted(event.ranks for event in late) == [(0,), (1,)]
    assert caught.value.root_cause.kind is mpwatch.FailureKind.HANG
    states = [event.after.name for event in events if isinstance(event, StateChanged)]
    assert states == ["INIT", "HEALTHY", "UNHEALTHY", "FAILED"]


def test_a_silent_rank_is_restarted():
    policy = mpwatch.RestartPolicy(1, retry_if=mpwatch.FailureKind.HANG)
    result = mpwatch.run(attempt_functions.stops_its_heartbeats, 2, args=(1,), heartbeat_timeout=0.5, max_restarts=policy)
    assert list(result) == [1, 1]
    assert result.attempts[0].root_cause.kind is mpwatch.FailureKind.HANG
