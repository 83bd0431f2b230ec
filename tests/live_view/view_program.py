"""A program with a live view: `python view_program.py FUNCTION NPROCS FIFO [ARGUMENT] [OPTION=VALUE ...]`."""

import ast
import os
import signal
import sys

import mpwatch
from live_view import reporting_functions
from mpwatch.live_view import line_display, live, terminal


class SuspendWhenDrawn:
    """An observer: it suspends this program once, while the live view is in the terminal."""

    has_suspended = False

    def __call__(self, event):
        display = terminal._latest()
        if not self.has_suspended and display and display._was_drawn:
            self.has_suspended = True
            os.kill(os.getpid(), signal.SIGTSTP)


function, nprocs, fifo, *more = sys.argv[1:]
options = {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in more if "=" in word)}
args = [ast.literal_eval(word) for word in more if "=" not in word]
if options.pop("hurry", False):  # draw as often as possible
    terminal.PERIOD = line_display.LineDisplay.period = live.WAITING_PERIOD = live.FIRST_PERIOD = 0.0
    live.MAX_CPU_SHARE = 1.0
if options.pop("suspends_itself", False):
    options["on_event"] = options["on_progress"] = SuspendWhenDrawn()
    terminal.PAUSE_SECONDS = 10.0  # on a busy machine the emulator of the tests reads slowly
print("before")
result = mpwatch.run(getattr(reporting_functions, function), int(nprocs), args=(fifo, *args), grace_period=5, **options)
print("after", *result)
