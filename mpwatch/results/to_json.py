"""`to_json` converts any value to data that every reader of strict JSON and UTF-8 understands. Pure."""

import math
import operator
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

MAX_BITS = 64  # of an integer. Few readers accept larger integers, and Python refuses to print very large ones
TEXT_LIMIT = 1000  # characters of the repr of an object that has no JSON equivalent


def to_json(value: Any) -> Any:
    """Infinity becomes a text, and an object for which JSON has no equivalent the text of its `repr`."""
    try:
        return _to_json(value)
    except Exception:  # noqa: BLE001  the value's class may raise anything
        return _text_of(value)


def _encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode. Python uses them in file names that are not valid UTF-8."""
    return str.__str__(text).encode(errors="backslashreplace").decode()


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, Integral):
        whole = int(operator.index(value))
        return whole if whole.bit_length() < MAX_BITS else hex(whole)
    if isinstance(value, Real):
        number = float.__float__(float(value))
        return number if math.isfinite(number) else str(number)
    if isinstance(value, BaseException):  # the event has the exception's text and traceback in other fields
        return _name_of(type(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_key_to_json(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return _text_of(value)


def _key_to_json(key: Any) -> str:
    name = to_json(key)
    return name if isinstance(name, str) else str(name)


def _name_of(cls: type) -> str:
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return _encodable(f"{module}{cls.__qualname__}")


def _text_of(value: Any) -> str:
    try:
        return _encodable(repr(value)[:TEXT_LIMIT])
    except Exception:  # noqa: BLE001  __repr__ of the value may raise anything
        return f"<{type(value).__qualname__}>"
