"""A program in a terminal that shows prompts of pdb."""

import json
import re

from support.programs import ENV, TESTS
from support.screens import Program

PROMPT = re.compile(r"\(rank \d+[^()]*\) \(Pdb\)$")


class DebuggedProgram(Program):
    """Runs `python PROGRAM FUNCTION RANKS OPTIONS`: see tests/watcher/debugger/debugged_program.py.

    `has_shell`: whether a shell with job control starts it.
    """

    def __init__(self, program, function, ranks, env=ENV, *, has_shell=False, **options):
        shell = [str(TESTS / "support" / "job_shell.py")] if has_shell else []
        command = [*shell, str(program), function, json.dumps(ranks), json.dumps(options)]
        super().__init__(*command, env=env, columns=140, rows=300)

    def wait_for_prompt(self, after=-1):
        """Wait for a prompt below this row of the screen. Return its text."""
        screen = self.emulator.screen

        def is_at_prompt(rows):
            return screen.cursor.y > after and PROMPT.search(rows[screen.cursor.y])

        assert self.read_until(is_at_prompt), "\n".join(self.rows())
        return self.emulator.rows()[screen.cursor.y]

    def ask(self, line):
        """Type a line at the prompt, and wait for the next prompt. Return the rows between the two, and the next prompt."""
        before = self.emulator.cursor[0]
        self.type(line.encode() + b"\r")
        self.wait_for_prompt(after=before)
        return self.emulator.rows()[before + 1 : self.emulator.cursor[0] + 1]

    def step_until(self, row):
        """Step until pdb shows this row. Return the rows after the last step. (Python 3.13 stops at `breakpoint()` itself.)"""
        while row not in (rows := self.ask("n")):
            pass
        return rows

    def finish(self, line):
        self.type(line.encode() + (b"\r" if line.isprintable() else b""))
        assert self.end() == 0, "\n".join(self.rows())
        return self.rows()

    def rows(self):
        return [row for row in self.emulator.rows() if row]
