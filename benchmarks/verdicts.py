"""Make rows from the raw figures, and a table from the rows: medians, spreads, ratios, and which goals are reached. Pure.

The raw figures of a measure are a list of rounds. A round has, for each launcher and each number of ranks, the figures or the
error of one program.
"""

import statistics
from dataclasses import dataclass

from measures import FIGURES, MEASURES, MPWATCH


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of one launcher. `ratio` is mpwatch's median divided by the median of this launcher."""

    measure: str
    figure: str
    launcher: str
    median: float | None  # None: the launcher failed in each round
    least: float | None
    most: float | None
    taken: int
    errors: tuple[str, ...]
    left: tuple[str, ...]  # processes
    ratio: float | None
    goal: float | None  # for the ratio, or, in mpwatch's own row, for the figure itself
    reached: bool | None  # None: there is no goal, or no figure to compare


def make_rows(name, rounds):
    return [row for figure in MEASURES[name].figures for row in _make_rows(name, figure, rounds)]


def _make_rows(name, figure, rounds):
    measure = MEASURES[name]
    cells = {launcher: [figures[launcher] for figures in rounds if launcher in figures] for launcher in measure.launchers}
    samples = {launcher: _collect_samples(figure, found) for launcher, found in cells.items()}
    medians = {launcher: statistics.median(found) for launcher, found in samples.items() if found}
    goals = {goal.against or MPWATCH: goal for goal in measure.goals if goal.figure == figure}
    for launcher, found in samples.items():
        if not cells[launcher]:
            continue  # the launcher was not selected
        median, goal = medians.get(launcher), goals.get(launcher)
        has_unit = FIGURES[figure][1]  # figures without one are ratios, which are not compared
        is_comparable = launcher != MPWATCH and MPWATCH in medians and has_unit
        ratio = medians[MPWATCH] / median if median and is_comparable else None
        compared = median if launcher == MPWATCH else ratio
        yield Row(
            measure=name,
            figure=figure,
            launcher=launcher,
            median=median,
            least=min(found, default=None),
            most=max(found, default=None),
            taken=len(found),
            errors=tuple(cell["error"] for by_number in cells[launcher] for cell in by_number.values() if "error" in cell),
            left=tuple(
                line for by_number in cells[launcher] for cell in by_number.values() for line in cell.get("left", ())
            ),
            ratio=ratio,
            goal=goal.at_most if goal else None,
            reached=compared <= goal.at_most if goal and compared is not None else None,
        )


def _collect_samples(figure, rounds):
    return [sample for by_number in rounds if (sample := _find_sample(figure, by_number)) is not None]


def _find_sample(figure, by_number_of_ranks):
    """Return the figure of one round; None if the launcher failed in it."""
    cells = by_number_of_ranks.items()
    if figure == "slope":
        points = [(int(ranks), cell["total"]) for ranks, cell in cells if "total" in cell]
        if len(points) < len(cells) or len(points) < 2:
            return None
        return statistics.linear_regression(*zip(*points, strict=True)).slope
    ((_, cell),) = cells
    return cell.get(figure)


def medians_by_ranks(rounds, launcher, figure):
    """Return the medians that a slope is computed from."""
    found = {}
    for figures in rounds:
        for ranks, cell in figures.get(launcher, {}).items():
            if figure in cell:
                found.setdefault(int(ranks), []).append(cell[figure])
    return {ranks: statistics.median(samples) for ranks, samples in found.items()}


def format_table(name, rounds, rows):
    """Return the lines for one measure."""
    lines = [f"{name}: {MEASURES[name].description}"]
    for figure in MEASURES[name].figures:
        description, unit = FIGURES[figure]
        title = f"  {description}"
        lines.append(f"{title:60s} {'least':>9s} {'most':>9s}   mpwatch is")
        lines += [_format_row(row, unit) for row in rows if row.figure == figure]
        lines += [f"      {text}" for row in rows if row.figure == figure for text in _format_notes(row, rounds)]
    return lines


def _format_row(row, unit):
    if row.median is None:
        return f"    {row.launcher:10s} {'failed':>45s}" + (f" {'':19s}   goal: not known" if row.goal else "")
    cap = MEASURES[row.measure].cap
    numbers = [">" * (number >= cap) + format_number(number, unit) for number in (row.median, row.least, row.most)]
    line = f"    {row.launcher:44s} {numbers[0]:>11s} {numbers[1]:>9s} {numbers[2]:>9s}"
    if row.ratio is not None:
        line += f"   {'<' * (row.median >= cap)}{row.ratio:.3g} of it"
    if row.goal is not None:
        outcome = {True: "reached", False: "MISSED", None: "not known"}[row.reached]
        line += f"{',' if row.ratio is not None else '  '} goal {row.goal:g}: {outcome}"
    return line


def _format_notes(row, rounds):
    if row.figure == "slope":
        medians = medians_by_ranks(rounds, row.launcher, "total").items()
        yield f"{row.launcher}: " + ", ".join(f"{ranks} in {format_number(seconds, 's')}" for ranks, seconds in medians)
    if row.errors:
        yield f"{row.launcher} failed {len(row.errors)} times: {row.errors[-1]}"
    if row.left:
        yield f"{row.launcher} left {len(row.left)} processes in all; one of them: {row.left[-1]}"


def format_number(number, unit):
    """Format a number with three digits and its unit. A number without a unit is a ratio."""
    if not unit:
        return f"{number:.3g} x"
    if number == 0:
        return f"0 {unit}"
    if unit == "MB":
        return f"{number:.0f} MB"
    factor, prefix = next(((f, p) for f, p in ((1, ""), (1e3, "m")) if number * f >= 1), (1e6, "µ"))
    digits = max(0, 3 - len(str(int(number * factor))))
    return f"{number * factor:.{digits}f} {prefix}{unit}"


def format_summary(rows):
    """Return a line for each goal that is missed or not known."""
    with_goal = [row for row in rows if row.goal is not None]
    lines = [f"goals: {sum(row.reached is True for row in with_goal)} of {len(with_goal)} reached"]
    lines += [f"  {_describe_missed_goal(row)}" for row in with_goal if not row.reached]
    return lines


def _describe_missed_goal(row):
    name = f"{row.measure}, {row.figure}"
    if row.ratio is None and row.launcher != MPWATCH:
        return f"not known: {name} / {row.launcher}"
    if row.launcher == MPWATCH:
        return f"missed: {name} is {row.median:.3g}, not {row.goal:g}" if row.median is not None else f"not known: {name}"
    return f"missed: {name} is {row.ratio:.3g} of {row.launcher}, not {row.goal:g}"
