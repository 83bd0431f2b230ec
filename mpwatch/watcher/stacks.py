"""What comes from a rank by its first stderr: the words of an interpreter that is not ready yet, then Python stacks.

Pure: bytes in, text out, but for `with_sources`. The stacks are in faulthandler's words, innermost frame first.
"""

import linecache
import re

__all__ = ["StackPipe", "innermost_file", "tidy", "with_sources"]

CRASH = "Fatal Python error: "
MAX_FRAMES = 100  # of a thread; faulthandler writes no more
MAX_BYTES = 1 << 20  # a hundred threads of a hundred frames are less
HEAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
OUTERMOST = '  File "<string>", line 1 in <module>\n'  # how a spawned interpreter begins
OUR_FRAMES = "/mpwatch/worker/bootstrap.py"


class StackPipe:
    """The text of one rank's pipe, as it comes."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ready_at: int | None = None
        self.main_thread = 0

    def feed(self, data: bytes) -> None:
        """More of it."""
        self._data += data[: MAX_BYTES - len(self._data)]

    def becomes_ready(self, main_thread: int) -> bytes:
        """From here on it is stacks. Returns what the interpreter had printed."""
        self.main_thread = main_thread
        self._ready_at = len(self._data)
        return bytes(self._data)

    @property
    def printed(self) -> str:
        """What the rank has printed instead of becoming ready."""
        return self._text() if self._ready_at is None else ""

    @property
    def stacks(self) -> str:
        """All threads, when the rank was asked for them; or what has come of that."""
        return self._said().partition(CRASH)[0].strip("\n")

    @property
    def crash(self) -> str:
        """The thread that crashed, if one did."""
        _, mark, text = self._said().partition(CRASH)
        return _from_the_function(mark + text)

    def is_whole(self) -> bool:
        """Whether all threads have come. The main thread is the last; it has a known end, or all frames that are written."""
        said = self._said()
        heads = list(HEAD.finditer(said))
        if not heads or int(heads[-1][1], 16) != self.main_thread or not said.endswith("\n"):
            return False
        return said.endswith(OUTERMOST) or said.count("\n  File ", heads[-1].end()) >= MAX_FRAMES

    def _said(self) -> str:
        return "" if self._ready_at is None else self._text(self._ready_at)

    def _text(self, start: int = 0) -> str:
        return bytes(self._data[start:]).decode(errors="replace")


def tidy(stacks: str, main_thread: int) -> str:
    """The main thread first, which runs the function, and without the frames that called it."""
    blocks = [block for block in stacks.split("\n\n") if block]
    is_main = {block: bool((head := HEAD.match(block)) and int(head[1], 16) == main_thread) for block in blocks}
    mine = [_from_the_function(block) for block in blocks if is_main[block]]
    others = [block for block in blocks if not is_main[block]]
    return "\n\n".join(block for block in mine + others if "\n" in block)  # not a head alone


def _from_the_function(block: str) -> str:
    lines = block.splitlines()
    ours = next((number for number, line in enumerate(lines) if OUR_FRAMES in line), len(lines))
    return "\n".join(lines[:ours])


def innermost_file(stacks: str) -> str:
    """The file in which the first thread of these is; empty if that is not known."""
    frames = (FRAME.match(line) for line in stacks.splitlines()[1:2])
    return next((frame[1] for frame in frames if frame), "")


def with_sources(stack: str) -> str:
    """Each frame followed by its line of source, where there is one to be found."""
    for file in {frame[1] for line in stack.splitlines() if (frame := FRAME.match(line))}:
        linecache.checkcache(file)
    lines = []
    for line in stack.splitlines():
        lines.append(line)
        frame = FRAME.match(line)
        source = linecache.getline(frame[1], int(frame[2])).strip() if frame else ""
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)
