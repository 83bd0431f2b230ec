"""Random scripts: whatever classes and functions they combine, a rank finds them as the caller does."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.programs import python
from support.thoroughness import choose

HEAD = """
import abc, collections, dataclasses, enum, functools, inspect, pickle, typing
from dataclasses import dataclass, field
import mpwatch

T = typing.TypeVar("T")
TABLE, HOOKS = {}, []  # what the hooks of classes have done: each runs once

class Keyed:
    def __init_subclass__(cls, key=None, **keywords):
        super().__init_subclass__(**keywords)
        cls.key = key
        HOOKS.append(cls.__qualname__)
        TABLE[cls.__qualname__] = cls

class Meta(type):
    def __new__(meta, name, bases, body, **keywords):
        HOOKS.append(name)
        return super().__new__(meta, name, bases, {**body, "keywords": tuple(keywords)})

    def __init__(cls, name, bases, body, **keywords):
        super().__init__(name, bases, body)
        cls.sorted = sorted(keywords)

class Named:
    def __set_name__(self, owner, name):
        HOOKS.append(name)
        self.name = name

    def __get__(self, instance, owner=None):
        return self.name

def traced(fn):
    calls = 0

    @functools.wraps(fn)
    def wrapper(*args):
        nonlocal calls
        calls += 1
        return calls > 0, fn(*args)

    wrapper.calls = lambda: calls
    return wrapper
"""
TAIL = """
IGNORED = {"__slotnames__", "__dict__", "__weakref__", "_abc_impl", "__doc__"}

def show(value):
    if isinstance(value, type):
        return value.__qualname__
    if inspect.isfunction(value):
        return value.__qualname__, value.__module__, str(inspect.signature(value)), value.__doc__
    if isinstance(value, (classmethod, staticmethod)):
        return type(value).__name__, show(value.__func__)
    if isinstance(value, (tuple, list)):
        return [show(each) for each in value]
    if isinstance(value, dict):
        return {str(key): show(each) for key, each in value.items()}
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text

def attempt(act):
    try:
        return show(act())
    except Exception as error:
        return repr(error)

def describe(cls):
    made = attempt(cls)
    return [
        cls.__qualname__, cls.__module__, show(type(cls)), show(cls.__mro__), made,
        {name: show(value) for name, value in sorted(vars(cls).items()) if name not in IGNORED},
        attempt(lambda: pickle.loads(pickle.dumps(cls)) is cls),
        attempt(lambda: list(cls)), attempt(lambda: cls().method()), attempt(lambda: cls().chained()), attempt(lambda: hash(cls(1)) == hash(cls(1))),
        attempt(lambda: cls(1) < cls(2)), attempt(lambda: cls().cached), attempt(lambda: typing.get_type_hints(cls)),
        attempt(lambda: [each.name for each in dataclasses.fields(cls)]), attempt(lambda: cls[int]), attempt(lambda: isinstance(cls(), CLASSES)),
    ]

def ask():
    return [describe(cls) for cls in CLASSES], HOOKS, sorted(TABLE), [TABLE[name] in CLASSES for name in sorted(TABLE)]

here = ask()
with mpwatch.WorkerGroup(1) as group:
    for _ in range(2):
        (there,) = group.run(ask)
        for ours, theirs in zip(here[0], there[0], strict=True):
            assert ours == theirs, f"{ours}\\n{theirs}"
        assert here == there
    (back,) = group.run(lambda: CLASSES)
    assert all(ours is theirs for ours, theirs in zip(CLASSES, back, strict=True))
print("same")
"""

MEMBERS = [
    "value = 1",
    "value = 2",
    "names = ('a', 'b')",
    "named = Named()",
    "def method(self): return 'method', self.__class__.__name__",
    "@traced\n    def method(self): return 'traced'",
    "def chained(self): return [__class__.__name__, *getattr(super(), 'chained', list)()]",
    "@functools.cached_property\n    def cached(self): return 'cached'",
    "@property\n    def cached(self): return 'property'",
    "@classmethod\n    def method(cls): return cls.__name__",
    "@staticmethod\n    def method(): return 'static'",
    "@functools.singledispatchmethod\n    def show(self, x): return 'any'",
    "@functools.lru_cache\n    def method(self): return 'cached method'",
    "class Inner:\n        value = 3",
    "__hash__ = None",
    "def __repr__(self): return type(self).__name__ + '()'",
    "hint: 'int' = 1",
    "later: 'typing.Optional[Keyed]' = None",
]
OPTIONS = st.sets(
    st.sampled_from(["frozen=True", "order=True", "slots=True", "kw_only=True", "eq=False", "repr=False"]), max_size=2
)
FIELDS = st.lists(
    st.sampled_from(["int = 1", "list = field(default_factory=list)", "str = 'x'", "typing.ClassVar[int] = 3"]), max_size=3
)
ENUMS = st.sampled_from(
    ["enum.Enum", "enum.IntEnum", "enum.Flag", "enum.IntFlag", "str, enum.Enum", "enum.StrEnum", "Named, enum.Enum"]
)


def write_class(head, lines):
    return f"{head}:\n    " + "\n    ".join([*lines, "pass"])


@st.composite
def make_plain_class(draw, number, earlier):
    other_bases = ["Keyed", "abc.ABC", "typing.Generic[T]", "dict", "collections.UserList"]
    bases = draw(st.lists(st.sampled_from([*earlier, *other_bases]), max_size=2, unique=True))
    keywords = draw(st.sampled_from([[], [], ["metaclass=Meta"], ["metaclass=Meta", "table=1"], ["key='k'"]]))
    body = draw(st.lists(st.sampled_from(MEMBERS), max_size=5))
    slots = draw(st.sampled_from([[], [], ["__slots__ = ('x', '__y')"], ["__slots__ = ()"]]))
    return write_class(f"class C{number}({', '.join(bases + keywords)})", [*slots, *body])


@st.composite
def make_dataclass(draw, number, earlier):
    bases = draw(st.lists(st.sampled_from([*earlier, "Keyed"]), max_size=1))
    fields = [f"f{number}_{i}: {kind}" for i, kind in enumerate(draw(FIELDS))]
    body = draw(st.lists(st.sampled_from(MEMBERS), max_size=2))
    head = f"@dataclass({', '.join(sorted(draw(OPTIONS)))})\nclass C{number}({', '.join(bases)})"
    return write_class(head, [*fields, *body])


@st.composite
def make_enum(draw, number, _):
    base = draw(ENUMS)
    is_text = "str" in base.lower()
    values = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    body = [f"M{i} = {str(value)!r}" if is_text else f"M{i} = {value}" for i, value in enumerate(values)]
    if base == "enum.Enum" and draw(st.booleans()):
        body = [f"{line}, 'text'" for line in body] + ["def __init__(self, number, text): self.number = number"]
    methods = "pass", "def method(self): return self.name", "@property\n    def cached(self): return self.value"
    return write_class(f"class C{number}({base})", [*body, draw(st.sampled_from(methods))])


@st.composite
def make_scripts(draw):
    definitions, earlier = [], []
    for number in range(draw(st.integers(8, 16))):
        kind = draw(st.sampled_from([make_plain_class, make_plain_class, make_dataclass, make_enum]))
        definitions.append(draw(kind(number, earlier)))
        if kind is not make_enum:
            earlier.append(f"C{number}")
    return definitions


@settings(max_examples=choose(8, 60), suppress_health_check=list(HealthCheck), deadline=None)
@given(make_scripts())
def test_random_classes_are_in_a_rank_what_they_are_in_the_caller(definitions):
    # a combination that Python refuses is left out, with all that depends on it
    tried = (
        f"try:\n    exec({text!r})\nexcept (TypeError, ValueError, NameError, AttributeError):\n    pass"
        for text in definitions
    )
    names = "CLASSES = tuple(value for name, value in sorted(globals().items()) if name[0] == 'C' and name[1:].isdigit())"
    assert python("-c", "\n".join([HEAD, *tried, names, TAIL])).stdout == "same\n"
