"""The JSON codec for all data that nodes send to one another.

`to_json` encodes all fields of a dataclass as a JSON object. `from_json` checks and decodes each field according to its type
hint. The type hint of a field may contain dataclasses, enums, tuples, lists, mappings with str or int keys, unions,
`Literal`, `Any` (JSON data), str, bool, int, float and None.

`to_json` and `from_json` refuse NaN, infinity and integers beyond 2**53. JSON cannot represent NaN and infinity. Some
readers of JSON round integers beyond 2**53. `to_json` escapes control characters and `from_json` refuses them, because
control characters could disturb a terminal that shows the text.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mpwatch.results.clean_text import CONTROL_CHARACTERS, clean_text

T = TypeVar("T")


class InvalidMessageError(ValueError):
    """What another node has sent is invalid. The text says what is wrong."""


MAX_TEXT = 1 << 16  # characters of one text
MAX_INTEGER = 1 << 53  # the largest integer that every JSON reader keeps exactly
SCALAR_TYPES: Mapping[type, str] = {
    NoneType: "null",
    str: f"a text of at most {MAX_TEXT} characters without control characters",
    bool: "true or false",
    int: f"a whole number from {-MAX_INTEGER} to {MAX_INTEGER}",
    float: "a finite number",
}


def to_json(value: object, *, omit: Collection[str] = ()) -> Any:
    """Encode a value as JSON data: dict, list, str, int, float, bool or None.

    Terminal color sequences are removed from texts, and other control characters are escaped. If a text is longer than
    MAX_TEXT characters, its end is cut off.

    Args:
        value: a dataclass instance, or a value of any type that a field may have.
        omit: names of fields of the outermost dataclass that are not encoded.

    If a value cannot be encoded, raises TypeError or ValueError with a text that contains the path of the value, such as
    `NodeInfo.address`.
    """
    return _encode(value, type(value).__name__, omit)


def from_json(wanted: type[T], data: object, *, omit: Collection[str] = ()) -> T:
    """Decode JSON data as a value of the type `wanted`.

    Args:
        wanted: the type, usually a dataclass.
        data: JSON data of unknown origin.
        omit: names of fields of the outermost dataclass that are not in the data. These fields get their defaults.

    If the data are invalid, raises InvalidMessageError with a text that names the invalid field.
    """
    try:
        decoded: T = _decode(wanted, data, wanted.__name__, omit)
    except RecursionError:
        raise InvalidMessageError(f"{wanted.__name__} is nested too deeply") from None
    return decoded


def dump_json(body: object) -> str:
    """Return data as compact JSON. Raises ValueError, TypeError or RecursionError if JSON cannot represent the data."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _encode(value: Any, path: str, omit: Collection[str] = ()) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return clean_text(value)[:MAX_TEXT]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if not _is_valid_number(value):
            raise ValueError(f"{path} must be a finite number, as an integer within {MAX_INTEGER}, not {value!r:.100}")
        return value
    if isinstance(value, tuple | list):
        return [_encode(item, f"{path}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_encode_key(key, path): _encode(item, f"{path}[{key!r}]") for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name not in omit]
        return {name: _encode(getattr(value, name), f"{path}.{name}") for name in names}
    raise TypeError(f"{path} cannot be sent to other nodes: {type(value).__name__} has no JSON encoding")


def _is_valid_number(number: float) -> bool:
    return abs(number) <= MAX_INTEGER if isinstance(number, int) else math.isfinite(number)


def _encode_key(key: object, path: str) -> str:
    if isinstance(key, str):
        return clean_text(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise TypeError(f"{path} cannot be sent to other nodes: its keys must be str or int, not {key!r:.100}")


def _decode(wanted: Any, data: Any, path: str, omit: Collection[str] = ()) -> Any:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return _decode_any(data, path)
    if wanted in SCALAR_TYPES:
        return _decode_scalar(wanted, data, path)
    if origin in (Union, UnionType):
        return _decode_union(arguments, data, path)
    if origin is Literal:
        if not any(data == choice and type(data) is type(choice) for choice in arguments):
            raise _make_error(path, f"one of {', '.join(map(repr, arguments))}", data)
        return data
    if origin in (tuple, list):
        return _decode_items(origin, arguments, data, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _decode_mapping(arguments, data, path)
    if is_dataclass(wanted):
        return _decode_fields(wanted, data, path, omit)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        if not isinstance(data, str) or data not in wanted.__members__:
            raise _make_error(path, f"one of {', '.join(wanted.__members__)}", data)
        return wanted[data]
    raise TypeError(f"{path} has a type that the JSON codec cannot decode: {wanted!r}")


def _decode_scalar(wanted: Any, data: Any, path: str) -> Any:
    if wanted is float and isinstance(data, int) and not isinstance(data, bool):
        is_right = _is_valid_number(data)
    elif type(data) is not wanted:
        is_right = False
    elif wanted is str:
        is_right = len(data) <= MAX_TEXT and not CONTROL_CHARACTERS.search(data)
    else:
        is_right = wanted not in (int, float) or _is_valid_number(data)
    if not is_right:
        raise _make_error(path, SCALAR_TYPES[wanted], data)
    return float(data) if wanted is float else data


def _decode_any(data: Any, path: str) -> Any:
    if isinstance(data, dict):
        return _decode_mapping((str, Any), data, path)
    if isinstance(data, list):
        return [_decode_any(item, f"{path}[{n}]") for n, item in enumerate(data)]
    if type(data) not in SCALAR_TYPES:
        raise _make_error(path, "JSON data", data)
    return _decode_scalar(type(data), data, path)


def _decode_union(kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and NoneType in kinds:
        return None
    error: InvalidMessageError | None = None
    for kind in kinds:
        if kind is not NoneType:
            try:
                return _decode(kind, data, path)
            except InvalidMessageError as wrong:
                error = wrong
    raise error or _make_error(path, "null", data)


def _decode_items(origin: Any, kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    if not isinstance(data, list):
        raise _make_error(path, "a list", data)
    if origin is list or kinds[-1] is ...:
        kinds = kinds[:1] * len(data)
    if len(data) != len(kinds):
        raise _make_error(path, f"{len(kinds)} values", data)
    return origin(_decode(kind, item, f"{path}[{n}]") for n, (kind, item) in enumerate(zip(kinds, data, strict=True)))


def _decode_mapping(kinds: tuple[Any, ...], data: Any, path: str) -> dict[Any, Any]:
    if not isinstance(data, dict):
        raise _make_error(path, "a mapping", data)
    key_kind, value_kind = kinds
    decoded = {}
    for name, item in data.items():
        at = f"{path}[{name!r:.100}]"
        key = _decode_key(key_kind, name, at)
        decoded[key] = _decode(value_kind, item, at)
    return decoded


def _decode_key(kind: Any, name: Any, path: str) -> str | int:
    key: str | int = _decode_scalar(str, name, f"the key of {path}")
    if kind is str:
        return key
    if kind is not int:
        raise TypeError(f"{path} has keys that the JSON codec cannot decode: {kind!r}")
    try:
        key = int(name)
    except ValueError:
        raise _make_error(f"the key of {path}", "a whole number", name) from None
    return key


def _decode_fields(kind: Any, data: Any, path: str, omit: Collection[str]) -> Any:
    if not isinstance(data, dict):
        raise _make_error(path, "a mapping", data)
    names = [field.name for field in fields(kind) if field.name not in omit]
    if unknown := data.keys() - set(names):
        raise InvalidMessageError(f"{path} has no field {min(unknown, key=str)!r:.100}")
    if missing := [name for name in names if name not in data]:
        raise InvalidMessageError(f"{path}.{missing[0]} is missing")
    hints = _type_hints(kind)
    return kind(**{name: _decode(hints[name], data[name], f"{path}.{name}") for name in names})


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _make_error(path: str, wanted: str, data: object) -> InvalidMessageError:
    try:
        shown = f"{data!r:.80}"
    except (ValueError, RecursionError):  # an integer with too many digits, or a list that is nested too deeply
        shown = f"a {type(data).__name__} that is too large to show"
    return InvalidMessageError(f"{path} must be {wanted}, not {shown}")
