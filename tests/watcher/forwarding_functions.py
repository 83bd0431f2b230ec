"""Functions for ranks in tests of `forward_signals`. A rank imports this module, so it imports little."""

import os
import signal
import subprocess
import sys

import mpwatch


def count_signals(barrier, catching):
    """Count SIGUSR2 until one has come, on the ranks in `catching`. The other ranks have no handler for it, and wait."""
    received = []
    is_catching = mpwatch.current_worker().rank in catching
    if is_catching:
        signal.signal(signal.SIGUSR2, lambda *_: received.append(1))
    barrier.wait()  # with the thread that sends the signal
    while is_catching and not received:
        signal.sigtimedwait([], 0.01)
    barrier.wait()
    return len(received)


def keep_helper(barrier):
    """Return whether a helper without a handler is still alive when this rank has got SIGUSR2."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as helper:
        assert os.getpgid(helper.pid) == os.getpgrp()
        count_signals(barrier, [0])
        is_alive = helper.poll() is None
        helper.kill()
    return is_alive
