"""Parses what a rank writes into its stack pipe, and formats stacks for the report. Runs in the watcher thread.

- If the watcher asks for stacks, Python writes those of all threads and then STACKS_END. If Python does not answer in time,
  faulthandler writes the stack of the main thread. The pipe has one of these texts or a mixture, without its end if the
  rank was too slow or the pipe was full.
- On a crash, faulthandler writes the stack of the crashing thread.

All stacks begin with the innermost frame. The rank's side is worker/stack_dumps.py.
"""

import linecache
import os
import re
import threading
from itertools import pairwise

from mpwatch.results.places import FRAME_LINE, PACKAGE_FOLDER, is_of_library, parse_frames
from mpwatch.results.texts import clean_line
from mpwatch.wire.messages import STACKS_END

CRASH_HEAD = "Fatal Python error: "
NATIVE_DUMP_HEAD = "Stack"  # faulthandler does not name the thread
STACK_HEAD = re.compile(r"^(?:Current thread|Thread|Stack)\b.*\(most recent call first\):$", re.MULTILINE)
THREAD_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
END_LINE = STACKS_END.decode()
MAX_FRAMES = 100  # faulthandler writes no more frames of a thread
MAX_BYTES = 1 << 20  # more than a hundred threads of a hundred frames each
OUTERMOST_FRAME = '\n  File "<string>", line 1 in <module>'  # of the main thread of a spawned interpreter
OUTERMOST_FRAME_OF_THREAD = re.compile(r'/threading\.py", line \d+ in _bootstrap\s*$')  # of a thread other than the main one
RANK_MAIN_FILE = "/mpwatch/worker/main.py"
DUMP_HANDLER_FRAME = re.compile(r'/mpwatch/worker/stack_dumps\.py", line \d+ in __call__$')
SCRIPT_FILE = "/mpwatch/script.py"  # runs the user's script
NATIVE_HEAD = "Current thread's C stack trace (most recent call first):\n"  # Python 3.14 and newer write it after a crash


class StackDumpParser:
    def __init__(self) -> None:
        self._data = bytearray()
        self._dump_start: int | None = None  # where in `_data` the requested stacks begin
        self.dump_count = 0  # how often the watcher has asked for stacks
        self.main_thread = 0  # the identifier of the rank's main thread; 0 until the rank is ready

    def feed(self, data: bytes) -> None:
        self._data += data[: MAX_BYTES - len(self._data)]

    def start_dump(self) -> None:
        self._dump_start = len(self._data)
        self.dump_count += 1

    def end_dump(self) -> None:
        """Delete the requested stacks, but not the stack of a crash."""
        if self._dump_start is not None:
            crash = self._data.find(CRASH_HEAD.encode())
            del self._data[: crash if crash >= 0 else len(self._data)]
            self._dump_start = None

    def is_dump_pending(self) -> bool:
        return self._dump_start is not None and not self.is_complete()

    def is_unanswered(self, request: int) -> bool:
        """Return whether this is the latest request (they count from 1), and the rank has written nothing since."""
        return request == self.dump_count and len(self._data) == self._dump_start

    def is_complete(self) -> bool:
        if self._dump_start is None:
            return False
        if self._data.find(STACKS_END, self._dump_start) >= 0:
            return True
        return any(thread is None and _reaches_outermost_frame(stack) for thread, stack in self._split_dump())

    @property
    def dump(self) -> str:
        """The requested stacks, that of the main thread first. Without that, it is empty."""
        stacks = self._split_dump()
        by_python = [stack for thread, stack in stacks if thread == self.main_thread]
        head = f"Current thread 0x{self.main_thread:016x}"
        natively = [stack.replace(NATIVE_DUMP_HEAD, head, 1) for thread, stack in stacks if thread is None]
        main_stack = [*by_python, *natively][:1]
        others = [stack for thread, stack in stacks if thread not in (None, self.main_thread)]
        return "\n\n".join(stack.strip("\n") for stack in main_stack + others) if main_stack else ""

    @property
    def crash_stack(self) -> str:
        """The stack of the last crash, maybe of a forked child, without mpwatch's frames and without native frames."""
        _, head, text = self._get_text().rpartition(CRASH_HEAD)
        return _cut_at_rank_main(head + text.partition(NATIVE_HEAD)[0]).rstrip("\n") if head else ""

    def _split_dump(self) -> list[tuple[int | None, str]]:
        """Return the requested stacks with the identifiers of their threads: None for the main thread by faulthandler."""
        text = "" if self._dump_start is None else self._get_text(self._dump_start).partition(CRASH_HEAD)[0]
        starts = [match.start() for match in STACK_HEAD.finditer(text)]
        stacks: list[tuple[int | None, str]] = []
        for start, end in pairwise([*starts, len(text)]):
            stack = text[start:end].partition(END_LINE)[0]
            if thread := THREAD_HEAD.match(stack):
                stacks.append((int(thread[1], 16), stack))
            elif not OUTERMOST_FRAME_OF_THREAD.search(stack):  # else the kernel has given the signal to another thread
                stacks.append((None, stack))
        return stacks

    def _get_text(self, start: int = 0) -> str:
        return self._data[start:].decode(errors="replace")


def _reaches_outermost_frame(stack: str) -> bool:
    is_at_end = stack.rstrip("\n").endswith(OUTERMOST_FRAME) or stack.count("\n  File ") >= MAX_FRAMES
    return is_at_end and stack.endswith("\n")


def cut_frames_of_mpwatch(stacks: str) -> str:
    """Remove mpwatch's own threads, its frames that called the user's function, and those that were writing the stacks."""
    blocks = map(_cut_dump_handler, map(_cut_at_rank_main, stacks.split("\n\n")))
    # a head alone has no frames
    return "\n\n".join(block for block in blocks if "\n" in block and not _is_thread_of_mpwatch(block))


def add_source_lines(stacks: str, started_at: float) -> str:
    """Add its line of source code to each frame, unless the file was changed after `started_at` (seconds since 1970)."""
    lines = []
    for line in stacks.splitlines():
        lines.append(line)
        match = FRAME_LINE.match(line)
        if match and (source := _read_source_line(match[1], int(match[2]), started_at)):
            lines.append(f"    {source}")
    return "\n".join(lines)


def _is_thread_of_mpwatch(block: str) -> bool:
    frames = list(parse_frames(block)) if block.startswith("Thread ") else []
    target = next((frame for frame in reversed(frames) if frame.file != threading.__file__), None)
    is_started_by_mpwatch = target is not None and target.file.startswith(PACKAGE_FOLDER)
    return is_started_by_mpwatch and all(is_of_library(frame.file) for frame in frames)


def _cut_at_rank_main(block: str) -> str:
    lines = block.splitlines()
    end = next((number for number, line in enumerate(lines) if RANK_MAIN_FILE in line or SCRIPT_FILE in line), len(lines))
    return "\n".join(lines[:end])


def _cut_dump_handler(block: str) -> str:
    lines = block.splitlines()
    handler = max((number for number, line in enumerate(lines) if DUMP_HANDLER_FRAME.search(line)), default=0)
    return "\n".join([*lines[:1], *lines[handler + 1 :]])


def _read_source_line(file: str, line: int, started_at: float) -> str:
    try:
        if os.path.exists(file) and os.path.getmtime(file) > started_at:
            return ""
        linecache.checkcache(file)  # the file may have changed since the calling program read it
        return clean_line(linecache.getline(file, line).strip())
    except (ValueError, OSError):  # a name that no file can have, or a file that was removed at this moment
        return ""
