"""Read the frames of a stack in the format of faulthandler, to which stack_dumps.py has added lines of source. Pure."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

FRAME_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class StackFrame(NamedTuple):
    file: str
    line: int
    function: str
    source: str  # the line of source; empty if there is none


def parse_frames(stacks: str) -> Iterator[StackFrame]:
    lines = [*stacks.partition("\n\n")[0].splitlines(), ""]
    for line, following in pairwise(lines):
        if match := FRAME_LINE.match(line):
            source = following.strip() if following.startswith("    ") else ""
            yield StackFrame(match[1], int(match[2]), match[3], source)
