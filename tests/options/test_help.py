"""`help()` of each public dataclass describes all its fields, and that of each public enum all its members."""

import pydoc
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import cleandoc

import pytest

import mpwatch
from mpwatch import events
from mpwatch.options.spec import GroupSpec

DATACLASSES = {cls for name in mpwatch.__all__ if is_dataclass(cls := getattr(mpwatch, name))}
ENUMS = {cls for name in mpwatch.__all__ if isinstance(cls := getattr(mpwatch, name), type) and issubclass(cls, Enum)}
EVENTS = {cls for name in events.__all__ if isinstance(cls := getattr(events, name), type) and issubclass(cls, events.Event)}


@pytest.mark.parametrize(
    "cls", sorted((DATACLASSES | EVENTS) - {mpwatch.WorkerSpec}, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__
)
def test_help_describes_each_field(cls):
    text = pydoc.plain(pydoc.render_doc(cls))
    assert f" |  {cls.__name__}(" in text  # the types and defaults of the fields
    _, _, descriptions = re.split(r"(Attributes|Args):\n", text, maxsplit=1)
    for field in fields(cls):
        description, *_ = re.findall(rf"^ \|      +{field.name}: (.*)$", descriptions, re.MULTILINE)
        assert description[0] not in " ."


@pytest.mark.parametrize("cls", sorted(ENUMS, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_help_describes_each_member(cls):
    described = re.findall(r"^    (\w+): ", cleandoc(cls.__doc__), re.MULTILINE)
    assert described == [member.name for member in cls]


def test_the_options_of_run_are_those_of_a_spec():
    """WorkerSpec refers to `mpwatch.run` for the descriptions."""
    described = set(re.findall(r"^    (\w+): ", cleandoc(mpwatch.run.__doc__), re.MULTILINE))
    assert {field.name for field in fields(mpwatch.WorkerSpec)} <= described | {field.name for field in fields(GroupSpec)}
