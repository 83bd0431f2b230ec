"""Thirty small faults for check.py: each changes one decision of the state machine, diagnosis, stop sequence, payload or codecs."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """Replace `old`, which occurs once in the file, by `new`."""

    file: str  # in mpwatch/
    old: str
    new: str


MACHINE, TRANSITIONS = "watcher/machine/state_machine.py", "watcher/machine/transitions.py"
HEARTBEATS = "watcher/machine/heartbeats.py"
DIAGNOSE, FAILURES = "watcher/diagnosis/diagnose.py", "watcher/diagnosis/failures.py"
STRAGGLERS, PEER_ERRORS = "watcher/diagnosis/stragglers.py", "watcher/diagnosis/peer_errors.py"
BUDGET, PROCESS = "watcher/restarts/restart_budget.py", "watcher/processes/process.py"
EVENT_LOOP = "watcher/event_loop.py"
CALL_PAYLOAD, PICKLE_BUFFERS = "wire/pickling/call_payload.py", "wire/pickling/pickle_buffers.py"
MESSAGES, RETURN_VALUES = "wire/messages.py", "wire/pickling/return_values.py"
JSON_CODEC, SIGNED_JSON = "multinode/protocol/json_codec.py", "multinode/protocol/signed_json.py"

HANGS = "watcher/diagnosis/test_hangs.py::test_the_rank_outside_of_the_collective_is_blamed"
# The tests that should find a fault in a file. Most start no process. Those of the event loop start a run, and those of
# process.py start a rank.
TESTED_BY = {
    MACHINE: ["watcher/machine/test_state_machine.py", "watcher/machine/test_restart_histories.py"],
    TRANSITIONS: ["watcher/machine/test_state_machine.py"],
    HEARTBEATS: ["watcher/machine/test_heartbeats.py"],
    DIAGNOSE: ["watcher/diagnosis/test_diagnose.py", HANGS],
    FAILURES: ["watcher/diagnosis/test_diagnose.py"],
    STRAGGLERS: [HANGS],
    PEER_ERRORS: ["watcher/diagnosis/test_peer_errors.py"],
    BUDGET: ["watcher/restarts/test_restart_budget.py"],
    PROCESS: ["watcher/processes/test_process.py"],
    EVENT_LOOP: ["watcher/diagnosis/test_failures.py::test_the_first_failure_is_reported"],
    CALL_PAYLOAD: ["wire/pickling/test_return_values.py"],
    PICKLE_BUFFERS: ["wire/pickling/test_return_values.py"],
    MESSAGES: ["wire/test_messages.py"],
    RETURN_VALUES: ["wire/pickling/test_return_values.py"],
    JSON_CODEC: ["multinode/protocol/test_json_codec.py"],
    SIGNED_JSON: ["multinode/protocol/test_signed_json.py"],
}

MUTATIONS = [
    # the state machine
    Mutation(MACHINE, "if not is_secondary and not self._keep_ranks:", "if not self._keep_ranks:"),
    Mutation(MACHINE, "if event.generation < self.generation:", "if event.generation < self.generation - 1:"),
    Mutation(MACHINE, "timeout_at = self._timeout_at  #", "timeout_at = math.inf  #"),
    Mutation(MACHINE, "self._decide_after and self.signum is None:", "self._decide_after:"),
    Mutation(MACHINE, "self.overdue_exits = self.phase_table.ranks_in(RankPhase.EXITING)", "self.overdue_exits = []"),
    Mutation(MACHINE, "if now >= self._lease_deadline:", "if now > self._lease_deadline + 1:"),
    Mutation(TRANSITIONS, "RankPhase.RETURNED: {StackDumped: None, Exited", "RankPhase.RETURNED: {Exited"),
    Mutation(HEARTBEATS, "if silent_at <= now:", "if late_at <= now:"),
    Mutation(HEARTBEATS, "if self.silent_ranks and self._is_second_reading:", "if self.silent_ranks:"),
    Mutation(HEARTBEATS, "was_suspended = is_excusable and now > self.due_at + SUSPENDED_SECONDS", "was_suspended = False"),
    Mutation(HEARTBEATS, "self._patience /= 2 if was_suspended else 1", "pass"),
    # stopping ranks
    Mutation(
        MACHINE,
        "self.stopped_at = now if self.stopped_at is None else self.stopped_at",
        "self.stopped_at = now",
    ),
    Mutation(
        MACHINE,
        "self._abandon() if self.phase_table.counts[RankPhase.KILLED] else self._kill(now)",
        "self._kill(now)",
    ),
    Mutation(
        MACHINE,
        "actions += [m.SendSignal(rank, signum), m.SendSignal(rank, signal.SIGCONT)]",
        "actions += [m.SendSignal(rank, signum)]",
    ),
    Mutation(PROCESS, "os.killpg(self.pid, number)", "os.kill(self.pid, number)"),
    Mutation(PROCESS, "self._signal_group(signal.SIGKILL)", "pass"),
    Mutation(EVENT_LOOP, "observed.signals_sent.add(action.signum)", "pass"),
    # diagnosis and restarts
    Mutation(DIAGNOSE, "at - lag), failure.is_secondary, at", "at - lag), False, at"),
    Mutation(DIAGNOSE, "lag = 0.0 if _was_reported(failure) else DEATH_LAG_SECONDS", "lag = 0.0"),
    Mutation(DIAGNOSE, "find_cause_of_silence(running, silent) or silent", "silent"),
    Mutation(FAILURES, "return (code & 0xFF) or 1 if", "return (code & 0xFF) if"),
    Mutation(FAILURES, "number > 0 and number not in observed.signals_sent and", "number > 0 and"),
    Mutation(STRAGGLERS, "count > len(inside) - count and not POINT_TO_POINT", "count > 0 and not POINT_TO_POINT"),
    Mutation(PEER_ERRORS, "header.name.endswith(pattern.type_name)", "True"),
    Mutation(
        BUDGET, "self.counters.restarts_used >= policy.max_restarts", "self.counters.restarts_used > policy.max_restarts"
    ),
    # payload and codecs
    Mutation(
        CALL_PAYLOAD,
        "while new := {name: definition for name, definition in",
        "if new := {name: definition for name, definition in",
    ),
    Mutation(PICKLE_BUFFERS, "if buffers and data.readonly:", "if False:"),
    Mutation(MESSAGES, "if len(self._buffer) < end:", "if len(self._buffer) < HEADER.size:"),
    Mutation(RETURN_VALUES, "if cls not in self.known:", "if True:"),
    Mutation(JSON_CODEC, "if unknown := data.keys() - set(names):", "if unknown := set():"),
    Mutation(SIGNED_JSON, "self._run_id, name.encode(), data)", "self._run_id, data)"),
]
