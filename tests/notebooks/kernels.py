"""Jupyter kernels for tests, controlled as a notebook server does it.

    test <---- a proxy of multiprocessing ----> Kernel, in a process of its own <---- ZeroMQ ----> real kernel

It is a separate process because Jupyter's client leaves an event loop, threads and descriptors behind.
"""

import ast
import queue
import tempfile
import time
from contextlib import suppress
from multiprocessing.managers import BaseManager

from support.process_state import SPAWN
from support.programs import ENV

TIMEOUT = 60.0  # seconds for each step
SHOWN_TYPES = {"stream", "execute_result", "display_data", "update_display_data", "error"}


class Kernel:
    """A running kernel. It assigns outputs to cells, as a notebook does."""

    def __init__(self):
        from jupyter_client.manager import KernelManager  # only this process needs it

        # It is asked, gets SIGTERM after half of this, and SIGKILL in the end. Once anything has been spawned, it comes to
        # SIGTERM: ipykernel waits for multiprocessing's resource tracker, which ends last.
        self._manager = KernelManager(shutdown_wait_time=1.0)
        self._outputs = {}
        self._ended = set()
        self._log = tempfile.TemporaryFile("a+")  # append mode: writes go to the end, wherever this process reads
        # With PYTEST_CURRENT_TEST a kernel does not redirect its descriptors 1 and 2, as it does for users. Jupyter warns.
        env = {name: value for name, value in ENV.items() if name not in ("PYTEST_CURRENT_TEST", "PYTHONWARNINGS")}
        files = {"stdout": self._log, "stderr": self._log}
        self._manager.start_kernel(extra_arguments=["--HistoryManager.hist_file=:memory:"], env=env, **files)
        self._connect()

    def _connect(self):
        """Connect a client. Messages published before its subscription has arrived are lost, so ask until one comes."""
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=TIMEOUT)
        deadline, message = time.monotonic() + TIMEOUT, None
        while message is None:
            assert time.monotonic() < deadline, "the kernel publishes no messages"
            self._client.kernel_info()
            with suppress(queue.Empty):
                message = self._client.get_iopub_msg(timeout=0.1)

    def pid(self):
        return self._manager.provisioner.pid

    def start_cell(self, code, *, has_user=True):
        """Start a cell without waiting for its end. Return its id. `has_user`: whether somebody can answer at a prompt."""
        cell = self._client.execute(code, allow_stdin=has_user)
        self._outputs[cell] = []
        return cell

    def wait_for_cell(self, cell):
        """Wait until the cell has ended. Return all its outputs so far."""
        while cell not in self._ended:
            self._handle_message(self._client.get_iopub_msg(timeout=TIMEOUT))
        return self._outputs[cell]

    def outputs_of(self, cell):
        """Return the outputs of a cell so far, without waiting for its end."""
        self._read_messages()
        return self._outputs[cell]

    def run(self, code, **options):
        """Run a cell and return its outputs."""
        return self.wait_for_cell(self.start_cell(code, **options))

    def value(self, code):
        """Return the value of the expression at the end of this cell, which must be its only output."""
        (output,) = self.run(code)
        assert output["output_type"] == "execute_result", output
        return ast.literal_eval(output["data"]["text/plain"])

    def converse(self, code, answers):
        """Run a cell that reads lines. Return its outputs as one text, with the prompts and the answers in it."""
        cell, answers = self.start_cell(code), iter(answers)
        deadline = time.monotonic() + TIMEOUT
        while cell not in self._ended:
            assert time.monotonic() < deadline, self._outputs[cell]
            with suppress(queue.Empty):
                prompt = self._client.get_stdin_msg(timeout=0.01)["content"]["prompt"]
                self._read_messages()
                answer = next(answers)
                self._outputs[cell].append({"text": f"{prompt}{answer}\n"})
                self._client.input(answer)
            self._read_messages()
        return "".join(output["text"] if "text" in output else output["evalue"] for output in self._outputs[cell])

    def interrupt(self):
        """Interrupt the kernel, as the button does."""
        self._manager.interrupt_kernel()

    def restart(self, *, now):
        """Restart the kernel, as the button does. `now`: kill the kernel instead of asking it to end."""
        self._client.stop_channels()
        self._manager.restart_kernel(now=now)
        self._connect()

    def log(self):
        """Return what the kernel and its ranks have written to the log of the notebook server."""
        self._log.seek(0)
        return self._log.read()

    def close(self):
        """Ask the kernel to end."""
        self._client.stop_channels()
        self._manager.shutdown_kernel()

    def _read_messages(self):
        with suppress(queue.Empty):
            while True:
                self._handle_message(self._client.get_iopub_msg(timeout=0.05))

    def _handle_message(self, message):
        kind, content, cell = message["msg_type"], message["content"], message["parent_header"].get("msg_id")
        if kind == "status" and content["execution_state"] == "idle":
            self._ended.add(cell)
        if kind not in SHOWN_TYPES or cell not in self._outputs:
            return
        outputs = self._outputs[cell]
        if kind == "stream" and outputs and outputs[-1].get("name") == content["name"]:
            outputs[-1]["text"] += content["text"]
        elif kind == "update_display_data":
            (shown,) = (output for output in outputs if output.get("transient") == content["transient"])
            shown["data"] = content["data"]
        else:
            outputs.append({"output_type": kind, **content})


class _Processes(BaseManager):
    pass


_Processes.register("Kernel", Kernel)


def run_kernel(definitions):
    """Yield a kernel in which this cell has run. A fixture."""
    with _Processes(ctx=SPAWN) as processes:
        kernel = processes.Kernel()
        assert kernel.run(definitions) == []
        yield kernel
        kernel.close()
