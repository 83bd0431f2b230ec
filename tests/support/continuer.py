"""Have this process continued whenever it is stopped, for tests that suspend it."""

import os
import subprocess
import sys
from contextlib import contextmanager

# Continues the process whose pid it gets whenever that is stopped, until its stdin is closed.
CONTINUE = """
import os, select, signal, sys
while not select.select([0], [], [], 0.001)[0]:
    with open(f"/proc/{sys.argv[1]}/stat") as file:
        if file.read().rpartition(")")[2].split()[0] == "T":
            os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


@contextmanager
def continued():
    """Have this process continued whenever it is stopped."""
    continuer = subprocess.Popen([sys.executable, "-S", "-c", CONTINUE, str(os.getpid())], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        continuer.communicate()
