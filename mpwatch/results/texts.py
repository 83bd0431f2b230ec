"""What all texts use: counts, steps, ranks, and texts of ranks made harmless for a terminal, a log and UTF-8. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

V = TypeVar("V")

# They include surrogates, which UTF-8 cannot encode, line separators, and characters that reverse the direction of a text.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COLOR_SEQUENCES = re.compile(r"\x1b\[[0-9;:]*m")


def clean_text(raw: str) -> str:
    """Remove terminal color sequences from a text, and escape all control characters except line breaks and tabs."""
    plain = COLOR_SEQUENCES.sub("", str.__str__(raw))
    return CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape", "backslashreplace").decode(), plain)


def clean_line(raw: str) -> str:
    """Do the same, and also escape line breaks and tabs."""
    return clean_text(raw).replace("\n", "\\n").replace("\t", "\\t")


def format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def format_step(step: int, total: int | None) -> str:
    return str(step) if total is None else f"{step} of {total}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a text such as `rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    word = "rank" if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks"
    return f"{word} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def group_ranks(values: Mapping[int, V]) -> list[tuple[str, V]]:
    """Return each value once, with its ranks, such as `("ranks 0-2", value)`, in the order of the mapping."""
    groups: dict[V, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return [(format_ranks(ranks), value) for value, ranks in groups.items()]
