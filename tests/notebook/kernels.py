"""Jupyter kernels for tests, driven as the server of a notebook does it.

    a test <---- a line of JSON, and another in answer ----> this file as a program <---- ZeroMQ ----> a real kernel

The program is a process of its own because Jupyter's client leaves an event loop, threads and descriptors behind.
"""

import ast
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import ENV

PATIENCE = 60.0  # seconds that anything may take
SHOWN = {"stream", "execute_result", "display_data", "error"}


class Kernel:
    """A running kernel. It knows by the cell what was put out, as a notebook does."""

    def __init__(self):
        # Under pytest a kernel leaves its descriptors 1 and 2 as they are, which it does for no user; and Jupyter warns.
        env = {name: value for name, value in ENV.items() if name not in ("PYTEST_CURRENT_TEST", "PYTHONWARNINGS")}
        self._log = tempfile.TemporaryFile("a+")  # each writes at its end, wherever we read
        self._driver = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
        )
        self.pid = self._do("start")

    def begin(self, code):
        """Run this cell, and do not wait for its end; what comes back stands for the cell."""
        return self._do("begin", code)

    def finish(self, cell):
        """Wait until the cell has ended: all that it has put out so far."""
        return self._do("finish", cell)

    def run(self, code):
        """What this cell puts out."""
        return self.finish(self.begin(code))

    def value(self, code):
        """Of the expression that this cell ends with, and which is all that it puts out."""
        (output,) = self.run(code)
        assert output["output_type"] == "execute_result", output
        return ast.literal_eval(output["data"]["text/plain"])

    def interrupt(self):
        """As the button does."""
        self._do("interrupt")

    def restart(self, *, now):
        """As the button does; `now`: the kernel is not asked, but killed."""
        self.pid = self._do("restart", now)

    def log(self):
        """What it and its ranks have written where a server of notebooks writes its log."""
        self._log.seek(0)
        return self._log.read()

    def close(self):
        """Shut it down properly."""
        with self._log:
            self._driver.communicate(timeout=PATIENCE)

    def _do(self, what, *args):
        self._driver.stdin.write(json.dumps([what, *args]) + "\n")
        self._driver.stdin.flush()
        answer = self._driver.stdout.readline()
        assert answer, self.log()
        return json.loads(answer)


class _Driver:
    def __init__(self):
        from jupyter_client.manager import KernelManager  # which only the program needs

        # It is asked, gets SIGTERM after half of this, and SIGKILL in the end. Once anything has been spawned, it comes to
        # SIGTERM: ipykernel waits for multiprocessing's resource tracker, which ends last.
        self._manager = KernelManager(shutdown_wait_time=1.0)
        self._client = None
        self._outputs = {}
        self._ended = set()

    def start(self):
        self._manager.start_kernel(extra_arguments=["--HistoryManager.hist_file=:memory:"])
        return self._connect()

    def _connect(self):
        """What a kernel publishes before a new client's subscription has reached it is lost: ask until something comes."""
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while not self._hears():
            assert time.monotonic() < deadline, "the kernel publishes nothing"
        return self._manager.provisioner.pid

    def _hears(self):
        self._client.kernel_info()
        try:
            self._client.get_iopub_msg(timeout=0.1)
        except queue.Empty:
            return False
        return True

    def begin(self, code):
        cell = self._client.execute(code)
        self._outputs[cell] = []
        return cell

    def finish(self, cell):
        while cell not in self._ended:
            self._take(self._client.get_iopub_msg(timeout=PATIENCE))
        return self._outputs[cell]

    def interrupt(self):
        self._manager.interrupt_kernel()

    def restart(self, now):
        self._client.stop_channels()
        self._manager.restart_kernel(now=now)
        return self._connect()

    def close(self):
        if self._client is not None:
            self._client.stop_channels()
            self._manager.shutdown_kernel()

    def _take(self, message):
        kind, content, cell = message["msg_type"], message["content"], message["parent_header"].get("msg_id")
        if kind == "status" and content["execution_state"] == "idle":
            self._ended.add(cell)
        if kind not in SHOWN or cell not in self._outputs:
            return
        shown = self._outputs[cell]
        if kind == "stream" and shown and shown[-1].get("name") == content["name"]:
            shown[-1]["text"] += content["text"]
        else:
            shown.append({"output_type": kind, **content})


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # which the kernel has, too
    driver = _Driver()
    try:
        for line in sys.stdin:
            what, *args = json.loads(line)
            print(json.dumps(getattr(driver, what)(*args)), file=answers, flush=True)
    finally:
        driver.close()
