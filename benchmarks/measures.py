"""The measures: what is measured, with which launchers, and the goals. This module contains only data.

A goal compares mpwatch's figure with another launcher's figure of the same measure. A goal without `against` compares it with
a number. A figure without a unit is a ratio of two figures of the same launcher in the same program.
The launcher "floor" has the least possible cost: see launchers.py.
"""

import math
from dataclasses import dataclass
from typing import Any

MPWATCH = "mpwatch"
LAUNCHERS = (MPWATCH, "mp_spawn", "elastic", "torchrunx", "executor")
RETURNING_LAUNCHERS = (MPWATCH, "elastic", "torchrunx", "executor")  # mp.spawn cannot return values
WATCHING_LAUNCHERS = (MPWATCH, "mp_spawn", "elastic", "torchrunx")  # the other workers of the executor go on when one fails
PERSISTENT_LAUNCHERS = (MPWATCH, "executor", "ray")

FIGURES = {  # name: description, unit
    "entered": ("the call -> all ranks have entered the function", "s"),
    "read": ("the call -> the receiver has read the last byte", "s"),
    "total": ("the time of the whole call", "s"),
    "peak": ("peak memory of the calling process", "MB"),
    "noticed": ("the failure -> the exception in the caller", "s"),
    "stopped": ("the failure -> the last rank of all nodes is dead", "s"),
    "restarted": ("the failure -> all restarted ranks have entered the function", "s"),
    "restart_ratio": ("restarted divided by entered", ""),
    "call": ("the median time of the calls in a round", "s"),
    "slope": ("the time of the whole call, for each additional rank", "s"),
    "cpu_per_hour": ("CPU time of the calling process in an hour of waiting", "s"),
    "shown": ("the first line that the reader process gets -> the last line that it gets", "s"),
    "wrong_lines": ("lines not shown completely, once and in order", "lines"),
    "report": ("one report(), mean of all", "s"),
    "heartbeat": ("one heartbeat(), mean of all", "s"),
}


@dataclass(frozen=True, kw_only=True)
class Goal:
    figure: str
    at_most: float
    against: str | None = None  # a launcher; then at_most is a ratio


@dataclass(frozen=True, kw_only=True)
class Measure:
    description: str
    task: str  # a function of tasks.py
    launchers: tuple[str, ...]
    figures: tuple[str, ...]
    goals: tuple[Goal, ...] = ()
    ranks: tuple[int, ...] = (4,)
    procedure: str = "launch"  # a function of measuring.py
    program: str = "program.py"  # the script that makes the call
    imports: tuple[str, ...] = ()  # modules that the script imports before the call
    argument_mb: int = 0  # the size of the array argument, in 10**6 bytes
    calls: int = 0  # of a warm group
    seconds: float = 0.0  # of idle time
    lines: int = 0  # printed by each rank
    options: tuple[tuple[str, object], ...] = ()  # further options of mpwatch
    min_nodes: int = 2  # of two nodes; `ranks` is the number on each
    node_timeout: int | None = None  # seconds without a heartbeat until a node is lost; None: the default of each launcher
    cap: float = math.inf  # seconds: the figure of a measurement that takes longer
    timeout: float = 120.0  # seconds for one program; then it is killed, and the measurement has failed


def _against(figure: str, **ratios: float) -> tuple[Goal, ...]:
    return tuple(Goal(figure=figure, at_most=ratio, against=launcher) for launcher, ratio in ratios.items())


_TEE_OPTIONS: dict[str, Any] = {
    "launchers": (MPWATCH, "elastic"),
    "figures": ("shown", "wrong_lines", "peak"),
    "ranks": (8,),
    "goals": (
        *_against("shown", elastic=0.2),
        Goal(figure="peak", at_most=64.0),
    ),
    "procedure": "tee",
    "lines": 500_000,
}
_REPORT_OPTIONS: dict[str, Any] = {
    "launchers": (MPWATCH,),
    "figures": ("report", "heartbeat"),
    "ranks": (1,),
    "goals": (Goal(figure="report", at_most=5e-6), Goal(figure="heartbeat", at_most=1e-6)),
    "procedure": "report",
}
_NODE_OPTIONS: dict[str, Any] = {
    "launchers": (MPWATCH, "elastic"),
    "cap": 60.0,
}
_NODE_FAILURE_OPTIONS: dict[str, Any] = {
    **_NODE_OPTIONS,
    "procedure": "nodes_failure",
    "figures": ("stopped",),
}
_NODE_LOSS_OPTIONS: dict[str, Any] = {
    **_NODE_OPTIONS,
    "procedure": "nodes_loss",
    "figures": ("restarted",),
    "min_nodes": 1,
}

MEASURES = {
    "start": Measure(
        description="8 ranks, a function without torch",
        task="enter",
        launchers=(MPWATCH, "floor", *LAUNCHERS[1:]),
        figures=("entered",),
        ranks=(8,),
        goals=_against("entered", floor=1.3, mp_spawn=0.1),
    ),
    "start_torch": Measure(
        description="4 ranks, a function that imports torch first",
        task="enter_with_torch",
        launchers=LAUNCHERS,
        figures=("entered",),
        goals=_against("entered", mp_spawn=1.0),
    ),
    "heavy_main": Measure(
        description="8 ranks, a function without torch, called by a script with 2 s of imports that it does not need",
        task="enter",
        launchers=LAUNCHERS,
        figures=("entered",),
        ranks=(8,),
        program="heavy_program.py",
        goals=_against("entered", mp_spawn=0.3),
    ),
    "args": Measure(
        description="4 ranks, a 256 MB array as argument",
        task="receive",
        launchers=LAUNCHERS,
        figures=("entered", "read", "peak"),
        imports=("numpy",),
        argument_mb=256,
        timeout=240,
        goals=(*_against("entered", mp_spawn=0.08, executor=0.2), *_against("peak", mp_spawn=0.6)),
    ),
    "result": Measure(
        description="4 ranks, each returns a 64 MB array",
        task="return_array",
        launchers=RETURNING_LAUNCHERS,
        figures=("total", "read"),
        imports=("numpy",),
        goals=_against("total", elastic=0.15, executor=0.5),
    ),
    "result_tensor": Measure(
        description="4 ranks, each returns a 64 MB tensor",
        task="return_tensor",
        launchers=RETURNING_LAUNCHERS,
        figures=("total", "read"),
        imports=("numpy", "torch"),
        goals=_against("total", elastic=0.6),
    ),
    "raise": Measure(
        description="8 ranks, one raises, the others sleep",
        task="fail_by_raising",
        launchers=WATCHING_LAUNCHERS,
        figures=("noticed",),
        ranks=(8,),
        procedure="failure",
        timeout=40,
        goals=_against("noticed", elastic=0.05, mp_spawn=0.3),
    ),
    "sigkill": Measure(
        description="8 ranks, one is killed, the others sleep",
        task="fail_by_sigkill",
        launchers=WATCHING_LAUNCHERS,
        figures=("noticed",),
        ranks=(8,),
        procedure="failure",
        timeout=40,
        goals=_against("noticed", elastic=0.05),
    ),
    "restart": Measure(
        description="8 ranks, a function without torch; one is killed, the others sleep, and all are restarted once",
        task="fail_once",
        launchers=(MPWATCH, "elastic"),  # the others do not restart ranks
        figures=("entered", "restarted", "restart_ratio"),
        ranks=(8,),
        procedure="restart",
        goals=(Goal(figure="restart_ratio", at_most=1.5), *_against("restarted", elastic=0.2)),
    ),
    "warm": Measure(
        description="4 warm ranks, a call of a no-op",
        task="do_nothing",
        launchers=(MPWATCH, "floor", *PERSISTENT_LAUNCHERS[1:]),
        figures=("call",),
        procedure="warm",
        calls=200,
        goals=_against("call", ray=1.0),
    ),
    "warm_args": Measure(
        description="4 warm ranks, a call with a 256 MB array",
        task="last_element",
        launchers=PERSISTENT_LAUNCHERS,
        figures=("call",),
        procedure="warm",
        imports=("numpy",),
        argument_mb=256,
        calls=3,
        goals=_against("call", executor=0.15),
    ),
    "scaling": Measure(
        description="2 to 256 ranks, a no-op",
        task="do_nothing",
        launchers=(MPWATCH, "floor"),
        figures=("slope",),
        ranks=(2, 4, 8, 16, 32, 64, 128, 256),
        goals=_against("slope", floor=1.3),
    ),
    "idle": Measure(
        description="4 ranks that sleep for 20 s",
        task="measure_caller_cpu",
        launchers=WATCHING_LAUNCHERS,
        figures=("cpu_per_hour",),
        procedure="idle",
        seconds=20.0,
        goals=(Goal(figure="cpu_per_hour", at_most=0.1),),
    ),
    "tee": Measure(
        description="8 ranks, each prints 500,000 lines of 100 bytes, one by one, into a file and, prefixed, to the caller's stdout",
        task="print_lines",
        **_TEE_OPTIONS,
    ),
    "tee_blocks": Measure(
        description="the same, printed a thousand lines at a time, so that the ranks do not limit the speed",
        task="print_blocks",
        **_TEE_OPTIONS,
    ),
    "report": Measure(
        description="1 rank, 200,000 calls of report() and as many of heartbeat()",
        task="report_often",
        **_REPORT_OPTIONS,
    ),
    "report_live": Measure(
        description="the same with the live view",
        task="report_often",
        options=(("progress", True),),
        **_REPORT_OPTIONS,
    ),
    "nodes_start": Measure(
        description="2 nodes with 4 ranks each, a function without torch",
        task="enter",
        procedure="nodes_start",
        figures=("entered",),
        goals=_against("entered", elastic=0.2),
        **_NODE_OPTIONS,
    ),
    "nodes_failure": Measure(
        description="2 nodes with 4 ranks each, one raises, the others sleep",
        task="fail",
        goals=_against("stopped", elastic=0.01),
        **_NODE_FAILURE_OPTIONS,
    ),
    "nodes_failure_collective": Measure(
        description="the same, but the others are in a collective",
        task="fail_in_collective",
        goals=_against("stopped", elastic=0.2),
        **_NODE_FAILURE_OPTIONS,
    ),
    "nodes_loss": Measure(
        description="2 nodes with 4 ranks each, one is killed with its ranks, the others sleep; node_timeout is 2 s",
        task="lose_node",
        node_timeout=2,
        goals=_against("restarted", elastic=0.1),
        **_NODE_LOSS_OPTIONS,
    ),
    "nodes_loss_collective": Measure(
        description="the same, but the others are in a collective",
        task="lose_node_in_collective",
        node_timeout=2,
        goals=_against("restarted", elastic=0.5),
        **_NODE_LOSS_OPTIONS,
    ),
    "nodes_loss_default": Measure(
        description="the same, in a collective, with the default node_timeout of each launcher",
        task="lose_node_in_collective",
        goals=_against("restarted", elastic=0.5),
        **_NODE_LOSS_OPTIONS,
    ),
}
