"""Decodes the JSON that nodes send to one another. results/to_json.py has encoded it.

`from_json` checks data of unknown origin by type hints, which may contain dataclasses, TypedDicts, enums, tuples, lists,
mappings with str keys, `X | None`, `Any` (JSON data), str, bool, int and float. Control characters in texts are escaped,
because they could disturb a terminal.
"""

import json
import math
from collections.abc import Mapping
from enum import EnumMeta
from functools import cache
from itertools import count
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from mpwatch.results.texts import clean_text

T = TypeVar("T")


class InvalidMessageError(ValueError):
    """What another node has sent is invalid. The text says what is wrong."""


def dump_json(data: object) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def from_json(wanted: type[T], data: object, name: str = "") -> T:
    """Raises InvalidMessageError with a text that names the invalid field, and begins with `name`."""
    name = name or wanted.__name__
    try:
        decoded: T = _decode(wanted, data, name)
    except OverflowError:
        raise InvalidMessageError(f"{name} has a number that is too large") from None
    return decoded


def _decode(wanted: Any, data: Any, path: str) -> Any:
    origin, kinds = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return data
    if origin in (Union, UnionType):  # of one type and None: no field has another union
        return None if data is None else _decode(kinds[0], data, path)
    if wanted is str and isinstance(data, str):
        return clean_text(data)
    if wanted is float and type(data) in (int, float) and math.isfinite(data):
        return float(data)
    if wanted in (int, bool) and type(data) is wanted:
        return data
    if isinstance(wanted, EnumMeta) and isinstance(data, str) and data in wanted.__members__:
        return wanted[data]
    if origin in (tuple, list) and isinstance(data, list):
        kinds = kinds[:1] * len(data) if origin is list or kinds[-1] is ... else kinds
        if len(kinds) == len(data):
            return origin(_decode(kind, item, f"{path}[{n}]") for n, kind, item in zip(count(), kinds, data))
    if origin is Mapping and isinstance(data, dict):
        return {clean_text(key): _decode(kinds[1], item, f"{path}[{key!r:.100}]") for key, item in data.items()}
    if isinstance(data, dict) and (hints := _get_hints(wanted)):
        if hints.keys() != data.keys():
            odd = min(hints.keys() ^ data.keys())
            raise InvalidMessageError(f"{path} {'lacks' if odd in hints else 'has no'} field {odd!r:.100}")
        return wanted(**{name: _decode(hint, data[name], f"{path}.{name}") for name, hint in hints.items()})
    raise InvalidMessageError(f"{path} must be {getattr(wanted, '__name__', wanted)}, not {data!r:.80}")


@cache
def _get_hints(kind: Any) -> dict[str, Any]:
    """Return the hints of the fields of a dataclass or a TypedDict, and none of another type."""
    return get_type_hints(kind) if isinstance(kind, type) else {}
