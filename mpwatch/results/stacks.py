"""The stacks of the ranks at one moment. Pure."""

import re
from collections.abc import Mapping
from textwrap import indent

from mpwatch.results.collective import Collective
from mpwatch.results.places import format_location
from mpwatch.results.texts import group_ranks

MAIN_THREAD_HEAD = re.compile(r"^Current thread 0x[0-9a-f]+", re.MULTILINE)
OTHER_THREAD_HEAD = re.compile(r"^Thread 0x[0-9a-f]+", re.MULTILINE)  # the number differs from rank to rank


class Stacks(dict[int, str]):
    """A dict from each global rank to the stacks of the rank's threads, as in `RunResult.stacks`.

    If a rank has sent no stacks, its value in the dict is one line with the reason, such as `has returned` or `running; no
    stack came in time`. `print(stacks)` groups ranks that have the same stacks, and shows the attribute `verdict` at the
    end.

    Attributes:
        collectives: the collective in which each rank waited, or otherwise its last collective, as in
            `RunResult.collectives`.
        verdict: a text that says which ranks wait for which other ranks in a collective. It is empty if no rank waits, or if
            this is not known.
    """

    def __init__(
        self, stacks: Mapping[int, str] | None = None, collectives: Mapping[int, Collective] | None = None, verdict: str = ""
    ) -> None:
        super().__init__(stacks or {})
        self.collectives = dict(collectives or {})
        self.verdict = verdict

    def __str__(self) -> str:
        texts = {rank: MAIN_THREAD_HEAD.sub("main thread", stacks) for rank, stacks in sorted(self.items())}
        texts = {rank: OTHER_THREAD_HEAD.sub("another thread", text) for rank, text in texts.items()}
        lines = [f"{ranks}:{_format_group(text)}" for ranks, text in group_ranks(texts)]
        return "\n".join([*lines, self.verdict] if self.verdict else lines)

    __repr__ = __str__


def _format_group(stacks: str) -> str:
    if "\n" not in stacks:
        return f" {stacks}"
    return f"{format_location(stacks)}\n{indent(stacks, '  ')}"
