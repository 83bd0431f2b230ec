"""Adds the descriptions of inherited fields to the docstring of a class, so that `help()` shows these descriptions."""

from inspect import cleandoc

ATTRIBUTES = "\n\nAttributes:\n"


def add_inherited_attributes(cls: type, base: type) -> None:
    """Add the section "Attributes" of the base class to the docstring of `cls`."""
    if cls.__doc__ is None or base.__doc__ is None:
        return
    _, _, inherited = cleandoc(base.__doc__).partition(ATTRIBUTES)
    own = cleandoc(cls.__doc__)
    cls.__doc__ = own + ("\n" if ATTRIBUTES in own else ATTRIBUTES) + inherited
