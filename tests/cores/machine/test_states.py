"""The diagram of the states of a run in ARCHITECTURE.md. test_any_history.py compares it with the machine."""

from cores.machine.state_transitions import ARROWS, TRANSITIONS
from mpwatch import WorkerState


def find_reachable(*reached):
    for _ in WorkerState:
        reached = {*reached, *(after for before in reached for after in TRANSITIONS[before])}
    return reached


def test_every_state_is_reachable_and_leads_to_a_final_state():
    assert ("[*]", WorkerState.UNKNOWN.name) in ARROWS
    finals = {state for state in WorkerState if not TRANSITIONS[state]}
    assert finals == {WorkerState[name] for name, end in ARROWS if end == "[*]"}
    assert find_reachable(WorkerState.UNKNOWN) == set(WorkerState)
    assert all(find_reachable(state) & finals for state in WorkerState)
    assert {state for state in WorkerState if state.is_running} == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}
