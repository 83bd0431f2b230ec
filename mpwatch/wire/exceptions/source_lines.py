"""Source lines that no file has: of notebook cells, of a program on stdin, of generated code. Runs on both sides.

Whoever shows a traceback asks `linecache` for the lines. A rank has no cells, and the caller has no code that a rank has
generated; so the call brings the sources of its functions along, an exception those of its frames, and either side keeps
what it did not have. Nothing that it has is replaced.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import CodeType

STDIN = "<stdin>"
COMMAND = "<string>"  # of `python -c`, but also of anything that is executed from a string: nobody knows which
LIMIT = 1 << 20  # characters of all sources that go along with one thing


def of_files(names: Iterable[str]) -> dict[str, str]:
    """What `linecache` knows of those that are no files."""
    import linecache

    found: dict[str, str] = {}
    for name in names:
        if name != COMMAND and not os.path.exists(name):
            try:
                text = "".join(linecache.getlines(name))
            except ValueError:  # a name that no file can have
                continue
            if text and len(text) + sum(map(len, found.values())) <= LIMIT:
                found[name] = text
    return found


def of_code(codes: Iterable[CodeType]) -> dict[str, str]:
    """The same for the files that this code is of, and also for `python < program`."""
    wanted = list(codes)
    found = of_files({code.co_filename for code in wanted})
    ours = [code for code in wanted if code.co_filename == STDIN]
    if ours and STDIN not in found:
        text = _program_on_stdin()
        if text and _contains(text, ours):
            found[STDIN] = text
    return found


def cell_name(file: str) -> str:
    """What IPython calls the cell that it has compiled as this file: `Cell In[3]`; empty for any other, or elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)  # in IPython 8 and newer
    return " ".join(name_of(file) or ())


def take_over(sources: Mapping[str, str]) -> None:
    """In a rank: these, and not the command that its interpreter was started with (which newer Pythons remember)."""
    if "linecache" in sys.modules:
        sys.modules["linecache"].cache.pop(COMMAND, None)
    remember(sources)


def remember(sources: Mapping[str, str]) -> None:
    """Let `linecache` find these, unless it finds something already."""
    if sources:
        import linecache

        for name, text in sources.items():
            if not linecache.getlines(name):
                # no time of change: it is not looked for on disk again
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _program_on_stdin() -> str:
    """If it is a file; what came through a pipe is gone."""
    try:
        size = os.fstat(0).st_size
        return os.pread(0, min(size, LIMIT), 0).decode()
    except (OSError, ValueError):
        return ""


def _contains(text: str, wanted: list[CodeType]) -> bool:
    """Whether this is really where all the code is from: what was read may have begun elsewhere."""
    try:
        there = set(_codes_in(compile(text, STDIN, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return there.issuperset(wanted)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            yield from _codes_in(constant)
