"""Functions that raise in expressions of many forms. The lines are long, short, nested and of several lines on purpose."""

# fmt: off

import dataclasses
import linecache
from types import SimpleNamespace

zero = 0
data = {"a": {"b": [1, 2, 3]}, "größe": 0}
tree = SimpleNamespace(left=SimpleNamespace(right=None))


def division():
    return 1 + 2 / zero * 3


def division_after_wide_characters():
    return {"größe": "äöü 漢字", "ratio": 1 / data["größe"]}


def chained_attributes():
    return tree.left.right.value.more


def list_comprehension():
    return [1 / n for n in (2, 1, 0)]


def generator_expression():
    return sum(
        1 / n
        for n in (1, 0)
    )


def raise_from():
    try:
        division()
    except ZeroDivisionError as error:
        raise RuntimeError("the second") from error


def raise_in_a_handler():
    try:
        data["a"]["c"]["d"]
    except KeyError:
        chained_attributes()


@dataclasses.dataclass
class Point:
    x: int

    def __post_init__(self):
        self.x / zero

    @property
    def inverse(self):
        return 1 / (self.x - self.x)


def method_that_a_dataclass_calls():
    return Point(
        x=1
    )


def generated_code():
    source = "def generated():\n    return 1 + (\n        2 / 0\n    )\n"
    linecache.cache["<generated>"] = (len(source), None, source.splitlines(keepends=True), "<generated>")
    names = {}
    exec(compile(source, "<generated>", "exec"), names)
    return names["generated"]()


def deep_recursion():
    def recurse(depth):
        return recurse(depth - 1) if depth else 1 / zero

    return recurse(50)


def endless_recursion():
    return endless_recursion() + 1


EXAMPLES = [
    value
    for value in list(vars().values())
    if getattr(value, "__module__", "") == __name__ and callable(value) and value is not Point
]


def raise_all():
    """Raise a group of all their exceptions. Each has its own traceback, as this process prints it, as `text`."""
    import traceback

    errors = []
    for example in EXAMPLES:
        try:
            example()
        except Exception as error:
            error.text = traceback.format_exc()
            errors.append(error)
    raise ExceptionGroup("all", errors)
