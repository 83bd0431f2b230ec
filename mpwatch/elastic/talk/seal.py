"""What nodes put into the store for one another: JSON, bounded, signed with the job's secret, and checked on arrival.

An entry is a line with the signature, which is empty if the job has no secret, and a line with the JSON. Signed are the
very bytes that travel, together with the job and the place in the store they are for. So an entry that was altered, cut off
or copied to another place is found out before anything of it is read; and JSON counts only as we would have written it:
there is one way to say a thing, without a key twice, NaN, half of a surrogate pair or a number without end.

Whatever is in the store, `Seal.open` returns plain data or raises ForgedError, and takes time and memory for no more than
the limit. The readers below it take single values out of what was opened, and raise ForgedError as well.

Imports nothing of mpwatch. Pure: no I/O.
"""

import hmac
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

__all__ = [
    "MAX_ENTRY",
    "MAX_TEXT",
    "ForgedError",
    "Seal",
    "SecretError",
    "choice",
    "count",
    "flag",
    "is_given",
    "items",
    "line",
    "mapping",
    "number",
    "sign",
    "size_text",
    "text",
    "without_controls",
    "written",
]

MAX_ENTRY = 1 << 18  # bytes
MAX_TEXT = 1 << 16  # characters of one text
MAX_LINE = 1 << 12  # of a name or a path
MAX_COUNT = (1 << 31) - 1
MAX_NUMBER = 1e12
MAX_DEPTH = 32  # of lists and mappings in one another
MAX_DIGITS = 19  # of an integer: what 64 bits hold
SHOWN = 80  # characters of a value in an error's text
KIBI = 1024
KEY_NAME = 4  # bytes
HEADER = re.compile(rb"(?:([0-9a-f]{8}) ([0-9a-f]{64}))?")
# A string is passed over as a whole, also one without an end: to look for that again from each quote would take for ever.
BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # which a terminal obeys, or no encoding can say
COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


class ForgedError(ValueError):
    """Something in the store is not what a node of this job has put there. The text says what is wrong with it."""


class SecretError(ForgedError):
    """It was signed by somebody whose secret is not ours; or only one of the two has any."""


class Seal:
    """Closes and opens the entries of one job.

    Args:
        key: the job's secret; empty if it has none: then nothing is signed, and all else is checked just the same.
        run_id: name of the job.
    """

    def __init__(self, key: bytes, run_id: str) -> None:
        self._key = key
        self._run_id = run_id.encode()
        self._key_name = sign(key, b"key")[:KEY_NAME].hex().encode() if key else b""

    def close(self, place: str, body: Mapping[str, Any], *, limit: int = MAX_ENTRY) -> str:
        """The entry to store.

        Args:
            place: full name of the entry in the store; it must never have been used before in this job for anything else.
            body: of dicts with strings as keys, lists, strings, integers, floats, booleans and None.
            limit: bytes.

        Raises ValueError if it is over the limit, or cannot be JSON that others would open; TypeError for other types.
        """
        try:
            data = written(dict(body)).encode()
        except (ValueError, RecursionError) as error:
            raise _unsent(place, str(error)) from error
        entry = self._signature(place, data) + b"\n" + data
        if len(entry) > limit:
            raise _unsent(place, f"it is {size_text(len(entry))}, more than the {size_text(limit)} of an entry")
        try:
            _read(data.decode())
        except ForgedError as error:
            raise _unsent(place, str(error)) from None
        return entry.decode()

    def open(self, place: str, data: bytes, *, limit: int = MAX_ENTRY) -> dict[str, Any]:
        """The body again. Raises ForgedError; as SecretError if other secrets are all that is wrong."""
        if len(data) > limit:
            raise ForgedError(f"{size_text(len(data))}, more than the {size_text(limit)} of an entry")
        header, end, body = bytes(data).partition(b"\n")
        signed = HEADER.fullmatch(header)
        if not end or signed is None:
            raise ForgedError(f"not an entry of mpwatch: {_shown(bytes(data))}")
        self._check_signer(signed[1])
        if not hmac.compare_digest(header, self._signature(place, body)):
            raise ForgedError("its signature does not match: it was altered, cut off, or copied from another place or job")
        try:
            return _read(body.decode())
        except UnicodeDecodeError:
            raise ForgedError(f"not JSON: not UTF-8: {_shown(body)}") from None

    def _signature(self, place: str, data: bytes) -> bytes:
        if not self._key:
            return b""
        return self._key_name + b" " + sign(self._key, b"entry", self._run_id, place.encode(), data).hex().encode()

    def _check_signer(self, key_name: bytes | None) -> None:
        if key_name is None and self._key:
            raise SecretError("not signed, while this node has a secret: all nodes need the same one")
        if key_name is not None and not self._key:
            raise SecretError("signed, and this node has no secret: all nodes need the same one")
        if (key_name or b"") != self._key_name:
            raise SecretError("signed with another secret than this node's: all nodes need the same one")


def sign(key: bytes, *parts: bytes | memoryview) -> bytes:
    """HMAC-SHA256 of these, each with its length before it, so that nothing passes from one into the next."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def written(body: object) -> str:
    """As JSON. Raises ValueError, TypeError or RecursionError for what is none."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _read(data: str) -> dict[str, Any]:
    _check_depth(data)  # the parser's own limit is that of the interpreter, which a program may have lifted
    try:
        body = json.loads(data, parse_int=_whole)
        is_ours = written(body) == data
        data.encode()
    except ForgedError:
        raise
    except ValueError as error:
        raise ForgedError(f"not JSON: {error}: {_shown(data)}") from None
    if not is_ours:
        raise ForgedError(f"not JSON as mpwatch writes it: {_shown(data)}")
    if not isinstance(body, dict):
        raise ForgedError(f"not a mapping: {_shown(body)}")
    return body


def _check_depth(data: str) -> None:
    depth = 0
    for found in BRACKETS.finditer(data):
        mark = found[0]
        depth += (mark in "[{") - (mark in "]}")
        if depth > MAX_DEPTH:
            raise ForgedError(f"more than {MAX_DEPTH} lists and mappings in one another: {_shown(data)}")


def _whole(digits: str) -> int:
    size = len(digits.lstrip("-"))
    if size > MAX_DIGITS:
        raise ForgedError(f"an integer of {size} digits")
    return int(digits)


# Readers: one value of an opened body, by its name, as the type that it must have.


def text(body: Mapping[str, Any], name: str, *, limit: int = MAX_TEXT) -> str:
    """A text of lines: no control characters but newline and tab, which a terminal would obey."""
    value = _get(body, name)
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    if len(value) > limit:
        raise ForgedError(f"{name} has {len(value)} characters, more than {limit}")
    if CONTROLS.search(value):
        raise _wrong(name, "text without control characters", value)
    return value


def line(body: Mapping[str, Any], name: str, *, limit: int = MAX_LINE) -> str:
    """A name or a path: a text of one line."""
    value = text(body, name, limit=limit)
    if "\n" in value or "\t" in value:
        raise _wrong(name, "one line", value)
    return value


def choice(body: Mapping[str, Any], name: str, known: Collection[str]) -> str:
    """One of these."""
    value = _get(body, name)
    if not isinstance(value, str) or value not in known:
        raise _wrong(name, f"one of {', '.join(known)}", value)
    return value


def count(body: Mapping[str, Any], name: str, *, at_least: int = 0, at_most: int = MAX_COUNT) -> int:
    """An integer."""
    value = _get(body, name)
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise _wrong(name, f"a whole number from {at_least} to {at_most}", value)
    return value


def number(body: Mapping[str, Any], name: str, *, at_least: float = 0.0, at_most: float = MAX_NUMBER) -> float:
    """A float; NaN and infinity are none."""
    value = _get(body, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise _wrong(name, f"a number from {at_least} to {at_most}", value)
    return float(value)


def flag(body: Mapping[str, Any], name: str) -> bool:
    """True or False."""
    value = _get(body, name)
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def items(body: Mapping[str, Any], name: str, *, limit: int) -> list[Any]:
    """A list of at most so many."""
    value = _get(body, name)
    if not isinstance(value, list):
        raise _wrong(name, "a list", value)
    if len(value) > limit:
        raise ForgedError(f"{name} has {len(value)} items, more than {limit}")
    return value


def mapping(body: Mapping[str, Any], name: str, *, limit: int) -> dict[str, Any]:
    """A mapping of at most so many."""
    value = _get(body, name)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, "a mapping", value)
    if len(value) > limit:
        raise ForgedError(f"{name} has {len(value)} entries, more than {limit}")
    return value


def is_given(body: Mapping[str, Any], name: str) -> bool:
    """Whether it is not null; it must be there in either case."""
    return _get(body, name) is not None


def without_controls(raw: str) -> str:
    """As `text` takes it: without colours, and other control characters by their numbers."""
    plain = COLOURS.sub("", str.__str__(raw))
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape", "backslashreplace").decode(), plain)


def size_text(size: int) -> str:
    """How much that is, for people."""
    if size < KIBI:
        return f"{size} bytes"
    unit, name = (KIBI, "KiB") if size < KIBI * KIBI else (KIBI * KIBI, "MiB")
    tenths = -(-10 * size // unit)  # up, so that a little more than a limit does not read like the limit
    return f"{tenths / 10:,.1f} {name}".replace(".0 ", " ")


def _get(body: Mapping[str, Any], name: str) -> Any:
    try:
        return body[name]
    except KeyError:
        raise ForgedError(f"{name} is missing") from None


def _unsent(place: str, why: str) -> ValueError:
    return ValueError(f"what goes to {place!r} cannot be sent: {why}")


def _wrong(name: str, wanted: str, value: object) -> ForgedError:
    return ForgedError(f"{name} must be {wanted}, not {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, str | bytes) and len(value) > SHOWN:
        return f"{value[:SHOWN]!r}..."
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer too long to print, or lists too deep
        return f"{type(value).__name__} too large to show"
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
