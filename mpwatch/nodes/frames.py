"""Messages over TCP: framed, limited in size, and signed if the job has a secret.

    each end at first     mpwatch/1 NONCE KEY-ID          one line of text
    then                  length, HMAC-SHA256, message    the HMAC only with a secret

The key of each direction is made of the secret and of both nonces, and each HMAC includes the number of the frame. So no
frame is accepted that was recorded in another connection, or earlier or at the other end of this one. Sizes and HMACs are
checked before a message is read. A stranger can make this end keep FIRST_BYTES and what was read at once, at most.
"""

import asyncio
import hmac
import secrets
import struct
from collections.abc import Collection, Iterator

from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.os_support.clock import monotonic

FIRST_BYTES = 1 << 14  # of the first frame of a node, which says who it is
MAX_BYTES = 1 << 21  # of any other frame; a decision has at most 64 failures, of 0.5 MiB together
MAX_LINK_BYTES = (1 << 32) - 1  # of what a node sends to the driver that has started it
LINGER_SECONDS = 2.0  # for the other end to read the last message
PREFIX = b"mpwatch/1 "
NONCE_LENGTH, KEY_ID_LENGTH = 32, 8  # characters
NO_KEY_ID = b"-" * KEY_ID_LENGTH
GREETING_LENGTH = len(PREFIX) + NONCE_LENGTH + 1 + KEY_ID_LENGTH + 1
LENGTH = struct.Struct("!I")
COUNTER = struct.Struct("!Q")
TAG_LENGTH = 32


class SecretMismatchError(InvalidMessageError):
    """The two ends have not the same secret, or only one of them has one."""


class ForeignProgramError(InvalidMessageError):
    """The other end is not mpwatch."""


class Framing:
    """One end of one connection: what is received in, messages out, and the reverse. Pure. `secret` may be empty."""

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        self._secret, self._is_server = secret, is_server
        self._key_id = _compute_hmac(secret, b"key id").hex()[:KEY_ID_LENGTH].encode() if secret else NO_KEY_ID
        self._nonce = secrets.token_hex(NONCE_LENGTH // 2).encode()
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        self._data = bytearray()
        self.is_greeted = False
        self.limit = FIRST_BYTES if is_server else MAX_BYTES

    @property
    def greeting(self) -> bytes:
        return PREFIX + self._nonce + b" " + self._key_id + b"\n"

    def encode(self, data: bytes) -> bytes:
        """Return a frame. The other end must have sent its greeting."""
        assert self.is_greeted
        tag = _sign(self._send_key, self._sent, data) if self._secret else b""
        self._sent += 1
        return LENGTH.pack(len(data)) + tag + data

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what is complete now. Raises InvalidMessageError; then the connection must be closed."""
        self._data += data
        if self.is_greeted or self._read_greeting():
            while (body := self._read_frame()) is not None:
                yield body

    def _read_greeting(self) -> bool:
        start = bytes(self._data[: len(PREFIX)])
        if not PREFIX.startswith(start):
            raise ForeignProgramError(f"it is not mpwatch: it has sent {bytes(self._data[:40])!r}")
        if len(self._data) < GREETING_LENGTH:
            return False
        nonce, _, key_id = bytes(self._data[len(PREFIX) : GREETING_LENGTH - 1]).partition(b" ")
        if len(nonce) != NONCE_LENGTH or len(key_id) != KEY_ID_LENGTH:
            raise ForeignProgramError("it is another version of mpwatch")
        del self._data[:GREETING_LENGTH]
        self._check_key_id(key_id)
        nonces = nonce + self._nonce if not self._is_server else self._nonce + nonce  # that of the server comes first
        keys = [_compute_hmac(self._secret, sender, nonces) for sender in (b"server", b"node")]
        self._send_key, self._receive_key = keys if self._is_server else reversed(keys)
        self.is_greeted = True
        return True

    def _check_key_id(self, key_id: bytes) -> None:
        if key_id != self._key_id:
            how = "signed with another secret than this node's"
            if key_id == NO_KEY_ID:
                how = "not signed, but this node has a secret"
            elif not self._secret:
                how = "signed, but this node has no secret"
            raise SecretMismatchError(f"{how}: give all nodes the same secret")

    def _read_frame(self) -> bytes | None:
        if len(self._data) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._data)
        if length > self.limit:
            raise InvalidMessageError(f"a message of {length} bytes is too large")
        start = LENGTH.size + (TAG_LENGTH if self._secret else 0)
        if len(self._data) < start + length:
            return None
        tag, body = bytes(self._data[LENGTH.size : start]), bytes(self._data[start : start + length])
        del self._data[: start + length]
        if self._secret and not hmac.compare_digest(tag, _sign(self._receive_key, self._received, body)):
            raise InvalidMessageError("wrongly signed: it was altered, or copied from another connection")
        self._received += 1
        return body


def _compute_hmac(key: bytes, *parts: bytes) -> bytes:
    """The parts and their lengths, so that `b"ab", b"c"` and `b"a", b"bc"` have unequal HMACs."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def _sign(key: bytes, number: int, data: bytes) -> bytes:
    return _compute_hmac(key, COUNTER.pack(number), data)


class Loop(asyncio.SelectorEventLoop):
    """The event loop of a thread that exchanges messages, with the clock of os_support/clock.py, which no test freezes."""

    def time(self) -> float:
        return monotonic()


class Connection(asyncio.Protocol):
    """One end of a connection, in the thread of its event loop. `end` is why it has ended, or empty.

    `handle_message` is called for each message, and `handle_end` once when the connection has ended.
    """

    transport: asyncio.Transport

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        self.framing = Framing(secret, is_server=is_server)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end = ""

    def handle_message(self, data: bytes) -> None:
        """Raises InvalidMessageError, which ends the connection."""
        raise NotImplementedError

    def handle_end(self) -> None:
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.framing.greeting)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self.framing.feed(data):
                self.handle_message(body)
        except InvalidMessageError as error:
            self.handle_invalid(error)

    def handle_invalid(self, error: InvalidMessageError) -> None:
        self.abort(f"it has sent what cannot be read: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        reason = error.strerror if isinstance(error, OSError) else None
        self.end = self.end or reason or "it has closed the connection"
        self.closed.set_result(None)
        self.handle_end()

    def send(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(self.framing.encode(data))

    def abort(self, reason: str) -> None:
        self.end = self.end or reason
        self.transport.abort()


async def close_all(connections: Collection[Connection]) -> None:
    """Send what was not sent yet, if the other ends read it soon, and close the connections."""
    for connection in connections:
        connection.transport.close()
    if connections:
        await asyncio.wait([connection.closed for connection in connections], timeout=LINGER_SECONDS)
    for connection in connections:
        connection.transport.abort()
    await asyncio.sleep(0)  # the event loop closes the sockets now
