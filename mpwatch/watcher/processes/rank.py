"""One rank: its process, its channel, its pipe for stacks, and what the watcher has seen of it. Runs in the watcher thread.

A restarted rank is a new Rank.

watcher <--- channel (socket pair): messages, and descriptors of files ---> rank
watcher <--- stack pipe: stack dumps --- rank
watcher <--- startup file: stderr until the rank is ready --- rank
watcher <--- sentinel of the process: it is readable when the rank is dead
"""

import errno
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.descriptors import (
    MSG_NOSIGNAL,
    map_private,
    receive_with_fds,
    seal,
)
from mpwatch.os_support.processes import has_descriptor, is_ending, read_process_state
from mpwatch.os_support.signals import NATIVE_DUMP_SIGNAL, PYTHON_DUMP_SIGNAL
from mpwatch.watcher.diagnosis.observations import RankObservations
from mpwatch.watcher.diagnosis.stack_dumps import StackDumpParser
from mpwatch.watcher.machine.transitions import RankPhase
from mpwatch.watcher.output.pipes import StdioFds
from mpwatch.watcher.processes.collective_socket import CollectiveSocket
from mpwatch.watcher.processes.process import RankPopen
from mpwatch.watcher.processes.rank_environment import RankSetup
from mpwatch.watcher.processes.selector import Selector
from mpwatch.wire.messages import (
    MAIN_THREAD,
    MAX_DESCRIPTORS,
    FrameDecoder,
    Message,
    MessageKind,
    encode_call,
    encode_frame,
)
from mpwatch.wire.pickling.call_payload import Payload
from mpwatch.wire.resource_errors import with_remedy
from mpwatch.wire.shared_memory import Slot

READ_SIZE = 1 << 18
MAX_STARTUP_OUTPUT = 1 << 20  # bytes
DRAIN_LIMIT = 1 << 26  # bytes to read from one channel in a wake-up, at most, so that the others are read, too
# A return value in a file is copied up to this number of bytes, and mapped above it. A copy is faster than the page faults
# of a mapping. Also, a process has at most 65,530 mappings (vm.max_map_count): a caller that kept so many return values of a
# group could not start a thread.
MAX_COPY_SIZE = 1 << 20


class Rank:
    """Owned by the event loop. It lives from the start of the process until another process takes its place.

    A rank of a run keeps its last `call`; else it is None while the rank is idle. `observations` are of the present call.
    With `awaits_dump`, the machine waits for StackDumped. Once `is_reaped`, the process is gone, or is not waited for any
    longer.
    """

    def __init__(
        self,
        setup: RankSetup,
        process: RankPopen,
        channel: socket.socket,
        stack_pipe: int,
        selector: Selector[Any],
        *,
        rank_stack_fd: int,
        startup_file: FileIO,
        slot: Slot,
        stdio: StdioFds,
    ) -> None:
        self.setup = setup
        self.number = setup.worker.rank
        self.call: Any = None  # or a Call, whose module imports this one
        self.is_reaped = False
        self.started_at = self.run_started_at = monotonic()  # of the process; of the run or the call
        self.process = process
        self.observations = RankObservations(setup.worker, pid=process.pid, stderr_tail=stdio.stderr_tail)
        self.stdio, self.slot = stdio, slot
        self.stack_parser = StackDumpParser()
        self.collective_socket = CollectiveSocket(selector)
        self.awaits_dump = False
        self.channel = channel
        self._frames = FrameDecoder()
        # Descriptors of files that have arrived before the end of their message, in order; -1 for one that was lost.
        self._files: list[int] = []
        self._stack_pipe, self._rank_stack_fd = stack_pipe, rank_stack_fd  # here, and in the rank
        self._startup_file = startup_file
        self._selector = selector

    @property
    def is_ready(self) -> bool:
        return self.observations.was_ready

    @property
    def phase(self) -> RankPhase:
        if self.call is not None:
            phase: RankPhase = self.call.machine.phase_table.phases[self.number]
            return phase
        return RankPhase.READY if self.is_ready else RankPhase.STARTING

    def register(self, on_message: Callable[[], Any], on_stack_data: Callable[[], Any], on_exit: Callable[[], Any]) -> None:
        self._selector.add(self.channel.fileno(), on_message)
        self._selector.add(self._stack_pipe, on_stack_data)
        self._selector.add(self.process.sentinel, on_exit)

    def reset_observations(self) -> None:
        before = self.observations
        self.observations = RankObservations(
            before.worker, pid=before.pid, stderr_tail=before.stderr_tail, was_ready=self.is_ready
        )
        self.stack_parser.end_dump()
        self.awaits_dump = False

    def close(self) -> None:
        self._close_channel()
        self.collective_socket.close()
        self._selector.remove(self._stack_pipe)
        self._selector.remove(self.process.sentinel)
        os.close(self._stack_pipe)
        self._startup_file.close()

    def _close_channel(self) -> None:
        self._selector.remove(self.channel.fileno())
        self.channel.close()
        while self._files:
            _close(self._files.pop())

    def send(self, kind: MessageKind, fds: Sequence[int] = ()) -> None:
        self.send_frame(encode_frame(kind), fds)

    def send_call(self, number: int, payload: Payload) -> None:
        """Raises LaunchError."""
        try:
            self.send_frame(encode_call(number, payload.body), payload.fds)
        except OSError as error:
            raise LaunchError(with_remedy(f"the call could not be sent to rank {self.number}", error)) from error

    def interrupt_call(self, number: int) -> None:
        """Send SIGINT. It names the call, so that the rank ignores it if it comes in the next one."""
        self.slot.record_interrupt(number)
        self.process.send_signal(signal.SIGINT)

    def request_visit(self) -> bool:
        """Make the rank open a prompt of its debugger for another program. Return False if it cannot."""
        is_in_function = self.call is not None and self.observations.answer is None
        if PYTHON_DUMP_SIGNAL is None or not is_in_function or not self._can_dump_stacks(PYTHON_DUMP_SIGNAL):
            return False
        self.slot.request_visit()
        self.process.send_signal(PYTHON_DUMP_SIGNAL)
        return True

    def send_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message of at most a few thousand bytes. Never blocks, since the buffer is empty then. Raises OSError."""
        if self.channel.fileno() == -1:
            return
        # The sentinel shows that a rank is dead. If a live rank has closed its end of the channel, a timeout stops it.
        with suppress(BrokenPipeError, ConnectionResetError):
            while len(fds) > MAX_DESCRIPTORS:
                self._send(encode_frame(MessageKind.DESCRIPTORS), fds[:MAX_DESCRIPTORS])
                fds = fds[MAX_DESCRIPTORS:]
            self._send(frame, fds)

    def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        if fds:
            sent = socket.send_fds(self.channel, [frame], list(fds), MSG_NOSIGNAL)
        else:
            sent = self.channel.send(frame, MSG_NOSIGNAL)
        if sent < len(frame):
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))  # on a system with smaller socket buffers

    def read_messages(self) -> list[Message]:
        """Read the messages that have arrived. Close the channel after an error, or if the rank has closed its end."""
        messages: list[Message] = []
        if self.channel.fileno() == -1:
            return messages
        try:
            for _ in range(DRAIN_LIMIT // READ_SIZE):
                data, files, is_cut = receive_with_fds(self.channel, READ_SIZE, 1)
                self._add_received(messages, data, files, is_cut=is_cut)
                if len(data) < READ_SIZE and not files:  # nothing is left; a read also ends after a descriptor
                    break
        except BlockingIOError:
            pass
        except (OSError, ValueError):  # a dead rank has reset it, or another program has written to it
            self._close_channel()
        return messages

    def is_dying(self) -> bool:
        """Return whether the kernel is ending the rank, and the end of its channel does not wait to be read."""
        if not is_ending(self.process.pid):
            return False
        with suppress(OSError):  # BlockingIOError: the channel is open
            return bool(self.channel.recv(1, socket.MSG_PEEK))
        return True

    def _add_received(self, messages: list[Message], data: bytes, files: list[int], *, is_cut: bool) -> None:
        """No data means that the rank has closed its end."""
        self._files += files or [-1] * is_cut
        if not data:
            self._close_channel()
        for message in self._frames.feed(data):
            self._read_returned_file(message)
            if message.kind in (MessageKind.DEBUGGER, MessageKind.COLLECTIVES) and self._files:
                message.fd = self._files.pop(0)
            messages.append(message)
        if len(self._files) > 1:
            raise ValueError("more files than messages")

    def _read_returned_file(self, message: Message) -> None:
        """If the rank has sent a return value in a file, read the file at once, so that no descriptor stays open."""
        if message.kind in (MessageKind.RETURNED, MessageKind.ITEM) and not message.body:
            fd = self._files.pop(0) if self._files else -1
            try:
                message.file = _read_file(fd)
            except (OSError, ImportError, MemoryError) as error:  # ImportError: no descriptor to open a module's file
                message.file = OSError(with_remedy("the watcher could not receive its return value", error))
            finally:
                _close(fd)

    def on_ready(self, body: bytes) -> None:
        (self.stack_parser.main_thread,) = MAIN_THREAD.unpack(body)
        self.observations.was_ready = True
        self._startup_file.close()

    def read_startup_output(self) -> str:
        """Return what the rank's interpreter has printed, if the rank never became ready."""
        if self._startup_file.closed:
            return ""
        fd = self._startup_file.fileno()
        start = max(0, os.fstat(fd).st_size - MAX_STARTUP_OUTPUT)
        return os.pread(fd, MAX_STARTUP_OUTPUT, start).decode(errors="replace")

    def request_stack_dump(self) -> bool:
        """Send the rank a signal that asks for the stacks of its threads. Return False if the rank cannot write stacks."""
        signum = next(filter(self._can_dump_stacks, (PYTHON_DUMP_SIGNAL, NATIVE_DUMP_SIGNAL)), None)
        if signum is None:
            return False
        self.read_stack_pipe()
        self.stack_parser.start_dump()
        self.process.send_signal(signum)
        return True

    def request_native_stack_dump(self, request: int) -> None:
        """Make faulthandler write the main thread's stack, if the rank has not begun to answer this stack request.

        While the main thread runs C code, Python runs no signal handler. If it does run Python code, as in the handler that
        answers, faulthandler can crash it. It writes the stack of the thread that gets the signal: with Linux, of the main
        thread, unless another signal is waiting for that.
        """
        if self.observations.signals_sent or not self.stack_parser.is_unanswered(request):
            return
        if NATIVE_DUMP_SIGNAL is not None and self._can_dump_stacks(NATIVE_DUMP_SIGNAL):
            self.process.send_signal(NATIVE_DUMP_SIGNAL)

    def _can_dump_stacks(self, signum: int | None) -> bool:
        """Not a stopped rank, nor one that has replaced itself with another program. One that has closed its end of the
        stack pipe must not: the descriptor may belong to another file now.
        """
        if signum is None:
            return False
        state = read_process_state(self.process.pid)
        if state is None:  # there is no /proc; or the process has just ended, and a signal does nothing
            return self.is_ready and self.channel.fileno() != -1
        self.observations.process_state = state.letter
        if state.letter in "TtZX" or not state.catches(signum):
            return False
        return has_descriptor(self.process.pid, self._rank_stack_fd, self._stack_pipe)

    def read_stack_pipe(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(DRAIN_LIMIT // READ_SIZE):
                data = os.read(self._stack_pipe, READ_SIZE)
                if not data:
                    self._selector.remove(self._stack_pipe)
                    break
                self.stack_parser.feed(data)


def _read_file(fd: int) -> memoryview:
    if fd == -1:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    seal(fd)
    size = os.fstat(fd).st_size
    return map_private(fd, size) if size > MAX_COPY_SIZE else memoryview(os.pread(fd, size, 0))


def _close(fd: int) -> None:
    if fd != -1:
        os.close(fd)
