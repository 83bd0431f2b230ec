"""Values of any type that nodes exchange, for tests of round trips."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


def make_sample(kind):
    """Make an instance of a dataclass in which no field has its default."""
    hints = get_type_hints(kind)
    made = kind(**{field.name: field.default is not True and make_value(hints[field.name]) for field in fields(kind)})
    for field in fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        assert getattr(made, field.name) != default, f"{kind.__name__}.{field.name} has its default"
    return made


def make_value(hint):
    """Make a value of a type, other than the usual defaults."""
    arguments = get_args(hint)
    if hint is Any:
        return {"nested": [1, "two", None]}
    if is_dataclass(hint):
        return make_sample(hint)
    if get_origin(hint) is tuple:
        kinds = arguments[:1] * 2 if arguments[-1] is ... else arguments
        return tuple(make_value(kind) for kind in kinds)
    if get_origin(hint) is Mapping:
        return {make_value(arguments[0]): make_value(arguments[1])}
    if NoneType in arguments:
        return make_value(next(kind for kind in arguments if kind is not NoneType))
    if issubclass(hint, Enum):
        return list(hint)[-1]
    return {str: "text \u4e2d", bool: True, int: 7, float: 1.5}[hint]
