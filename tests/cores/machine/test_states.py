"""The table of the states of a run, and its diagram in ARCHITECTURE.md."""

from pathlib import Path

import pytest

from mpwatch import WorkerState
from mpwatch.results.state_transitions import ENDS, TRANSITIONS, check_transition, draw_diagram

ARCHITECTURE = Path(__file__).parents[3] / "ARCHITECTURE.md"


def test_architecture_shows_the_table():
    assert f"```mermaid\n{draw_diagram()}\n```\n" in ARCHITECTURE.read_text()


def find_reachable(*reached):
    for _ in WorkerState:
        reached = {*reached, *(after for before in reached for after in TRANSITIONS[before])}
    return reached


def test_every_state_is_reachable_and_leads_to_a_final_state():
    assert find_reachable(WorkerState.UNKNOWN) == set(WorkerState) == set(TRANSITIONS)
    assert all(find_reachable(state) & set(ENDS) for state in WorkerState)
    assert [state for state, afters in TRANSITIONS.items() if not afters] == list(ENDS)
    assert {state for state in WorkerState if state.is_running} == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


def test_only_the_changes_in_the_table_are_possible():
    check_transition(WorkerState.INIT, WorkerState.HEALTHY)
    with pytest.raises(ValueError, match="does not change from SUCCEEDED to INIT"):
        check_transition(WorkerState.SUCCEEDED, WorkerState.INIT)
