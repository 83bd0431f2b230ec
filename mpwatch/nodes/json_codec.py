"""The JSON codec for all data that nodes send to one another.

`to_json` encodes all fields of a dataclass as a JSON object. `from_json` checks and decodes data of unknown origin by type
hints, which may contain dataclasses, TypedDicts, enums, tuples, lists, mappings with str keys, `X | None`, `Any` (JSON
data), str, bool, int, float and None. Control characters are escaped, and refused, because they could disturb a terminal.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

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
    """Encode a value without these fields of it. What JSON or the other nodes could not read becomes what they can: a long
    text without its middle, the largest integer, 0.0 instead of infinity.
    """
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return cut(clean_text(value), MAX_TEXT)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return max(-MAX_INTEGER, min(value, MAX_INTEGER))
    if isinstance(value, float):
        return value if math.isfinite(value) else 0.0
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {clean_text(key): to_json(item) for key, item in value.items()}
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value) if field.name not in omit}
    raise TypeError(f"{type(value).__name__} cannot be sent to other nodes")


def cut(text: str, longest: int) -> str:
    """Leave out the middle of a text with more than `longest` characters."""
    if len(text) <= longest:
        return text
    mark = f"[... {len(text) - longest:,} characters ...]"
    mark = f"\n{mark}\n" if "\n" in text else mark
    keep = max(0, longest - len(mark))
    return text[: keep - keep // 2] + mark[:longest] + text[len(text) - keep // 2 :]


def from_json(wanted: type[T], data: object, *, name: str = "", omit: Collection[str] = ()) -> T:
    """Decode JSON data. Fields of the outermost dataclass in `omit` are not in the data, and get their defaults.

    Raises InvalidMessageError with a text that names the invalid field, and begins with `name`.
    """
    name = name or wanted.__name__
    try:
        decoded: T = _decode(wanted, data, name, omit)
    except RecursionError:
        raise InvalidMessageError(f"{name} is nested too deeply") from None
    return decoded


def dump_json(body: object) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def load_json(data: bytes) -> dict[str, Any]:
    """Raises InvalidMessageError."""
    try:
        body = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise InvalidMessageError(f"not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidMessageError("not a mapping")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _decode(wanted: Any, data: Any, path: str, omit: Collection[str] = ()) -> Any:
    if wanted is Any:
        containers: dict[type, Any] = {dict: Mapping[str, Any], list: list[Any]}
        wanted = containers.get(type(data), type(data))
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted in SCALAR_TYPES:
        return _decode_scalar(wanted, data, path)
    if origin in (Union, UnionType):
        return _decode_union(arguments, data, path)
    if origin in (tuple, list):
        return _decode_items(origin, arguments, data, path)
    if origin is Mapping:
        items = _check(data, dict, "a mapping", path).items()
        at = f"the key of {path}"
        return {_decode_scalar(str, key, at): _decode(arguments[1], item, f"{path}[{key!r:.100}]") for key, item in items}
    if issubclass(wanted, Enum):
        if not isinstance(data, str) or data not in wanted.__members__:
            raise _make_error(path, f"one of {', '.join(wanted.__members__)}", data)
        return wanted[data]
    return _decode_fields(wanted, data, path, omit)


def _decode_scalar(wanted: Any, data: Any, path: str) -> Any:
    if wanted is str:
        is_right = type(data) is str and len(data) <= MAX_TEXT and not CONTROL_CHARACTERS.search(data)
    elif wanted in (int, float) and type(data) is int:
        is_right = abs(data) <= MAX_INTEGER
    else:
        is_right = type(data) is wanted and (wanted is not float or math.isfinite(data))
    if not is_right:
        raise _make_error(path, SCALAR_TYPES[wanted], data)
    return float(data) if wanted is float else data


def _decode_union(kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    """Of one type and None: no field has another union."""
    (kind,) = [kind for kind in kinds if kind is not NoneType]
    return None if data is None else _decode(kind, data, path)


def _decode_items(origin: Any, kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    _check(data, list, "a list", path)
    if origin is list or kinds[-1] is ...:
        kinds = kinds[:1] * len(data)
    if len(data) != len(kinds):
        raise _make_error(path, f"{len(kinds)} values", data)
    return origin(_decode(kind, item, f"{path}[{n}]") for n, (kind, item) in enumerate(zip(kinds, data, strict=True)))


def _decode_fields(kind: Any, data: Any, path: str, omit: Collection[str]) -> Any:
    _check(data, dict, "a mapping", path)
    names = list(_type_hints(kind)) if is_typeddict(kind) else [field.name for field in fields(kind)]
    names = [name for name in names if name not in omit]
    if unknown := data.keys() - set(names):
        raise InvalidMessageError(f"{path} has no field {min(unknown, key=str)!r:.100}")
    if missing := [name for name in names if name not in data]:
        raise InvalidMessageError(f"{path}.{missing[0]} is missing")
    hints = _type_hints(kind)
    return kind(**{name: _decode(hints[name], data[name], f"{path}.{name}") for name in names})


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(data: Any, kind: type, wanted: str, path: str) -> Any:
    if not isinstance(data, kind):
        raise _make_error(path, wanted, data)
    return data


def _make_error(path: str, wanted: str, data: object) -> InvalidMessageError:
    return InvalidMessageError(f"{path} must be {wanted}, not {data!r:.80}")
