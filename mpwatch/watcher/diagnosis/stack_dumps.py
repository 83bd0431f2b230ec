"""What comes from a rank by its first stderr: the words of an interpreter that is not ready yet, then Python stacks.

Pure: bytes in, text out, but for `with_sources`. The stacks are in faulthandler's words, innermost frame first.
"""

import linecache
import os
import re
from collections.abc import Iterator
from itertools import pairwise

CRASH = "Fatal Python error: "
MAX_FRAMES = 100  # of a thread; faulthandler writes no more
MAX_BYTES = 1 << 20  # a hundred threads of a hundred frames are less
CUT = b"\n[mpwatch: the interpreter printed more than this before the rank was ready; the rest was cut off]\n"
HEAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
OUTERMOST = '  File "<string>", line 1 in <module>\n'  # how a spawned interpreter begins
MORE_THREADS = "\n...\n"  # after the hundredth thread; the oldest, which is the main thread, comes last
MAIN_UNSEEN = "main thread not seen, for there are too many threads"
OUR_FRAMES = "/mpwatch/worker/main.py"


class StackDumpParser:
    """The text of one rank's pipe, as it comes."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._asked_at: int | None = None
        self.printed = b""  # by the interpreter, before it became ready
        self.main_thread = 0

    def feed(self, data: bytes) -> None:
        """More of it."""
        self._data += data[: MAX_BYTES - len(self._data)]

    def becomes_ready(self, main_thread: int) -> None:
        """From here on it is stacks."""
        self.main_thread = main_thread
        self.printed = bytes(self._data) + (CUT if len(self._data) == MAX_BYTES else b"")
        self._data.clear()

    def forget(self) -> None:
        """What has come of a rank that is ready; what it printed before stays."""
        if self.main_thread:
            self._data.clear()
            self._asked_at = None

    def ask(self) -> None:
        """From here on it is what the rank has been asked for."""
        self._asked_at = len(self._data)

    @property
    def unsaid(self) -> bytes:
        """What the rank's interpreter has printed, if nobody has passed that on to its stderr."""
        return self.printed if self.main_thread else bytes(self._data)

    @property
    def printed_instead(self) -> str:
        """What a rank has printed that did not become ready."""
        return "" if self.main_thread else self._text()

    @property
    def stacks(self) -> str:
        """All threads, when the rank was asked for them; or what has come of that."""
        return self._asked().partition(CRASH)[0].strip("\n")

    @property
    def crash(self) -> str:
        """The thread that crashed last; it may be one of a child that the rank has forked."""
        said = self._text()
        found = said.rfind(CRASH)
        return _from_the_function(said[found:]) if found >= 0 else ""

    def is_whole(self) -> bool:
        """Whether all threads have come. The main thread is the last, unless there are more threads than are written; it has
        a known end, or all frames that are written.
        """
        said = self._asked()
        heads = list(HEAD.finditer(said))
        if not heads or not said.endswith("\n"):
            return False
        if said.endswith(MORE_THREADS):
            return True
        is_main = int(heads[-1][1], 16) == self.main_thread
        return is_main and (said.endswith(OUTERMOST) or said.count("\n  File ", heads[-1].end()) >= MAX_FRAMES)

    def _asked(self) -> str:
        return "" if self._asked_at is None else self._text(self._asked_at)

    def _text(self, start: int = 0) -> str:
        return bytes(self._data[start:]).decode(errors="replace")


def tidy(stacks: str, main_thread: int) -> str:
    """The main thread first, which runs the function, and without the frames that called it."""
    blocks = [block for block in stacks.split("\n\n") if "\n" in block]  # not a head alone
    is_main = {block: bool((head := HEAD.match(block)) and int(head[1], 16) == main_thread) for block in blocks}
    mine = [_from_the_function(block) for block in blocks if is_main[block]]
    others = [block for block in blocks if not is_main[block]]
    if others and not mine:
        mine = [MAIN_UNSEEN]
    return "\n\n".join([block for block in mine if "\n" in block or block is MAIN_UNSEEN] + others)


def _from_the_function(block: str) -> str:
    lines = block.splitlines()
    ours = next((number for number, line in enumerate(lines) if OUR_FRAMES in line), len(lines))
    return "\n".join(lines[:ours])


def frames_of(stack: str) -> Iterator[tuple[str, str, str]]:
    """File, function and line of source of each frame of the first thread of a stack with its sources, innermost first."""
    lines = [*stack.partition("\n\n")[0].splitlines(), ""]
    for line, after in pairwise(lines):
        if frame := FRAME.match(line):
            yield frame[1], frame[3], after.strip() if after.startswith("    ") else ""


def with_sources(stack: str, since: float) -> str:
    """Each frame followed by its line of source, where there is one to be found. Not from files that were changed after this
    time of the wall clock: a line of them is not what the rank was doing.
    """
    lines = []
    for line in stack.splitlines():
        lines.append(line)
        frame = FRAME.match(line)
        source = _source_of(frame[1], int(frame[2]), since) if frame else ""
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)


def _source_of(file: str, line: int, since: float) -> str:
    try:
        if os.path.exists(file) and os.path.getmtime(file) > since:
            return ""
        linecache.checkcache(file)  # it may have changed since this program last looked
        return linecache.getline(file, line).strip()
    except (ValueError, OSError):  # a name that no file can have, or one that has just been removed
        return ""
