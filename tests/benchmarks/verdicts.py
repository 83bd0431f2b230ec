"""From the raw figures to rows, and from rows to the table: medians, spreads, ratios, and which goals are reached. Pure.

Raw figures are, for each measure, a list of rounds; a round has, for each launcher, what came of it at each number of ranks.
"""

import statistics
from dataclasses import dataclass

from measures import FIGURES, MEASURES, OURS

__all__ = ["Row", "by_ranks", "rows_of", "summary", "table"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of one launcher: seconds or megabytes; the ratio is mpwatch's median to its own."""

    measure: str
    figure: str
    launcher: str
    median: float | None  # None: it failed each time
    least: float | None
    most: float | None
    taken: int
    errors: tuple[str, ...]
    left: tuple[str, ...]  # processes
    ratio: float | None
    goal: float | None  # of the ratio, or, in mpwatch's own row, of the figure itself
    reached: bool | None  # None: there is no goal, or nothing to tell it by


def rows_of(name, rounds):
    return [row for figure in MEASURES[name].figures for row in _rows_of(name, figure, rounds)]


def _rows_of(name, figure, rounds):
    measure = MEASURES[name]
    cells = {launcher: [one[launcher] for one in rounds if launcher in one] for launcher in measure.launchers}
    samples = {launcher: _samples(figure, of) for launcher, of in cells.items()}
    medians = {launcher: statistics.median(of) for launcher, of in samples.items() if of}
    goals = {goal.against or OURS: goal for goal in measure.goals if goal.figure == figure}
    for launcher, found in samples.items():
        if not cells[launcher]:
            continue  # not asked for
        median, goal = medians.get(launcher), goals.get(launcher)
        is_comparable = launcher != OURS and OURS in medians and FIGURES[figure][1]  # ratios are judged by themselves
        ratio = medians[OURS] / median if median and is_comparable else None
        judged = median if launcher == OURS else ratio
        yield Row(
            measure=name,
            figure=figure,
            launcher=launcher,
            median=median,
            least=min(found, default=None),
            most=max(found, default=None),
            taken=len(found),
            errors=tuple(cell["error"] for one in cells[launcher] for cell in one.values() if "error" in cell),
            left=tuple(line for one in cells[launcher] for cell in one.values() for line in cell.get("left", ())),
            ratio=ratio,
            goal=goal.at_most if goal else None,
            reached=judged <= goal.at_most if goal and judged is not None else None,
        )


def _samples(figure, rounds):
    return [sample for by_number in rounds if (sample := _sample(figure, by_number)) is not None]


def _sample(figure, by_number_of_ranks):
    """Of one round; None if the launcher failed in it."""
    cells = by_number_of_ranks.items()
    if figure == "slope":
        points = [(int(ranks), cell["whole"]) for ranks, cell in cells if "whole" in cell]
        if len(points) < len(cells) or len(points) < 2:
            return None
        return statistics.linear_regression(*zip(*points, strict=True)).slope
    ((_, cell),) = cells
    return cell.get(figure)


def by_ranks(rounds, launcher, figure):
    """The medians behind a slope."""
    found = {}
    for one in rounds:
        for ranks, cell in one.get(launcher, {}).items():
            if figure in cell:
                found.setdefault(int(ranks), []).append(cell[figure])
    return {ranks: statistics.median(samples) for ranks, samples in found.items()}


def table(name, rounds, rows):
    """The lines of one measure."""
    lines = [f"{name}: {MEASURES[name].says}"]
    for figure in MEASURES[name].figures:
        says, unit = FIGURES[figure]
        title = f"  {says}"
        lines.append(f"{title:60s} {'least':>9s} {'most':>9s}   mpwatch is")
        lines += [_line(row, unit) for row in rows if row.figure == figure]
        lines += [f"      {text}" for row in rows if row.figure == figure for text in _deferred_log(row, rounds)]
    return lines


def _line(row, unit):
    if row.median is None:
        return f"    {row.launcher:10s} {'failed':>45s}" + (f" {'':19s}   goal: not known" if row.goal else "")
    cap = MEASURES[row.measure].cap
    numbers = [">" * (number >= cap) + with_unit(number, unit) for number in (row.median, row.least, row.most)]
    line = f"    {row.launcher:44s} {numbers[0]:>11s} {numbers[1]:>9s} {numbers[2]:>9s}"
    if row.ratio is not None:
        line += f"   {'<' * (row.median >= cap)}{row.ratio:.3g} of it"
    if row.goal is not None:
        verdict = {True: "reached", False: "MISSED", None: "not known"}[row.reached]
        line += f"{',' if row.ratio is not None else '  '} goal {row.goal:g}: {verdict}"
    return line


def _deferred_log(row, rounds):
    if row.figure == "slope":
        medians = by_ranks(rounds, row.launcher, "whole").items()
        yield f"{row.launcher}: " + ", ".join(f"{ranks} in {with_unit(whole, 's')}" for ranks, whole in medians)
    if row.errors:
        yield f"{row.launcher} failed {len(row.errors)} times: {row.errors[-1]}"
    if row.left:
        yield f"{row.launcher} left {len(row.left)} processes in all; one of them: {row.left[-1]}"


def with_unit(number, unit):
    """In three digits. What has no unit is how many times as much something is as another."""
    if not unit:
        return f"{number:.3g} x"
    if number == 0:
        return f"0 {unit}"
    if unit == "MB":
        return f"{number:.0f} MB"
    factor, prefix = next(((f, p) for f, p in ((1, ""), (1e3, "m")) if number * f >= 1), (1e6, "µ"))
    digits = max(0, 3 - len(str(int(number * factor))))
    return f"{number * factor:.{digits}f} {prefix}{unit}"


def summary(rows):
    """Every goal on a line of its own: what has been missed can be seen at once."""
    judged = [row for row in rows if row.goal is not None]
    lines = [f"goals: {sum(row.reached is True for row in judged)} of {len(judged)} reached"]
    lines += [f"  {_verdict(row)}" for row in judged if not row.reached]
    return lines


def _verdict(row):
    what = f"{row.measure}, {row.figure}"
    if row.ratio is None and row.launcher != OURS:
        return f"not known: {what} / {row.launcher}"
    if row.launcher == OURS:
        return f"missed: {what} is {row.median:.3g}, not {row.goal:g}" if row.median is not None else f"not known: {what}"
    return f"missed: {what} is {row.ratio:.3g} of {row.launcher}, not {row.goal:g}"
