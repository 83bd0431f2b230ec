"""What a launch costs, side by side: every measure with every launcher in turn, round after round, in fresh programs.

python bench.py [MEASURE ...] [-l LAUNCHER,...] [-r ROUNDS] [-o FILE]

Prints a table, in which mpwatch is compared with each of the others, and keeps every figure in FILE, as JSON. The order of
the launchers is another in each round. Linux only. Nothing else should be running.
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
from played import adopt_orphans, play
from verdicts import rows_of, summary, table

LAUNCHERS = list(dict.fromkeys(launcher for measure in MEASURES.values() for launcher in measure.launchers))
PACKAGES = ("mpwatch", "torch", "torchrunx", "ray", "numpy", "cloudpickle")


def main():
    options = parse()
    adopt_orphans()
    began, told = time.monotonic(), {"machine": machine(), "rounds": options.rounds, "figures": {}, "rows": []}
    print(*(f"{what}: {value}" for what, value in told["machine"].items()), sep="\n", end="\n\n")
    rows = []
    for name in options.measures or MEASURES:
        launchers = [launcher for launcher in MEASURES[name].launchers if launcher in options.launchers]
        rounds = told["figures"][name] = [play_round(name, launchers, number) for number in range(options.rounds)]
        rows += (news := rows_of(name, rounds))
        print(*table(name, rounds, news), sep="\n", end="\n\n", flush=True)
        told["rows"] += map(dataclasses.asdict, news)
        keep(options.out, told)
    print(*summary(rows), sep="\n")
    minutes = (time.monotonic() - began) / 60
    print(f"medians of {options.rounds} rounds, taken in {minutes:.0f} minutes; kept in {options.out}")


def parse():
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


def play_round(name, launchers, number):
    measure, got = MEASURES[name], {launcher: {} for launcher in launchers}
    first = number % len(launchers) if launchers else 0
    for ranks in measure.ranks:
        for launcher in launchers[first:] + launchers[:first]:
            say(f"{name}, round {number + 1}: {launcher}, {ranks} ranks")
            got[launcher][ranks] = play(name, measure, launcher, ranks)
    say("")
    return got


def say(text):
    """What is going on, for who waits at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def keep(path, told):
    with open(path, "w") as file:
        json.dump(told, file, indent=1)
        file.write("\n")


def machine():
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        **{package: version_of(package) for package in PACKAGES},
    }


def version_of(package):
    try:
        return version(package)
    except PackageNotFoundError:
        if package != "mpwatch":
            return None
        import mpwatch  # on PYTHONPATH, not installed

        return mpwatch.__version__


if __name__ == "__main__":
    main()
