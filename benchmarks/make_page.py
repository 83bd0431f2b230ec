"""Make the documentation's page of benchmarks from published figures.

python make_page.py                          write docs/benchmarks.md from published.json
python make_page.py --publish RESULTS.json   add the results of bench.py to published.json first

A newer record of the same measure and launchers replaces the older one.
"""

import argparse
import json
import re
from html import escape
from pathlib import Path

from measures import FIGURES, MEASURES, MPWATCH

HERE = Path(__file__).parent
PUBLISHED = HERE / "published.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
NAMES = {
    MPWATCH: "mpwatch",
    "floor": "least possible",
    "executor": "concurrent.futures, spawn",
    "mp_spawn": "torch.multiprocessing.spawn",
    "elastic": "torch elastic",
    "torchrunx": "torchrunx",
    "ray": "Ray",
}
TITLES = {  # the description of a measure is its own line below
    "start": "Start 8 ranks",
    "heavy_main": "Start 8 ranks from a script with slow imports",
    "start_torch": "Start 4 ranks that import torch",
    "args": "Pass a large array",
    "result": "Return large arrays",
    "result_tensor": "Return large tensors",
    "raise": "Notice an exception",
    "sigkill": "Notice a killed rank",
    "restart": "Restart 8 ranks",
    "warm": "Call ranks that stay",
    "warm_args": "Call ranks that stay with a large array",
    "tee": "Show what ranks print, line by line",
    "tee_blocks": "Show what ranks print in blocks",
    "nodes_start": "Start two nodes",
    "nodes_failure": "Stop two nodes after a failure",
    "nodes_failure_collective": "Stop two nodes after a failure, the others in a collective",
    "nodes_loss": "Lose a node, 2 s allowed",
    "nodes_loss_collective": "Lose a node, 2 s allowed, the others in a collective",
    "nodes_loss_default": "Lose a node, with the default limit",
}
DESCRIPTIONS = {  # whole sentences, in place of the notes in measures.py
    "start": "8 ranks call a function that does not use torch",
    "heavy_main": (
        "8 ranks call a function that does not use torch. The calling script spends 2 s on imports that the function does "
        "not need"
    ),
    "start_torch": "4 ranks call a function that begins with `import torch`. The measured time includes the import of torch",
    "args": "Each of 4 ranks gets the same array of 256 MB as an argument",
    "result": "Each of 4 ranks returns an array of 64 MB",
    "result_tensor": "Each of 4 ranks returns a tensor of 64 MB",
    "raise": "One of 8 ranks raises an exception, while the other ranks sleep",
    "sigkill": "One of 8 ranks is killed, while the other ranks sleep",
    "restart": "One of 8 ranks is killed, while the other ranks sleep. Then all ranks are restarted once",
    "warm": "4 ranks that are already running call a function that does nothing",
    "warm_args": "Each of 4 ranks that are already running gets the same array of 256 MB as an argument",
    "tee": (
        "Each of 8 ranks prints 500,000 lines of 100 bytes, one by one. The lines go to a file and, with a "
        "prefix, to the caller's stdout"
    ),
    "tee_blocks": "Each of 8 ranks prints 500,000 lines of 100 bytes, a thousand lines at a time",
    "nodes_start": "On each of 2 nodes, 4 ranks call a function that does not use torch",
    "nodes_failure": "On 2 nodes with 4 ranks each, one rank raises an exception, while the other ranks sleep",
    "nodes_failure_collective": (
        "On 2 nodes with 4 ranks each, one rank raises an exception, while the other ranks are in a collective"
    ),
    "nodes_loss": "One of 2 nodes and its 4 ranks are killed, while the other 4 ranks sleep. The option node_timeout is 2 s",
    "nodes_loss_collective": (
        "One of 2 nodes and its 4 ranks are killed, while the other 4 ranks are in a collective. The option node_timeout is 2 s"
    ),
    "nodes_loss_default": (
        "One of 2 nodes and its 4 ranks are killed, while the other 4 ranks are in a collective. The option node_timeout has "
        "its default value"
    ),
}
HEAD = """---
hide:
  - navigation
---

# Benchmarks

<!-- benchmarks/make_page.py makes this page from benchmarks/published.json -->

What a launch costs, and how soon a failure is noticed, with mpwatch and with other launchers. Less is better. All times
are medians.
"""
HOW = """
*Least possible* is a loop that starts as many processes as there are ranks; they do nothing.
[Below](#where-the-figures-come-from) are the date, the machine and the command of each figure. To repeat all of them in
80 minutes, on a machine that does nothing else:

```sh
tox run -e bench
```

`benchmarks/measures.py` in the repository lists the measures and their goals. The dates 2026-11-20 and 2026-11-21 are
the days on which the README first published these figures.
"""
END = """
## Lightning: how a program ends after a failure

Rank 1 fails while rank 0 is busy. Seconds from the failure to the end of the program, and its exit status:

| rank 1 | watched: the caller's exception, the end, the status | `"ddp"` | status | `"ddp_spawn"` | status |
|---|---|---|---|---|---|
| raises | 0.05 to 0.08, 1.4, 1 | 3.3 to 5.6 | -9 | 3.1 to 5.5; the type is lost | 1 |
| is killed (SIGKILL) | 0.07 to 0.09, 1.5, 137 | 0.2 to 4.8 | -9 | 2.5 to 3.7 | 1 |
| exits with status 3 | 0.07 to 0.11, 1.6, 3 | 0.4 to 4.9 | -9 | 2.4 to 2.6 | 1 |

Date and machine: 2026-11-21, 2 CPU cores, Linux, Python 3.11, torch 2.13 (CPU). Command:
`python benchmarks/lightning_failures.py`.

Lightning's script launcher (`"ddp"`) looks at its processes every five seconds, and after a failure kills all of them,
your program included. The program in the column *watched* uses `mpwatch.integrations.lightning.watched` and ends with
`sys.exit(error.exit_code)`. The time to its end includes the 1.3 s that its interpreter needs to exit.

## What the caller gets after a failure

Each program has 3 ranks, and rank 1 fails. torch elastic starts a function here, not a script.

| what happens | torch.multiprocessing.spawn | torch elastic | mpwatch |
|---|---|---|---|
| a rank raises | an exception without its type, after 0.36 s | an exception without its type, after 1.41 s | \
the exception itself, after 0.015 s |
| a rank is killed (SIGKILL) | an exception, after 0.05 s | an exception, after 1.04 s | an exception, after 0.006 s |
| a segmentation fault | no stack | no stack | the Python stack |
| `KeyboardInterrupt` raised in a rank | hangs | hangs | an exception |
| `os._exit(0)` without a result | a success | hangs | a failure |
| helpers of a rank that was killed | 3 are left running | 3 are left running | none is left |
| a rank leaves gloo, then raises | blames its victim, rank 2 | blames its victim, rank 0 | blames rank 1 |
| a rank raises, and a thread of the rank goes on | waits for the thread | waits for the thread | ends at once |

Date and machine: 2026-11-20, 2 CPU cores, Linux, Python 3.11, torch 2.13 (CPU). The times in the first two rows are
medians of five runs; `python benchmarks/bench.py raise sigkill` measures the same two failures with 8 ranks. All other
rows come from one run each, and no script repeats them.
"""
BAR, GAP, LEFT, RIGHT, WIDTH = 18, 6, 220, 120, 700  # pixels
OWN_COLOUR, COLOUR = "#4f7fd9", "var(--md-default-fg-color--lighter)"  # visible in the light and in the dark theme
COLUMNS = (MPWATCH, "executor", "mp_spawn", "elastic")  # of the summary; the others share a column


def format_value(value, figure):
    """Return a figure with its unit. Small times are in milliseconds or microseconds."""
    unit = FIGURES[figure][1]
    if unit == "s":
        for factor, small_unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if value * factor >= 0.1 or small_unit == "µs":
                return f"{value * factor:.3g} {small_unit}"
    return f"{value:.3g} {unit}".strip()


def draw_bars(rows, figure):
    """Return a bar chart as SVG, with the medians and how many times mpwatch's they are."""
    longest = max(row["median"] for row in rows)
    own = next(row["median"] for row in rows if row["launcher"] == MPWATCH)
    height = len(rows) * (BAR + GAP)
    style = f"width:100%;min-width:500px;max-width:{WIDTH}px"
    parts = [
        f'<div style="overflow-x:auto"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="bar chart" style="{style}">'
    ]
    for number, row in enumerate(rows):
        y = number * (BAR + GAP)
        width = max(1.0, (WIDTH - LEFT - RIGHT) * row["median"] / longest)
        colour = OWN_COLOUR if row["launcher"] == MPWATCH else COLOUR
        times = row["median"] / own
        ratio = "" if row["launcher"] == MPWATCH else f" ({times:.0f}x)" if times >= 10 else f" ({times:.2g}x)"
        text = f'font-size="13" fill="var(--md-default-fg-color)" y="{y + 14}"'
        parts += [
            f'<text {text} x="{LEFT - 8}" text-anchor="end">{escape(NAMES[row["launcher"]])}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text {text} x="{LEFT + width + 6:.1f}">{format_value(row["median"], figure)}{ratio}</text>',
        ]
    return "".join([*parts, "</svg></div>"])


def list_measures(records):
    """Yield each measure with its figure and its rows, the least first."""
    for record in records:
        for measure, figure in dict.fromkeys((row["measure"], row["figure"]) for row in record["rows"]):
            rows = [row for row in record["rows"] if (row["measure"], row["figure"]) == (measure, figure)]
            yield measure, figure, sorted(rows, key=lambda row: row["median"])


def link(measure):
    title = TITLES.get(measure, measure)
    return f"[{title}](#{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')})"


def format_summary(records):
    """Yield the lines of the first table: a row for each measure, with the medians of all launchers."""
    yield from ("", f"| | {' | '.join(NAMES[launcher] for launcher in COLUMNS)} | another |", "|---|---|---|---|---|---|")
    for measure, figure, rows in list_measures(records):
        medians = {row["launcher"]: format_value(row["median"], figure) for row in rows}
        cells = [medians.get(launcher, "") for launcher in COLUMNS]
        others = [f"{NAMES[name]} {median}" for name, median in medians.items() if name not in (*COLUMNS, "floor")]
        yield f"| {link(measure)} | **{cells[0]}** | {' | '.join(cells[1:])} | {', '.join(others)} |"


def format_measure(measure, figure, rows):
    """Yield the lines of a measure: a heading, what is measured, and a chart."""
    setting = DESCRIPTIONS.get(measure, MEASURES[measure].description)
    measured = re.sub("^(.+) -> ", r"the time from \1 until ", FIGURES[figure][0])
    yield from (
        f"## {TITLES.get(measure, measure)}",
        "",
        f"{setting}. Measured: {measured}.",
        "",
        draw_bars(rows, figure),
        "",
    )


def format_origins(records):
    """Yield the lines of the table that says where the figures come from."""
    yield from (
        "## Where the figures come from",
        "",
        "| figures | date and machine | command | notes |",
        "|---|---|---|---|",
    )
    for record in records:
        titles = ", ".join(link(measure) for measure in dict.fromkeys(row["measure"] for row in record["rows"]))
        yield f"| {titles} | {record['date']}, {record['machine']} | `{record['command']}` | {record['note']} |"


def make_page(records):
    """Return the text of the page."""
    measures = [line for measure in list_measures(records) for line in format_measure(*measure)]
    return "\n".join([HEAD.rstrip(), *format_summary(records), HOW, *measures, *format_origins(records)]) + "\n" + END


def add_results(records, results, measures):
    """Return the records with the results of bench.py. Records of the same measures are replaced."""
    machine = results["machine"]
    rows = [
        {key: row[key] for key in ("measure", "figure", "launcher", "median")}
        for row in results["rows"]
        if row["median"] is not None and FIGURES[row["figure"]][1]
    ]
    compared = {(row["measure"], row["figure"]) for row in rows if row["launcher"] == MPWATCH}
    rows = [row for row in rows if (row["measure"], row["figure"]) in compared]
    record = {
        "date": machine["when"][:10],
        "machine": f"{machine['cpus']} CPU cores, {machine['system']}, Python {machine['python']}, torch {machine['torch']}",
        "command": f"python benchmarks/bench.py {' '.join(measures)} -r {results['rounds']}",
        "note": f"Medians of {results['rounds']} rounds. The load of the machine was {machine['load']} at the start.",
        "rows": rows,
    }
    kept = []
    for old in records:
        left = [row for row in old["rows"] if (row["measure"], row["figure"]) not in compared]
        if left:
            kept.append(old | {"rows": left})
    return [*kept, record]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", metavar="RESULTS.json")
    options = parser.parse_args()
    records = json.loads(PUBLISHED.read_text())
    if options.publish:
        results = json.loads(Path(options.publish).read_text())
        records = add_results(records, results, list(results["figures"]))
        PUBLISHED.write_text(json.dumps(records, indent=1) + "\n")
    PAGE.write_text(make_page(records))
