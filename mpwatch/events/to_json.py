"""Any value of an event as plain data that JSON can hold, strictly: what every reader of JSON and of UTF-8 understands."""

import math
import operator
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

BITS = 64  # of an integer; few readers hold larger ones, and Python itself does not print the largest
TEXT_LIMIT = 1000  # characters of the text of an object that JSON knows nothing like


def plain(value: Any) -> Any:
    """Names for enums and for the types of exceptions, dicts for dataclasses, the numbers of Python for those of NumPy; text
    for numbers that JSON has none for, and for whatever else there is.
    """
    try:
        return _plain(value)
    except Exception:  # noqa: BLE001  the value's own code: a number that cannot say how large it is
        return _text_of(value)


def encodable(text: str) -> str:
    """What no encoding can say (half of a surrogate pair, as in a file name that is not UTF-8) is said by its number."""
    return str.__str__(text).encode(errors="backslashreplace").decode()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Integral):
        whole = int(operator.index(value))
        return whole if whole.bit_length() < BITS else hex(whole)
    if isinstance(value, Real):
        number = float.__float__(float(value))
        return number if math.isfinite(number) else str(number)
    if isinstance(value, BaseException):  # its text and its traceback are beside it
        return _name_of(type(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return _text_of(value)


def _key(key: Any) -> str:
    name = plain(key)
    return name if isinstance(name, str) else str(name)


def _name_of(cls: type) -> str:
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return encodable(f"{module}{cls.__qualname__}")


def _text_of(value: Any) -> str:
    try:
        return encodable(repr(value)[:TEXT_LIMIT])
    except Exception:  # noqa: BLE001  the value's own code
        return f"<{type(value).__qualname__}>"
