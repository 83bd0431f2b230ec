"""Encode and sign an entry for the store. Verify and decode an entry from the store.

The first line of an entry is the signature, and the second line is the message as JSON. The signature is an HMAC-SHA256 of
the JSON, the name of the job and the name of the entry. If the job has no secret, the signature is empty.

This module imports no other module of mpwatch and does no I/O.
"""

import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_ENTRY_BYTES = 1 << 18
MAX_SHOWN = 80  # characters of a value in the text of an error
KIBI = 1024
KEY_ID_BYTES = 4
SIGNATURE = re.compile(rb"(?:([0-9a-f]{8}) ([0-9a-f]{64}))?")  # id of the key, and HMAC


class InvalidEntryError(ValueError):
    """Raised if an entry in the store is invalid. The text of the exception says what is wrong with the entry."""


class SecretMismatchError(InvalidEntryError):
    """Raised if this node and the writer of an entry do not have the same secret, for example if the writer has no secret.

    The text of the exception, such as "not signed, but this node has a secret", does not contain the entry's name.
    """


class SignedJson:
    """Encodes and verifies the entries of one job.

    Args:
        secret: the job's secret. If it is empty, nothing is signed, but all other checks are done.
        run_id: name of the job.
    """

    def __init__(self, secret: bytes, run_id: str) -> None:
        self._secret = secret
        self._run_id = run_id.encode()
        self._key_id = _compute_hmac(secret, b"key")[:KEY_ID_BYTES].hex().encode() if secret else b""

    def encode(self, name: str, body: Mapping[str, Any], *, limit: int = MAX_ENTRY_BYTES) -> str:
        """Return the signed entry for the store.

        Args:
            name: full name of the entry. No two entries of a job may have the same name. Otherwise another program could
                copy one entry to the place of the other.
            body: JSON data from `to_json`.
            limit: the largest number of bytes.

        Raises:
            ValueError: the entry is over the limit, or a value cannot be JSON.
            TypeError: a value has a type that JSON does not have.
        """
        try:
            data = dump_json(dict(body)).encode()
        except (ValueError, RecursionError) as error:
            raise _make_encode_error(name, str(error)) from error
        entry = self._sign(name, data) + b"\n" + data
        if len(entry) > limit:
            raise _make_encode_error(name, _describe_excess(len(entry), limit))
        return entry.decode()

    def decode(self, name: str, entry: bytes, *, limit: int = MAX_ENTRY_BYTES) -> dict[str, Any]:
        """Verify an entry and return its JSON as a dict. Check the size and the signature before the JSON is parsed.

        Raises:
            SecretMismatchError: the secrets of the writer and the reader differ. It is a subclass of InvalidEntryError.
            InvalidEntryError: the entry is invalid for another reason.
        """
        if len(entry) > limit:
            raise InvalidEntryError(_describe_excess(len(entry), limit))
        signature, newline, data = bytes(entry).partition(b"\n")
        matched = SIGNATURE.fullmatch(signature)
        if not newline or matched is None:
            raise InvalidEntryError(f"not an entry of mpwatch: {_show(bytes(entry))}")
        self._check_key_id(matched[1])
        if not hmac.compare_digest(signature, self._sign(name, data)):
            raise InvalidEntryError("wrongly signed: it was altered, cut off, or copied from another name or job")
        return _load_json(data)

    def _sign(self, name: str, data: bytes) -> bytes:
        if not self._secret:
            return b""
        return self._key_id + b" " + _compute_hmac(self._secret, b"entry", self._run_id, name.encode(), data).hex().encode()

    def _check_key_id(self, key_id: bytes | None) -> None:
        if key_id is None and self._secret:
            raise SecretMismatchError("not signed, but this node has a secret: give all nodes the same secret")
        if key_id is not None and not self._secret:
            raise SecretMismatchError("signed, but this node has no secret: give all nodes the same secret")
        if (key_id or b"") != self._key_id:
            raise SecretMismatchError("signed with another secret than this node's: give all nodes the same secret")


def _compute_hmac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of the parts and their lengths, so that `b"ab", b"c"` and `b"a", b"bc"` have unequal HMACs."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def dump_json(body: object) -> str:
    """Return data as compact JSON. Raises ValueError, TypeError or RecursionError if JSON cannot represent the data."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _load_json(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise InvalidEntryError(f"not JSON: {error}: {_show(data)}") from None
    if not isinstance(body, dict):
        raise InvalidEntryError(f"not a mapping: {_show(data)}")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def format_size(size: int) -> str:
    """Return the size as text with a unit, such as "1.5 KiB"."""
    if size < KIBI:
        return f"{size} bytes"
    unit, name = (KIBI, "KiB") if size < KIBI * KIBI else (KIBI * KIBI, "MiB")
    tenths = -(-10 * size // unit)  # rounded up, so that a size just above a limit differs from the limit
    return f"{tenths / 10:,.1f} {name}".replace(".0 ", " ")


def _describe_excess(size: int, limit: int) -> str:
    return f"too large: {format_size(size)}, more than the limit of {format_size(limit)}"


def _make_encode_error(name: str, reason: str) -> ValueError:
    return ValueError(f"the entry {name!r} cannot be sent: {reason}")


def _show(data: bytes) -> str:
    return repr(data) if len(data) <= MAX_SHOWN else f"{data[:MAX_SHOWN]!r}..."
