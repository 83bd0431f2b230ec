"""Prints the checks of this folder as a table, and writes them to the file that MPWATCH_GPU_TABLE names, as JSON."""

import json
import os
import platform
from pathlib import Path

import torch

FOLDER = Path(__file__).parent


def describe_machine():
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    cpus = len(os.sched_getaffinity(0))
    return f"{card}, {cpus} CPUs, Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def pytest_terminal_summary(terminalreporter):
    rows = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if FOLDER.name in Path(report.nodeid.partition("::")[0]).parts and (
                report.when == "call" or outcome != "passed"
            ):
                name = report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " ")
                notes = "; ".join(f"{key} {value}" for key, value in report.user_properties)
                rows.append({"check": name, "outcome": outcome, "seconds": round(report.duration, 1), "notes": notes})
    if not rows:
        return
    terminalreporter.section(describe_machine())
    for row in sorted(rows, key=lambda row: row["check"]):
        terminalreporter.write_line(f"{row['outcome']:8}{row['seconds']:6.1f} s  {row['check']}  {row['notes']}")
    if path := os.environ.get("MPWATCH_GPU_TABLE"):
        Path(path).write_text(json.dumps({"machine": describe_machine(), "checks": rows}, indent=1))
