"""Makes phrases that name a place in the code, such as ` (train.py:88 in step)`.

The place is the innermost frame of user code. Code of mpwatch, of the standard library and of installed packages does not
count as user code.
"""

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import pairwise
from traceback import walk_tb
from typing import NamedTuple

from mpwatch.results.texts import clean_line
from mpwatch.wire.exceptions.source_lines import cell_name

FRAME_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')  # of a stack in the format of faulthandler
SOURCE_LIMIT = 100  # characters of a line of source
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(__file__))  # of mpwatch
LIBRARIES = (
    PACKAGE_FOLDER,
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<frozen ",
)  # files that are not user code
PACKAGES_PARTS = (f"{sysconfig.get_path('purelib')}/", "/site-packages/")  # of the files of installed packages
TORCH_WRAPPER = "torch/distributed/c10d_logger.py"  # of each collective: it logs an error, in _get_msg_dict
ITEM_LOOP_FILE = "/worker/item_loop.py"  # it calls the function of `mpwatch.map`
# What a rank does while its function does not run, by the file of the outermost frame. The first match counts.
ACTIVITIES_BY_FILE = {
    "/wire/pickling/call_payload.py": "while loading the call",
    "/worker/process_group.py": "while joining the process group",
    "/worker/channel.py": "while sending the answer",
    "/wire/": "while making the answer",
    "/worker/": "just before or after the function",
}


class StackFrame(NamedTuple):
    file: str
    line: int
    function: str
    source: str  # the line of source; empty if there is none


def parse_frames(stacks: str) -> Iterator[StackFrame]:
    """Read the frames of the first thread. stack_dumps.py has added lines of source."""
    lines = [*stacks.partition("\n\n")[0].splitlines(), ""]
    for line, following in pairwise(lines):
        if match := FRAME_LINE.match(line):
            source = following.strip() if following.startswith("    ") else ""
            yield StackFrame(match[1], int(match[2]), match[3], source)


def format_location(stacks: str) -> str:
    """Return a phrase such as ` in all_reduce (train.py:88 in step: ...)`, or ` while loading the call`."""
    frames = list(parse_frames(stacks))
    if not frames:
        lines = stacks.partition("\n\n")[0].splitlines()
        return f" ({lines[0]})" if len(lines) == 1 else ""
    files = [frame.file for frame in frames]
    frame = frames[find_user_frame(files)]
    source = f": {shorten_source(frame.source)}" if frame.source else ""
    place = f" ({format_place(frame.file, frame.line, frame.function)}{source})"
    is_item_loop = files[-1].startswith(PACKAGE_FOLDER + ITEM_LOOP_FILE)
    if is_item_loop and is_of_library(frame.file):
        return " between two items"
    for file, activity in ACTIVITIES_BY_FILE.items():
        if not is_item_loop and files[-1].startswith(PACKAGE_FOLDER + file):
            return f" {activity}{'' if is_of_library(frame.file) else place}"
    shown = (each for each in frames if not each.file.startswith(PACKAGE_FOLDER) and not each.file.endswith(TORCH_WRAPPER))
    innermost = next(shown, frame)
    function = f" in {innermost.function}" if innermost is not frame else ""
    return f"{function}{place}"


def shorten_source(line: str) -> str:
    """Return a line of source code without the comment at its end. A long line is cut after a word."""
    code = line.partition("  # ")[0].rstrip() or line
    if len(code) <= SOURCE_LIMIT:
        return code
    start = code[:SOURCE_LIMIT]
    return f"{start.rpartition(' ')[0].rstrip() or start} ..."


def format_raise_location(error: BaseException) -> str:
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk_tb(error.__traceback__)]
    if not frames:
        return ""
    frames.reverse()
    path, line, name = frames[find_user_frame(path for path, _, _ in frames)]
    return f" ({format_place(path, line, name)})"


def format_place(path: str, line: int | None, function: str) -> str:
    return clean_line(f"{_format_file_name(path)}:{line} in {function}")


def find_user_frame(files: Iterable[str]) -> int:
    """Return the index of the innermost frame of user code, from the files of the frames, the innermost first.

    A real file is preferred to one such as `<string>`, where the generated methods of a dataclass are. Without user code it
    is the innermost frame of an installed package other than torch, or else 0.
    """
    files = list(files)
    user_code = [n for n, file in enumerate(files) if not is_of_library(file)]
    in_files = [n for n in user_code if not files[n].startswith("<")]
    in_packages = [n for n, file in enumerate(files) if _is_of_other_package(file)]
    return next(iter([*in_files, *user_code, *in_packages]), 0)


def is_of_library(file: str) -> bool:
    """Return whether a file belongs to mpwatch, the standard library or an installed package."""
    return file.startswith(LIBRARIES) or "/site-packages/" in file


def _is_of_other_package(file: str) -> bool:
    name = next((file.partition(part)[2] for part in PACKAGES_PARTS if part in file), "torch/")
    return not (name.startswith("torch/") or file.startswith(PACKAGE_FOLDER))


def _format_file_name(path: str) -> str:
    return cell_name(path) or path.rpartition("/")[2]
