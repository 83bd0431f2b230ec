"""The table of the states of a run, and its diagram in ARCHITECTURE.md."""

from pathlib import Path

from cores.machine.state_transitions import ENDS, TRANSITIONS, draw_diagram
from mpwatch import WorkerState

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
