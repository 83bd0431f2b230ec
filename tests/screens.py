"""A terminal for programs that tests run: a pseudo-terminal with a size of its own, and an emulator that reads it."""

import fcntl
import os
import pty
import selectors
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pyte

# Makes the terminal that its stdin is of its own, as a login does, and becomes the program.
LOGIN = "import os, sys; os.login_tty(0); os.execvp(sys.argv[1], sys.argv[1:])"
LONG = 60.0  # seconds, in which a program must have ended


class Emulator:
    """What a terminal shows that is given these bytes, and what has scrolled out of it."""

    def __init__(self, columns, rows):
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self.stream = pyte.ByteStream(self.screen)

    def feed(self, data):
        self.stream.feed(data)
        return self

    def rows(self):
        """Of the screen, from the top."""
        return [line.rstrip() for line in self.screen.display]

    def everything(self):
        """What has scrolled out of it, and the screen."""
        columns = range(self.screen.columns)
        gone = ["".join(line[n].data for n in columns).rstrip() for line in self.screen.history.top]
        return gone + self.rows()

    @property
    def cursor(self):
        return self.screen.cursor.y, self.screen.cursor.x


class Program:
    """`python ARGS` in a terminal of that size. A context manager."""

    def __init__(self, *args, env, columns=100, rows=30):
        self.ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self.emulator = Emulator(columns, rows)
        command = [sys.executable, "-c", LOGIN, sys.executable, *args]
        self.process = subprocess.Popen(command, stdin=theirs, env={**env, "TERM": "xterm-256color"})
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)

    def resize(self, columns, rows):
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, data):
        os.write(self.ours, data)

    def read_until(self, is_there=lambda rows: False):
        """Have the emulator show what comes until its rows are so, or the program has ended. Returns whether they are."""
        deadline = time.monotonic() + LONG
        with selectors.DefaultSelector() as selector:
            selector.register(self.ours, selectors.EVENT_READ)
            while not is_there(self.emulator.rows()):
                assert selector.select(max(0.0, deadline - time.monotonic())), "it did not happen"
                data = b""
                with suppress(OSError):  # EIO: nobody has the terminal any more
                    data = os.read(self.ours, 1 << 16)
                if not data:
                    return False
                self.emulator.feed(data)
        return True

    def end(self):
        """Its exit status."""
        self.read_until()
        return self.process.wait(LONG)
