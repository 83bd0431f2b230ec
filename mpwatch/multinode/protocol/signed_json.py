"""Sign and verify the entries that nodes put into the store: JSON of limited size, under an HMAC of the job's secret.

An entry has two lines: the signature and the JSON. The signature is empty if the job has no secret. It covers the bytes of
the JSON, the job, and the place in the store. `Seal.open` verifies size and signature before it parses the JSON.
json_codec.py then checks the data against the types of a message.

This module imports nothing of mpwatch and does no I/O.
"""

import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_ENTRY = 1 << 18  # bytes
SHOWN = 80  # characters of a value in an error's text
KIBI = 1024
KEY_NAME = 4  # bytes
HEADER = re.compile(rb"(?:([0-9a-f]{8}) ([0-9a-f]{64}))?")


class InvalidEntryError(ValueError):
    """An entry of the store is not one that a node of this job wrote. The text says what is wrong with the entry."""


class SecretMismatchError(InvalidEntryError):
    """The entry was signed with another secret than this node's, or only one of the two nodes has a secret."""


class SignedJson:
    """Sign and verify the entries of one job.

    Args:
        key: the job's secret. Nothing is signed if it is empty; all other checks stay.
        run_id: name of the job.
    """

    def __init__(self, key: bytes, run_id: str) -> None:
        self._key = key
        self._run_id = run_id.encode()
        self._key_name = sign(key, b"key")[:KEY_NAME].hex().encode() if key else b""

    def close(self, place: str, body: Mapping[str, Any], *, limit: int = MAX_ENTRY) -> str:
        """Return the entry to store.

        Args:
            place: full name of the entry in the store. No other entry of the job may have had it.
            body: JSON data, as `to_json` makes it.
            limit: bytes.

        Raises ValueError if the entry is over the limit, or the body cannot be JSON. Raises TypeError for other types.
        """
        try:
            data = written(dict(body)).encode()
        except (ValueError, RecursionError) as error:
            raise _unsent(place, str(error)) from error
        entry = self._signature(place, data) + b"\n" + data
        if len(entry) > limit:
            raise _unsent(place, f"it is {size_text(len(entry))}, more than the {size_text(limit)} of an entry")
        return entry.decode()

    def open(self, place: str, data: bytes, *, limit: int = MAX_ENTRY) -> dict[str, Any]:
        """Verify an entry and return its body. Raises ForgedError, or its subclass SecretError if the secrets differ."""
        if len(data) > limit:
            raise InvalidEntryError(f"{size_text(len(data))}, more than the {size_text(limit)} of an entry")
        header, end, body = bytes(data).partition(b"\n")
        signed = HEADER.fullmatch(header)
        if not end or signed is None:
            raise InvalidEntryError(f"not an entry of mpwatch: {_shown(bytes(data))}")
        self._check_signer(signed[1])
        if not hmac.compare_digest(header, self._signature(place, body)):
            raise InvalidEntryError(
                "its signature does not match: it was altered, cut off, or copied from another place or job"
            )
        return _read(body)

    def _signature(self, place: str, data: bytes) -> bytes:
        if not self._key:
            return b""
        return self._key_name + b" " + sign(self._key, b"entry", self._run_id, place.encode(), data).hex().encode()

    def _check_signer(self, key_name: bytes | None) -> None:
        if key_name is None and self._key:
            raise SecretMismatchError("not signed, while this node has a secret: all nodes need the same one")
        if key_name is not None and not self._key:
            raise SecretMismatchError("signed, and this node has no secret: all nodes need the same one")
        if (key_name or b"") != self._key_name:
            raise SecretMismatchError("signed with another secret than this node's: all nodes need the same one")


def sign(key: bytes, *parts: bytes | memoryview) -> bytes:
    """Return the HMAC-SHA256 of the parts. The length before each part keeps one from being read as the next."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def written(body: object) -> str:
    """Write data as compact JSON. Raises ValueError, TypeError or RecursionError if it cannot be JSON."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _read(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise InvalidEntryError(f"not JSON: {error}: {_shown(data)}") from None
    if not isinstance(body, dict):
        raise InvalidEntryError(f"not a mapping: {_shown(data)}")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def size_text(size: int) -> str:
    """Write a number of bytes with its unit."""
    if size < KIBI:
        return f"{size} bytes"
    unit, name = (KIBI, "KiB") if size < KIBI * KIBI else (KIBI * KIBI, "MiB")
    tenths = -(-10 * size // unit)  # up, so that a little more than a limit does not read like the limit
    return f"{tenths / 10:,.1f} {name}".replace(".0 ", " ")


def _unsent(place: str, why: str) -> ValueError:
    return ValueError(f"what goes to {place!r} cannot be sent: {why}")


def _shown(data: bytes) -> str:
    return repr(data) if len(data) <= SHOWN else f"{data[:SHOWN]!r}..."
