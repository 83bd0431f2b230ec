"""Run the code of the documentation's pages, and compare what it prints with what the page shows.

python pages.py [PAGE ...]     run the blocks; write the output into blocks of output that are empty

- A block of Python is a whole program. It is run in a folder that all blocks of the page share, under the name in `title`.
- The block of `text` after it is its output: stdout and stderr of the program and of its ranks. `...` stands for any text,
  numbers of seconds may differ, and the title may have `exit status N` and `in any order`.
- Blocks whose title begins with "Cell" are cells of one notebook. One IPython runs all cells of a page.
- If the output has prompts of pdb, the program runs in a terminal, and what follows the prompts is typed.
- pytest runs a file whose name begins with `test_`.
- `<!-- setup ... -->` has code that readers do not see. It comes before each following program of the page.
- `<!-- compile only: REASON -->` before a block: it is compiled, but not run.
- Blocks of `yaml` are parsed, and blocks of `sh` are checked by `bash -n`.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sybil import Document, Region
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INFO = re.compile(r"(?P<language>\w*)(?P<options>[^\n]*)\n")
SETUP = re.compile(r"^<!-- setup\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
COMPILE_ONLY = re.compile(r"<!-- compile only: [^>]+-->\s*\Z")
SNIPPET = re.compile(r'^--8<--(?: "|\n)([^"\n]+)(?:"|\n--8<--)$', re.MULTILINE)
PROMPT = re.compile(r"\(Pdb\) (.*)$", re.MULTILINE)
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
SECONDS = re.compile(r"\b\d+(\.\d+)? ?s\b")
CARETS = re.compile(r"^ +[~^]+\n", re.MULTILINE)  # Python 3.13 and newer mark fewer parts of a line
TIME_LIMIT = 110  # seconds


@dataclass
class Block:
    """A block of code of a page."""

    language: str
    source: str
    title: str
    start: int
    end: int
    setup: str = ""
    is_run: bool = True
    output: "Block | None" = None

    @property
    def is_cell(self):
        """Whether it is a cell of a notebook."""
        return self.title.startswith("Cell")

    @property
    def status(self):
        """The exit status that the page promises."""
        found = re.search(r"exit status (\d+)", self.output.title if self.output else "")
        return int(found[1]) if found else 0

    def is_expected(self, printed, status):
        """Return whether the program has printed what the page shows, and has ended with its status."""
        output, title = (self.output.source, self.output.title) if self.output else ("", "")
        return status == self.status and is_match(printed, output, title)


def read_blocks(document):
    """Return the blocks of a page, each program with its output."""
    setups = [(found.end(), found[1]) for found in SETUP.finditer(document.text)]
    blocks = []
    for region in sorted(RawFencedCodeBlockLexer(INFO)(document), key=lambda region: region.start):
        language, options = region.lexemes["language"], region.lexemes["options"]
        title = re.search(r'title="([^"]*)"', options)
        block = Block(
            language, include_snippets(region.lexemes["source"]), title[1] if title else "", region.start, region.end
        )
        block.setup = next((code for end, code in reversed(setups) if end <= region.start), "")
        block.is_run = not COMPILE_ONLY.search(document.text[: region.start])
        if language == "text" and blocks and blocks[-1].language == "python":
            blocks[-1].output = block
        blocks.append(block)
    return blocks


def include_snippets(source):
    return SNIPPET.sub(lambda found: (ROOT / found[1]).read_text().rstrip("\n"), source)


def parse(document):
    """Yield a region for each block that can be checked. A parser of sybil."""
    checks = {"python": check_program, "yaml": check_yaml, "sh": check_shell}
    for block in read_blocks(document):
        if block.language in checks:
            yield Region(block.start, block.end, block, checks[block.language])


def check_program(example):
    block = example.parsed
    if not block.is_cell:
        compile(block.setup + block.source, block.title, "exec")
    if block.is_run:
        printed, status = run_block(block, example.path)
        if not block.is_expected(printed, status):
            expected = block.output.source if block.output else ""
            raise AssertionError(
                f"exit status {status}, expected {block.status}; it printed:\n{printed}\nexpected:\n{expected}"
            )


def check_yaml(example):
    import yaml

    assert list(yaml.safe_load_all(example.parsed.source))


def check_shell(example):
    subprocess.run(["bash", "-n"], input=example.parsed.source, text=True, check=True)


@cache
def get_folder(path):
    """Return the temporary folder of a page. The cache keeps it until the end of this program."""
    return tempfile.TemporaryDirectory(prefix=f"{Path(path).stem}-")


def run_block(block, path):
    """Return what a program or a cell prints, and the exit status of the program."""
    if block.is_cell:
        return run_cells(path)[block.start], 0
    typed = PROMPT.findall(block.output.source) if block.output else []
    return run_program(block.setup + block.source, block.title or "example.py", get_folder(path).name, typed)


IPYTHON = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

InteractiveShell.colors = "nocolor"
shell = InteractiveShell.instance()
for cell in json.load(open("cells.json")):
    shell.run_cell(cell, store_history=True)
    print(end=END, flush=True)
shell.run_line_magic("reset", "-f")
"""
END_OF_CELL = "\0end of cell\0"


@cache
def run_cells(path):
    """Run the cells of a page in one IPython. Return what each has printed, by the place of its block."""
    cells = [block for block in read_blocks(Document(Path(path).read_text(), path)) if block.is_cell and block.is_run]
    folder = get_folder(path).name
    Path(folder, "cells.json").write_text(json.dumps([cell.source for cell in cells]))
    printed, _ = run_program(IPYTHON.replace("END", repr(END_OF_CELL)), "run_cells.py", folder)
    return {cell.start: text for cell, text in zip(cells, printed.split(END_OF_CELL), strict=False)}


def run_program(code, name, folder, typed=()):
    """Return what the program prints, without the names of folders of this machine, and its exit status.

    `typed` are lines for prompts of pdb. The program has a terminal if there are any.
    """
    Path(folder, name).write_text(code)
    tester = ["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"] if name.startswith("test_") else []
    env = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "TERM": "dumb",
        "COLUMNS": "80",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH")])),
    }
    if typed:
        printed, status = run_in_terminal(name, folder, env, typed)
    else:
        done = subprocess.run(
            [sys.executable, *tester, name],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        printed, status = done.stdout, done.returncode
    for path in (os.path.realpath(folder), str(ROOT), sysconfig.get_path("stdlib")):
        printed = printed.replace(path + "/", "")
    return printed, status


def run_in_terminal(name, folder, env, typed):
    """Run a program in a terminal of its own, and type a line at each prompt of pdb."""
    from support.screens import Program

    def text(begin=0):
        return ESCAPE_SEQUENCE.sub("", program.output[begin:].decode(errors="replace"))

    with Program(name, env=env, columns=80, cwd=folder) as program:
        for line in typed:
            begin = len(program.output)
            program.read_until(lambda _, begin=begin: text(begin).endswith("(Pdb) "))
            program.type(line.encode() + b"\n")
        status = program.end()
    return text(), status


def is_match(printed, expected, title):
    printed, expected = (SECONDS.sub("# s", CARETS.sub("", text)).rstrip() for text in (printed, expected))
    if "in any order" in title:
        printed, expected = ("\n".join(sorted(text.splitlines())) for text in (printed, expected))
    pattern = re.escape(expected).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def write_outputs(path):
    """Run the programs of a page. Fill empty blocks of output, and print differences."""
    text = path.read_text()
    programs = [block for block in read_blocks(Document(text, str(path))) if block.language == "python" and block.is_run]
    results = [(program, *run_block(program, str(path))) for program in programs]
    for program, printed, status in reversed(results):  # from the end, so that the places of the others stay
        output = program.output
        if output is not None and not output.source.strip():
            head = text[output.start : output.end].partition("\n")[0]
            text = text[: output.start] + f"{head}\n{CARETS.sub('', printed).rstrip()}\n```" + text[output.end :]
            print(f"{path.name}: {program.title}: status {status}:\n{printed}")
        elif not program.is_expected(printed, status):
            print(f"{path.name}: {program.title}: DIFFERENT, status {status}:\n{printed}")
    path.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    for name in sys.argv[1:] or sorted(map(str, DOCS.rglob("*.md"))):
        write_outputs(Path(name))
