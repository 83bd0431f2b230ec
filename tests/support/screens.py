"""A terminal for programs that tests run: a pseudo-terminal of a given size, and an emulator that reads its output."""

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

# Makes the terminal of its stdin its controlling terminal, as a login does, and executes the program.
LOGIN = "import os, sys; os.login_tty(0); os.execvp(sys.argv[1], sys.argv[1:])"
TIMEOUT = 60.0  # seconds


class Emulator:
    def __init__(self, columns, rows):
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self.stream = pyte.ByteStream(self.screen)

    def feed(self, data):
        self.stream.feed(data)
        return self

    def rows(self):
        return [line.rstrip() for line in self.screen.display]

    def all_rows(self):
        columns = range(self.screen.columns)
        scrolled_out = ["".join(line[n].data for n in columns).rstrip() for line in self.screen.history.top]
        return scrolled_out + self.rows()

    @property
    def cursor(self):
        return self.screen.cursor.y, self.screen.cursor.x


class Program:
    """Runs `python ARGS` in a terminal of this size. A context manager."""

    def __init__(self, *args, env, columns=100, rows=30, cwd=None):
        self.controller_fd, terminal_fd = pty.openpty()
        self.resize(columns, rows)
        self.emulator = Emulator(columns, rows)
        self.output = bytearray()  # all that the program has written
        command = [sys.executable, "-c", LOGIN, sys.executable, *args]
        self.process = subprocess.Popen(command, stdin=terminal_fd, env={**env, "TERM": "xterm-256color"}, cwd=cwd)
        os.close(terminal_fd)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.controller_fd)

    def resize(self, columns, rows):
        fcntl.ioctl(self.controller_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, data):
        os.write(self.controller_fd, data)

    def read_until(self, condition=lambda rows: False):
        """Feed the emulator until the condition on its rows holds. Return False if the program ended before."""
        deadline = time.monotonic() + TIMEOUT
        with selectors.DefaultSelector() as selector:
            selector.register(self.controller_fd, selectors.EVENT_READ)
            while not condition(self.emulator.rows()):
                rows = "\n".join(self.emulator.rows())
                assert selector.select(max(0.0, deadline - time.monotonic())), f"the condition did not become true:\n{rows}"
                if not self.read_once():
                    return False
        return True

    def read_once(self):
        """Wait for output, and feed the emulator. Return False if no process has the terminal open."""
        data = b""
        with suppress(OSError):  # EIO
            data = os.read(self.controller_fd, 1 << 16)
        self.output += data
        self.emulator.feed(data)
        return bool(data)

    def end(self):
        self.read_until()
        return self.process.wait(TIMEOUT)
