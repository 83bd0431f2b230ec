"""`SignedConnection` is one end of a link between the driver and a node: pickles over TCP, each of them signed.

multiprocessing checks the secret only when a connection begins. Here the HMAC of each pickle is checked before it is loaded,
with a key of this connection and direction, and the number of the pickle.
"""

import hmac
import os
import pickle
import secrets
import socket
import struct
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

NONCE_LENGTH = TAG_LENGTH = 32


class SignedConnection:
    """Raises what `Connection` raises, and AuthenticationError. One thread at a time may send, and one receive. The other
    end has the same secret, as multiprocessing has checked.
    """

    def __init__(self, connection: Connection, key: bytes, *, is_driver: bool) -> None:
        self.connection = connection
        own = secrets.token_bytes(NONCE_LENGTH)
        connection.send_bytes(own)
        other = connection.recv_bytes(NONCE_LENGTH)
        nonces = own + other if is_driver else other + own
        keys = [hmac.digest(key, sender + nonces, "sha256") for sender in (b"driver", b"node")]
        self._send_key, self._receive_key = keys if is_driver else reversed(keys)
        self._sent = self._received = 0

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, content: object) -> None:
        data = pickle.dumps(content)
        self.connection.send_bytes(_sign(self._send_key, self._sent, data) + data)
        self._sent += 1

    def recv(self) -> Any:
        """Receive a pickle, check its signature, and load it."""
        data = self.connection.recv_bytes()
        tag, data = data[:TAG_LENGTH], data[TAG_LENGTH:]
        if not hmac.compare_digest(tag, _sign(self._receive_key, self._received, data)):
            raise AuthenticationError("wrongly signed")
        self._received += 1
        return pickle.loads(data)

    def close(self) -> None:
        self.connection.close()


def _sign(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + data, "sha256")


def limit_waits(connection: Connection | SignedConnection, seconds: int) -> None:
    """Let each wait for data end with an OSError after so many seconds. 0: no limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def shut_down(connection: Connection | SignedConnection) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
