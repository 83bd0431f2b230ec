"""One rank as the watcher has it: its process, its channel, its stack pipe, and what was seen of it."""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mpwatch.options.worker_info import Worker
from mpwatch.os_support.descriptors import MSG_NOSIGNAL, anonymous_file, map_private, receive, seal, write_all
from mpwatch.os_support.processes import has_descriptor, state_of_process
from mpwatch.os_support.signals import DUMP_SIGNAL
from mpwatch.watcher.diagnosis.observations import RankObservations
from mpwatch.watcher.diagnosis.stack_dumps import StackDumpParser
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.output.pipes import StdioFds
from mpwatch.watcher.processes.process import WatchedProcess
from mpwatch.watcher.processes.selector import Selector
from mpwatch.wire.messages import MAX_DESCRIPTORS, WHERE, FrameDecoder, Message, MessageKind, frame
from mpwatch.wire.resource_errors import with_remedy

READ_SIZE = 1 << 18
DRAIN_LIMIT = 1 << 26  # bytes read of one channel before the others have their turn
# Bytes up to which a value in a file is copied. That is quicker than the page faults of a mapping, and a process has no more
# than 65,530 mappings (vm.max_map_count): the caller may keep as many values of a group, and then start no thread any more.
COPIED_UP_TO = 1 << 20


class RankHandle:
    """Owns the watcher's ends of what connects it with a rank."""

    def __init__(
        self,
        worker: Worker,
        process: WatchedProcess,
        channel: socket.socket,
        pipe_fd: int,
        *,
        stdio: StdioFds,
        deferred_log: DeferredLog,
    ) -> None:
        self._deferred_log = deferred_log
        self.generation = 0  # which of the rank's lives it is
        self.process = process
        self.observations = RankObservations(worker, pid=process.child_pid, stderr_tail=stdio.stderr_tail)
        self.stdio = stdio
        self.stacks = StackDumpParser()
        self.calls = 0  # that were sent
        self._channel = channel
        self._frames = FrameDecoder()
        self._files: list[int] = []  # that have come over it before their messages, in order; -1 for one that was lost
        self._pipe_fd = pipe_fd
        self._far_pipe_fd = -1  # the rank's number for its end of the pipe, once it is ready
        self._selector: Selector[Any] | None = None
        self._waited_for: set[int] = set()

    def wait_at(
        self,
        selector: Selector[Any],
        on_message: Callable[[], Any],
        on_stacks: Callable[[], Any],
        on_death: Callable[[], Any],
    ) -> None:
        """Have the gate call these when there is something to read."""
        self._selector = selector
        for fd, handler in (
            (self._channel.fileno(), on_message),
            (self._pipe_fd, on_stacks),
            (self.process.child.sentinel, on_death),
        ):
            selector.add(fd, handler)
            self._waited_for.add(fd)

    def begin_call(self) -> RankObservations:
        """What was seen in an earlier call is none of the next."""
        before = self.observations
        self.observations = RankObservations(
            before.worker, pid=before.pid, stderr_tail=before.stderr_tail, was_ready=before.was_ready
        )
        self.stacks.forget()
        before.stderr_tail.forget()
        return self.observations

    def _wait_no_more(self, fd: int) -> None:
        if fd in self._waited_for and self._selector is not None:
            self._waited_for.remove(fd)
            self._selector.remove(fd)

    def close(self) -> None:
        """Give the descriptors back; the process is the crew's to bury."""
        self._close_channel()
        for fd in list(self._waited_for):
            self._wait_no_more(fd)
        os.close(self._pipe_fd)

    def _close_channel(self) -> None:
        self._wait_no_more(self._channel.fileno())
        self._channel.close()
        while self._files:
            _close(self._files.pop())

    def send(self, kind: MessageKind, fds: Sequence[int] = (), body: bytes = b"") -> None:
        """A few thousand bytes: they fit into the empty buffer of the channel, so this does not block. Raises OSError."""
        if self._channel.fileno() == -1:
            return
        # a rank that has closed its end, or died, is heard of otherwise
        with suppress(BrokenPipeError, ConnectionResetError):
            while len(fds) > MAX_DESCRIPTORS:
                self._send(MessageKind.DESCRIPTORS, fds[:MAX_DESCRIPTORS])
                fds = fds[MAX_DESCRIPTORS:]
            self._send(kind, fds, body)

    def send_file(self, kind: MessageKind, data: bytes) -> None:
        """Any number of bytes, in a file without a name. Raises OSError."""
        with anonymous_file("mpwatch-printed") as file:
            write_all(file.fileno(), data)
            self.send(kind, [file.fileno()])

    def _send(self, kind: MessageKind, fds: Sequence[int], body: bytes = b"") -> None:
        data = frame(kind, body)
        if fds:
            sent = socket.send_fds(self._channel, [data], list(fds), MSG_NOSIGNAL)
        else:
            sent = self._channel.send(data, MSG_NOSIGNAL)
        if sent < len(data):
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))  # a system whose sockets hold less

    def read(self) -> list[Message]:
        """What has come over the channel. Closes it if there will be no more."""
        messages: list[Message] = []
        if self._channel.fileno() == -1:
            return messages
        try:
            for _ in range(DRAIN_LIMIT // READ_SIZE):
                data, files, is_cut = receive(self._channel, READ_SIZE, 1)
                self._files += files or [-1] * is_cut
                if not data:
                    self._close_channel()
                    break
                for message in self._frames.feed(data):
                    self._take_in(message)
                    messages.append(message)
                if len(self._files) > 1:
                    raise ValueError("more files than messages")
                if len(data) < READ_SIZE and not files:  # there was no more; a file ends what is read at once
                    break
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:  # reset by a dead rank, or written to by somebody who is none
            self._deferred_log.debug("channel of rank %d closed: %s", self.observations.worker.rank, error)
            self._close_channel()
        return messages

    def _take_in(self, message: Message) -> None:
        """What comes in a file is taken out at once, so that it keeps no descriptor until it is asked for."""
        if message.kind is MessageKind.RETURNED and not message.body:
            fd = self._files.pop(0) if self._files else -1
            try:
                message.file = _contents(fd)
            except (OSError, ImportError, MemoryError) as error:  # ImportError: no descriptor for a module's file
                message.file = OSError(with_remedy("its return value could not be taken in", error))
            finally:
                _close(fd)

    def becomes_ready(self, where: bytes) -> None:
        """It has a stderr of its own from now on, and the pipe is for stacks."""
        self._far_pipe_fd, main_thread = WHERE.unpack(where)
        self.read_stack_pipe()
        self.observations.was_ready = True
        self.stacks.becomes_ready(main_thread)

    def ask_for_stacks(self) -> bool:
        """Have the rank write its stacks. False if it will not: it is stopped, or is another program by now, or has closed
        its end of the pipe, and may have opened something else in its place.
        """
        state = state_of_process(self.process.child_pid)
        if state is None or DUMP_SIGNAL is None:
            return False
        self.observations.process_state = state.letter
        if state.letter in "TtZX" or not state.catches(DUMP_SIGNAL):
            return False
        if not has_descriptor(self.process.child_pid, self._far_pipe_fd, self._pipe_fd):
            return False
        self.read_stack_pipe()
        self.stacks.ask()
        self.observations.was_asked = True
        self.process.signal_rank(DUMP_SIGNAL)
        return True

    def read_stack_pipe(self) -> None:
        """What has come over the stack pipe."""
        with suppress(BlockingIOError):
            for _ in range(DRAIN_LIMIT // READ_SIZE):
                data = os.read(self._pipe_fd, READ_SIZE)
                if not data:
                    self._wait_no_more(self._pipe_fd)
                    break
                self.stacks.feed(data)


def _contents(fd: int) -> memoryview:
    if fd == -1:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    seal(fd)
    size = os.fstat(fd).st_size
    return map_private(fd, size) if size > COPIED_UP_TO else memoryview(os.pread(fd, size, 0))


def _close(fd: int) -> None:
    if fd != -1:
        os.close(fd)
