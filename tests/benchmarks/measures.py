"""What is measured, with which launchers, and what is to be reached: data alone.

A goal compares mpwatch's figure with another launcher's of the same measure, or, if it is against nobody, with a number.
A figure without a unit is itself a ratio, of two figures of the same launcher in the same program.
"floor" stands for the least that it can cost: see launchers.py.
"""

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["FIGURES", "MEASURES", "OURS", "Goal", "Measure"]

OURS = "mpwatch"
LAUNCHERS = (OURS, "mp_spawn", "elastic", "torchrunx", "executor")
RETURNING = (OURS, "elastic", "torchrunx", "executor")  # mp.spawn has no way back for a value
WATCHING = (OURS, "mp_spawn", "elastic", "torchrunx")  # the executor's other workers work on when one fails
STAYING = (OURS, "executor", "ray")

FIGURES = {  # what each is, and its unit
    "entered": ("call -> the last rank is in the function", "s"),
    "read": ("call -> the last byte has been read at the other end", "s"),
    "whole": ("the whole call", "s"),
    "peak": ("the most memory that the calling process had", "MB"),
    "noticed": ("failure -> exception in the caller", "s"),
    "stopped": ("failure -> the last rank of all nodes is dead", "s"),
    "again": ("failure -> the last rank is in the function again", "s"),
    "again_by_entered": ("the second of these by the first", ""),
    "call": ("one call, median of the calls of a round", "s"),
    "slope": ("the whole call, per rank more", "s"),
    "burnt": ("CPU time of the calling process, in an hour of waiting", "s"),
    "shown": ("first line at the reader -> the last one", "s"),
    "faults": ("lines not shown whole, once and in order", "lines"),
    "report": ("one report(), mean of all", "s"),
    "heartbeat": ("one heartbeat(), mean of all", "s"),
}


@dataclass(frozen=True, kw_only=True)
class Goal:
    figure: str
    at_most: float
    against: str | None = None  # then at_most is a ratio


@dataclass(frozen=True, kw_only=True)
class Measure:
    says: str
    task: str  # a function of tasks.py
    launchers: tuple[str, ...]
    figures: tuple[str, ...]
    goals: tuple[Goal, ...] = ()
    ranks: tuple[int, ...] = (4,)
    way: str = "launch"  # a function of measuring.py
    program: str = "program.py"  # the script that makes the call
    needs: tuple[str, ...] = ()  # what the script has imported before it makes the call
    argument_mb: int = 0  # an array of so many 10**6 bytes
    calls: int = 0  # of a warm group
    seconds: float = 0.0  # to be idle for
    lines: int = 0  # that each rank prints
    options: tuple[tuple[str, object], ...] = ()  # what else mpwatch is given
    least_nodes: int = 2  # of two, each with so many ranks
    node_timeout: int | None = None  # seconds without a sign of life after which a node is lost; None: each launcher's own
    cap: float = math.inf  # seconds: what takes longer counts as having taken that long
    timeout: float = 120.0  # of one program; then it is killed, and has failed


def _against(figure: str, **ratios: float) -> tuple[Goal, ...]:
    return tuple(Goal(figure=figure, at_most=ratio, against=launcher) for launcher, ratio in ratios.items())


_TEE: dict[str, Any] = {
    "launchers": (OURS, "elastic"),
    "figures": ("shown", "faults", "peak"),
    "ranks": (8,),
    "goals": (
        *_against("shown", elastic=0.2),
        Goal(figure="peak", at_most=64.0),
    ),
    "way": "tee",
    "lines": 500_000,
}
_REPORT: dict[str, Any] = {
    "launchers": (OURS,),
    "figures": ("report", "heartbeat"),
    "ranks": (1,),
    "goals": (Goal(figure="report", at_most=5e-6), Goal(figure="heartbeat", at_most=1e-6)),
    "way": "report",
}
_NODES: dict[str, Any] = {
    "launchers": (OURS, "elastic"),
    "cap": 60.0,
}
_FAILURE_ON_NODES: dict[str, Any] = {
    **_NODES,
    "way": "nodes_failure",
    "figures": ("stopped",),
}
_LOSS_OF_NODE: dict[str, Any] = {
    **_NODES,
    "way": "nodes_loss",
    "figures": ("again",),
    "least_nodes": 1,
}

MEASURES = {
    "start": Measure(
        says="8 ranks, a function without torch",
        task="enter",
        launchers=(OURS, "floor", *LAUNCHERS[1:]),
        figures=("entered",),
        ranks=(8,),
        goals=_against("entered", floor=1.3, mp_spawn=0.1),
    ),
    "start_torch": Measure(
        says="4 ranks, a function that imports torch first",
        task="enter_with_torch",
        launchers=LAUNCHERS,
        figures=("entered",),
        goals=_against("entered", mp_spawn=1.0),
    ),
    "heavy_main": Measure(
        says="8 ranks, a function without torch, called by a script with 2 s of imports that it does not need",
        task="enter",
        launchers=LAUNCHERS,
        figures=("entered",),
        ranks=(8,),
        program="heavy_program.py",
        goals=_against("entered", mp_spawn=0.3),
    ),
    "args": Measure(
        says="4 ranks, a 256 MB array as argument",
        task="take",
        launchers=LAUNCHERS,
        figures=("entered", "read", "peak"),
        needs=("numpy",),
        argument_mb=256,
        timeout=240,
        goals=(*_against("entered", mp_spawn=0.08, executor=0.2), *_against("peak", mp_spawn=0.6)),
    ),
    "result": Measure(
        says="4 ranks, each returns a 64 MB array",
        task="give",
        launchers=RETURNING,
        figures=("whole", "read"),
        needs=("numpy",),
        goals=_against("whole", elastic=0.15, executor=0.5),
    ),
    "result_tensor": Measure(
        says="4 ranks, each returns a 64 MB tensor",
        task="give_tensor",
        launchers=RETURNING,
        figures=("whole", "read"),
        needs=("numpy", "torch"),
        goals=_against("whole", elastic=0.6),
    ),
    "raise": Measure(
        says="8 ranks, one raises, the others sleep",
        task="fail_by_raising",
        launchers=WATCHING,
        figures=("noticed",),
        ranks=(8,),
        way="failure",
        timeout=40,
        goals=_against("noticed", elastic=0.05, mp_spawn=0.3),
    ),
    "sigkill": Measure(
        says="8 ranks, one is killed, the others sleep",
        task="fail_by_sigkill",
        launchers=WATCHING,
        figures=("noticed",),
        ranks=(8,),
        way="failure",
        timeout=40,
        goals=_against("noticed", elastic=0.05),
    ),
    "restart": Measure(
        says="8 ranks, a function without torch; one is killed, the others sleep, and all are started again, once",
        task="die_once",
        launchers=(OURS, "elastic"),  # the others do not
        figures=("entered", "again", "again_by_entered"),
        ranks=(8,),
        way="restart",
        goals=(Goal(figure="again_by_entered", at_most=1.5), *_against("again", elastic=0.2)),
    ),
    "warm": Measure(
        says="4 warm ranks, a call of a no-op",
        task="nothing",
        launchers=(OURS, "floor", *STAYING[1:]),
        figures=("call",),
        way="warm",
        calls=200,
        goals=_against("call", executor=0.7, ray=0.2),
    ),
    "warm_args": Measure(
        says="4 warm ranks, a call with a 256 MB array",
        task="last_of",
        launchers=STAYING,
        figures=("call",),
        way="warm",
        needs=("numpy",),
        argument_mb=256,
        calls=3,
        goals=_against("call", executor=0.15),
    ),
    "scaling": Measure(
        says="2 to 256 ranks, a no-op",
        task="nothing",
        launchers=(OURS, "floor"),
        figures=("slope",),
        ranks=(2, 4, 8, 16, 32, 64, 128, 256),
        goals=_against("slope", floor=1.3),
    ),
    "idle": Measure(
        says="4 ranks that sleep for 20 s",
        task="look_at_caller",
        launchers=WATCHING,
        figures=("burnt",),
        way="idle",
        seconds=20.0,
        goals=(Goal(figure="burnt", at_most=0.1),),
    ),
    "tee": Measure(
        says="8 ranks, each prints 500,000 lines of 100 bytes, one by one, into a file and, prefixed, to the caller's stdout",
        task="print_lines",
        **_TEE,
    ),
    "tee_blocks": Measure(
        says="the same, printed a thousand lines at a time, so that the ranks are no brake",
        task="print_blocks",
        **_TEE,
    ),
    "report": Measure(
        says="1 rank, 200,000 calls of report() and as many of heartbeat()",
        task="report_often",
        **_REPORT,
    ),
    "report_live": Measure(
        says="the same with the live view",
        task="report_often",
        options=(("progress", True),),
        **_REPORT,
    ),
    "nodes_start": Measure(
        says="2 nodes with 4 ranks each, a function without torch",
        task="enter",
        way="nodes_start",
        figures=("entered",),
        goals=_against("entered", elastic=0.2),
        **_NODES,
    ),
    "nodes_failure": Measure(
        says="2 nodes with 4 ranks each, one raises, the others sleep",
        task="fail",
        goals=_against("stopped", elastic=0.01),
        **_FAILURE_ON_NODES,
    ),
    "nodes_failure_collective": Measure(
        says="the same, but the others are in a collective",
        task="fail_in_collective",
        goals=_against("stopped", elastic=0.2),
        **_FAILURE_ON_NODES,
    ),
    "nodes_loss": Measure(
        says="2 nodes with 4 ranks each, one is killed with its ranks, the others sleep; it is lost after 2 s",
        task="lose",
        node_timeout=2,
        goals=_against("again", elastic=0.1),
        **_LOSS_OF_NODE,
    ),
    "nodes_loss_collective": Measure(
        says="the same, but the others are in a collective",
        task="lose_in_collective",
        node_timeout=2,
        goals=_against("again", elastic=0.5),
        **_LOSS_OF_NODE,
    ),
    "nodes_loss_default": Measure(
        says="the same, in a collective, and it is lost after as long as each launcher takes by default",
        task="lose_in_collective",
        goals=_against("again", elastic=0.5),
        **_LOSS_OF_NODE,
    ),
}
