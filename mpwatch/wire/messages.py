"""The messages between watcher and rank, and their framing. Pure: bytes in, messages out.

    watcher                                    rank
       | <-------------- READY ----------------- |   it can be called
       | --- [PRINTED], DESCRIPTORS ..., CALL -> |   what and with what: see payload.py
       | <--- [FAILING,] RETURNED | RAISED | --- |   exactly one answer a call; FAILING before one that takes longer
       |              UNLOADED, then [DETAILS]   |   to tell, DETAILS after it: see exceptions.py
       | ---------------- END -----------------> |   or the watcher's end is closed
       | <------------- LINGERS ---------------- |   only if something keeps it from ending

A frame is a header and a body. A call or an answer that is large has none, and comes with the descriptor of a file instead,
see bundle.py. The header carries a time of CLOCK_MONOTONIC, which all processes of a machine share,
so that what happened in different ranks can be put in order.
"""

import enum
import struct
import time

HEADER = struct.Struct("<4sBdQ")  # mark, kind, stamp, length of the body
WHERE = struct.Struct("<iQ")  # the body of READY: the descriptor for stacks, and the main thread's identity in them
MARK = b"mpw1"
MAX_DESCRIPTORS = 250  # with one message; the kernel passes at most 253 (SCM_MAX_FD)


class MessageKind(enum.IntEnum):
    """What a message says."""

    READY = 1
    CALL = 2  # body: a bundle, or none: then the first of its descriptors is of one
    RETURNED = 3  # the same with the value
    RAISED = 4  # body: an exception told in plain data, see exceptions.py
    LOAD_FAILED = 5  # the same of the exception that loading the call raised
    SHUTDOWN = 6
    EXIT_BLOCKED = 7  # body: text, what keeps the rank from ending
    DESCRIPTORS = 8  # some of those that the next CALL needs
    FAILING = 9  # the function has just raised; what, follows
    DETAILS = 10  # body: what of the exception just told can be pickled
    STARTUP_OUTPUT = 11  # with a descriptor: what the rank's interpreter had printed, for it to pass on to its stderr


class Message:
    """One message as it was sent."""

    __slots__ = ("body", "file", "kind", "stamp")

    def __init__(self, kind: MessageKind, stamp: float, body: bytes) -> None:
        self.kind = kind
        self.stamp = stamp
        self.body = body
        self.file: memoryview | OSError | None = None  # what came in the body's place; or why it could not be had


def frame(kind: MessageKind, body: bytes = b"", stamp: float | None = None) -> bytes:
    """The bytes of a message about something that happened at this time of CLOCK_MONOTONIC; now, if none is given."""
    return HEADER.pack(MARK, kind, time.monotonic() if stamp is None else stamp, len(body)) + body


def parse_header(head: bytes | bytearray) -> tuple[MessageKind, float, int]:
    """Kind, stamp and length of the body. Raises ValueError if this is no message: somebody else wrote it."""
    mark, kind, stamp, length = HEADER.unpack_from(head)
    if mark != MARK:
        raise ValueError(f"not a message of mpwatch: {bytes(head[:32])!r}")
    return MessageKind(kind), stamp, length


class FrameDecoder:
    """Puts a stream of bytes together into messages. A message that never becomes whole is never seen."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete.

        Raises ValueError if this is no stream of messages.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= HEADER.size:
            kind, stamp, length = parse_header(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(Message(kind, stamp, bytes(self._buffer[HEADER.size : end])))
            del self._buffer[:end]
        return messages
