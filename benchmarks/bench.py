"""Measure the cost of a launch, side by side: every measure with every launcher, in several rounds, each in a new program.

python bench.py [MEASURE ...] [-l LAUNCHER,...] [-r ROUNDS] [-o FILE]

Prints a table that compares mpwatch with each other launcher, and writes every figure to FILE, as JSON. The order of the
launchers changes from round to round. Linux only. Nothing else should be running.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version

from measures import MEASURES
from played import adopt_orphans, run_program
from verdicts import format_summary, format_table, make_rows

LAUNCHERS = list(dict.fromkeys(launcher for measure in MEASURES.values() for launcher in measure.launchers))
PACKAGES = ("mpwatch", "torch", "torchrunx", "ray", "numpy", "cloudpickle")


def main():
    options = parse_options()
    adopt_orphans()
    began = time.monotonic()
    results = {"machine": describe_machine(), "rounds": options.rounds, "figures": {}, "rows": []}
    print(*(f"{name}: {value}" for name, value in results["machine"].items()), sep="\n", end="\n\n")
    rows = []
    for name in options.measures or MEASURES:
        launchers = [launcher for launcher in MEASURES[name].launchers if launcher in options.launchers]
        rounds = results["figures"][name] = [run_round(name, launchers, number) for number in range(options.rounds)]
        rows += (new_rows := make_rows(name, rounds))
        print(*format_table(name, rounds, new_rows), sep="\n", end="\n\n", flush=True)
        results["rows"] += map(dataclasses.asdict, new_rows)
        write_results(options.out, results)
    print(*format_summary(rows), sep="\n")
    minutes = (time.monotonic() - began) / 60
    print(f"medians of {options.rounds} rounds, measured in {minutes:.0f} minutes; results in {options.out}")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"all, or some of {', '.join(MEASURES)}")
    parser.add_argument("-l", "--launchers", default=",".join(LAUNCHERS), help="all, or some of %(default)s")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="%(default)s")
    parser.add_argument("-o", "--out", default="benchmarks.json", help="%(default)s")
    options = parser.parse_args()
    options.launchers = options.launchers.split(",")
    if unknown := {*options.measures} - MEASURES.keys() | {*options.launchers} - {*LAUNCHERS}:
        parser.error(f"no such measure or launcher: {', '.join(sorted(unknown))}")
    return options


def run_round(name, launchers, number):
    measure, figures = MEASURES[name], {launcher: {} for launcher in launchers}
    first = number % len(launchers) if launchers else 0
    for ranks in measure.ranks:
        for launcher in launchers[first:] + launchers[:first]:
            show_progress(f"{name}, round {number + 1}: {launcher}, {ranks} ranks")
            figures[launcher][ranks] = run_program(name, measure, launcher, ranks)
    show_progress("")
    return figures


def show_progress(text):
    """Show on a terminal what runs now."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def write_results(path, results):
    with open(path, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


def describe_machine():
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        **{package: find_version(package) for package in PACKAGES},
    }


def find_version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        if package != "mpwatch":
            return None
        import mpwatch  # on PYTHONPATH, not installed

        return mpwatch.__version__


if __name__ == "__main__":
    main()
