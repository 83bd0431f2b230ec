"""The messages between the watcher and a rank, and the frames in which they are sent. This module does no I/O.

    watcher                                             rank
       | <----------------- READY ---------------------- |   the rank can be called
       | --- [DESCRIPTORS ...] CALL -------------------> |   one call: see pickling/call_payload.py
       | <-- [ITEM ...] -------------------------------- |   in a call of `mpwatch.map`: one value for each item
       | <-- RETURNED ---------------------------------- |   the answer, if the function returned
       | <-- FAILING, RAISED | LOAD_FAILED, ... -------- |   the answer, if it raised: see exceptions/encoder.py
       | <-- DETAILS, [LOCALS] ------------------------- |   more about the exception that was just sent
       | <----------------- [DEBUGGER] ----------------- |   at the first breakpoint, from any thread
       | <---------------- [COLLECTIVES] --------------- |   at the first process group, from any thread
       | <----------- [CALLED_COLLECTIVES ...] --------- |   when asked, from a thread; and after FAILING
       | <------------- [STOP_REQUESTED ...] ----------- |   mpwatch.request_stop(), from any thread
       | ----------------- SHUTDOWN -------------------> |   alternatively the watcher closes its end of the channel
       | <-------------- [EXIT_BLOCKED] ---------------- |   only if threads or processes keep the rank from exiting

A rank sends exactly one answer to each call: RETURNED, RAISED or LOAD_FAILED.

A message is sent as a frame, which is a header and a body. The pickle of a large call or return value is not in the body,
but in a file, whose descriptor is sent with the frame (see pickling/packed.py).

The header of a frame contains the time of an event, by the clock CLOCK_MONOTONIC. All processes of a machine share this
clock, so the watcher can sort the events of different ranks by time.
"""

import enum
import struct

from mpwatch.os_support.clock import monotonic

HEADER = struct.Struct("<4sBdQ")  # magic number, kind, time, length of the body
CALL_NUMBER = struct.Struct("<Q")  # at the start of the body of CALL
MAIN_THREAD = struct.Struct("<Q")  # the main thread's identity in stack dumps
STACKS_END = b"(end of the stacks)\n"  # a rank writes this line into its stack pipe after the stacks of all threads
PDB_PROMPT = "(Pdb) "  # ends what a rank sends over the socket of DEBUGGER, unless pdb asks for something else
MAGIC = b"mpw1"
MAX_DESCRIPTORS = 250  # in one message; the kernel passes at most 253 (SCM_MAX_FD)


class MessageKind(enum.IntEnum):
    """The kind of a message, and its body."""

    READY = 1  # MAIN_THREAD
    CALL = 2  # CALL_NUMBER, then the packed call; if there is only the number, the first descriptor is its file
    RETURNED = 3  # the packed return value; if it is empty, a descriptor is its file
    RAISED = 4  # an encoded exception: the "plain" message of exceptions/encoder.py
    LOAD_FAILED = 5  # the same for an exception that was raised while the rank unpickled the call
    SHUTDOWN = 6
    EXIT_BLOCKED = 7  # text: the threads and processes that keep the rank from exiting
    DESCRIPTORS = 8  # empty; the message passes some of the descriptors of the next CALL
    FAILING = 9  # empty; the function has just raised. RAISED or LOAD_FAILED follows
    DETAILS = 10  # the pickled parts of the exception just sent: the "details" message of exceptions/encoder.py
    LOCALS = 12  # the local variables of the exception just sent: the "locals" message of exceptions/encoder.py
    DEBUGGER = 13  # why it is opened; its descriptor is the watcher's end of a socket for pdb: see worker/debugger.py
    COLLECTIVES = 14  # empty; its descriptor is the watcher's end of a socket: see worker/collectives.py
    CALLED_COLLECTIVES = 15  # RankCollectives.to_json(), or empty if this version of torch records something else
    STOP_REQUESTED = 16
    ITEM = 17  # as RETURNED


class Message:
    """A received message.

    If its content came in a file, `file` is this content, or the OSError of reading it, and the body is empty. The receiver
    closes `fd`, which comes with DEBUGGER and COLLECTIVES.
    """

    def __init__(self, kind: MessageKind, stamp: float, body: bytes) -> None:
        self.kind = kind
        self.stamp = stamp
        self.body = body
        self.file: memoryview | OSError | None = None
        self.fd = -1


def encode_frame(kind: MessageKind, body: bytes = b"", stamp: float | None = None) -> bytes:
    """Return the bytes of a message. `stamp` is the time of the event by CLOCK_MONOTONIC. The default is now."""
    return HEADER.pack(MAGIC, kind, monotonic() if stamp is None else stamp, len(body)) + body


def encode_call(number: int, body: bytes) -> bytes:
    return encode_frame(MessageKind.CALL, CALL_NUMBER.pack(number) + body)


class FrameDecoder:
    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are now complete. Raises ValueError if the bytes are not messages of mpwatch."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= HEADER.size:
            magic, kind, stamp, length = HEADER.unpack_from(self._buffer)
            if magic != MAGIC:
                raise ValueError(f"not a message of mpwatch: {bytes(self._buffer[:32])!r}")
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(Message(MessageKind(kind), stamp, bytes(self._buffer[HEADER.size : end])))
            del self._buffer[:end]
        return messages
