"""What a script defines is in a rank what it is in the caller: a table of constructs, each with what is asked of it."""

from importlib.util import find_spec

import pytest

from support.programs import python

# Each script has a function `ask`, whose answer must be the same in the caller and in a rank; in a second call the rank has
# the definitions. SENT is what must be the same object when it comes back.
ASK = """

SENT = globals().get("SENT", ())

if __name__ == "__main__":
    import mpwatch

    here = ask()
    with mpwatch.WorkerGroup(1) as group:
        for _ in range(2):
            there, = group.run(ask)
            assert here == there, f"{here} in the caller, {there} in the rank"
            back, = group.run(lambda: SENT)
            assert [id(each) for each in back] == [id(each) for each in SENT], back
    print("same")
"""

ROWS = {
    "names in annotations only": """
from __future__ import annotations
import typing
import decimal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from nowhere import Missing

@dataclass
class Node:
    left: Optional[Node]
    value: decimal.Decimal
    link: typing.Optional["Link"]

class Link:
    pass

def visit(node: Node) -> list[Leaf]:
    pass

class Leaf:
    pass

def unknown(x: Missing):
    pass

def ask():
    hints = [{name: str(kind) for name, kind in typing.get_type_hints(thing).items()} for thing in (visit, Node)]
    return hints, typing.get_type_hints(Node)["link"] == Optional[Link], unknown.__annotations__
""",
    "functions of all kinds, and names that only their code has": """
import asyncio, inspect
from typing import TypeVar

LIMIT = 3
class Base: pass
def small(): return 1

def make():
    n = 0
    def up():
        nonlocal n
        n += 1
    def get():
        return n
    class Inner:
        kind = Base
    return up, get, Inner, TypeVar("Inner")

up, get, *inner = make()
SENT = *inner, Base  # two of them have no name in the module

def gen():
    yield from (1, 2)

async def main():
    return 3

def f(a, /, b: int = 1, *args: str, c=[2], **kw) -> None:
    "doc"

f.tag = {"x": 1}

def ask():
    class Local(Base):
        limit = LIMIT
        def get(self): return LIMIT
    before = get()
    up()
    found = get() - before, Local.limit, Local().get(), globals()["small"](), eval("LIMIT"), list(gen()), asyncio.run(main())
    return *found, str(inspect.signature(f)), f.__doc__, f.tag, f.__kwdefaults__, f.__qualname__, inspect.getsource(f)
""",
    "enums": """
import enum, pickle

class Planet(enum.Enum):
    EARTH = (1, 2)
    TERRA = (1, 2)
    def __init__(self, mass, radius):
        self.mass = mass

class Coded(enum.Enum):
    def __new__(cls, code, text):
        self = object.__new__(cls)
        self._value_, self.text = code, text
        return self
    A = 1, "a"

class Perm(enum.Flag):
    R = 1
    W = 2
    X = 4
    RW = R | W

class Bits(enum.IntFlag):
    LOW = 1

class Word(str, enum.Enum):
    YES = "y"
    @property
    def length(self): return len(self.value)

combined = Perm.R | Perm.X
SENT = Planet, Planet.TERRA, Coded.A, Perm.RW, combined, Bits.LOW, Word.YES

def ask():
    everything = Planet.TERRA, Coded.A, Perm.RW, combined, Bits.LOW, Word.YES
    same = [pickle.loads(pickle.dumps(x)) is x for x in everything], Planet.TERRA is Planet.EARTH, Perm(5) is combined
    values = Planet.TERRA.mass, Coded(1).text, Word("y").length, Word.YES + "es", Bits.LOW | 2
    return [repr(x) for x in everything], same, list(Planet.__members__), values
""",
    "names of typing": """
import pickle
from typing import Generic, NewType, ParamSpec, TypeVar, NamedTuple, TypedDict, Protocol, runtime_checkable

T = TypeVar("T", bound="Shape")
P = ParamSpec("P")
UserId = NewType("UserId", int)

class Box(Generic[T]):
    def __init__(self, item: T): self.item = item

class IntBox(Box[int]): pass

class Point(NamedTuple):
    x: int
    y: int = 2
    def norm(self): return self.x + self.y

class Opts(TypedDict, total=False):
    lr: float

@runtime_checkable
class HasArea(Protocol):
    def area(self) -> int: ...

class Round:
    def area(self): return 3

SENT = T, P, UserId, Box, Point

def lookup(user: UserId) -> T:
    return UserId(user)

def ask():
    return (
        lookup(5), [pickle.loads(pickle.dumps(x)) is x for x in (T, P, UserId)], str(Box[int]), str(IntBox.__orig_bases__),
        Box.__parameters__ == (T,), Point(1).norm(), Point(1)._replace(x=3), sorted(Opts.__optional_keys__),
        isinstance(Round(), HasArea), isinstance(1, HasArea), str(T.__bound__), lookup.__annotations__["user"] is UserId,
    )
""",
    "classes that do something when they are made": """
import functools, pickle, typing
from dataclasses import dataclass, field, fields

HOOKS = []  # what has been done: each runs once

class Keyed:
    def __init_subclass__(cls, key=None, **keywords):
        super().__init_subclass__(**keywords)
        cls.key = key
        HOOKS.append(cls.__qualname__)

class Meta(type):
    def __new__(meta, name, bases, body, **keywords):
        HOOKS.append(name)
        return super().__new__(meta, name, bases, {**body, "keywords": tuple(keywords)})
    def __init__(cls, name, bases, body, **keywords):
        super().__init__(name, bases, body)
        cls.known = sorted(keywords)

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
    return wrapper

class Base(Keyed, key="k"):
    __slots__ = "x", "__y"
    named = Named()
    value = 1
    def __init__(self): self.x = self.__y = 2
    def chained(self): return [__class__.__name__, self.__y]
    class Inner(Keyed): value = 3

class Made(Base, metaclass=Meta, table=1):
    value = 1  # as in the base
    hint: "typing.Optional[Keyed]" = None
    __hash__ = None
    def chained(self): return [__class__.__name__, *super().chained()]
    @traced
    def method(self): return type(self).__name__
    @classmethod
    def make(cls): return cls.__name__
    @staticmethod
    def plain(): return "static"
    @functools.cached_property
    def cached(self): return [self.x]
    @functools.singledispatchmethod
    def show(self, x): return "any"
    @show.register
    def _(self, x: int): return "int"

@dataclass(frozen=True, order=True, slots=True, kw_only=True)
class Point(Keyed):
    x: int = 1
    tags: list = field(default_factory=list, compare=False)
    kind: typing.ClassVar[int] = 3

SENT = Keyed, Meta, Base, Base.Inner, Made, Point

def ask():
    made, point = Made(), Point(x=2)
    values = made.named, made.chained(), made.method(), Made.make(), Made.plain(), made.cached, made.show(1), made.show("")
    points = Point() < point, hash(point) == hash(Point(x=2)), repr(point), [each.name for each in fields(Point)], Point.kind
    of_made = Made.keywords, Made.known, Base.key, "value" in vars(Made), "__hash__" in vars(Made), vars(made)
    names = [sorted(name for name in vars(cls) if name[:2] != "__") for cls in SENT]
    hints, same = str(typing.get_type_hints(Made)), [pickle.loads(pickle.dumps(cls)) is cls for cls in SENT]
    return HOOKS, values, points, of_made, names, hints, same, [str(cls.__mro__) for cls in SENT], type(Made) is Meta
""",
    "abstract classes, functools, sentinels, weak references, ctypes": """
import abc, ctypes, dataclasses, functools, pickle, weakref

class Sentinel:
    def __reduce__(self): return "UNSET"  # it pickles itself by its name

UNSET = Sentinel()

def get(x=UNSET, y=dataclasses.MISSING):
    return x is UNSET, y is dataclasses.MISSING

class Shape(abc.ABC):
    @property
    @abc.abstractmethod
    def name(self): ...

class Square(Shape):
    name = "square"

@Shape.register
class Other: pass

@functools.singledispatch
def describe(x): return "object"

@describe.register(Shape)
def _(x): return "shape"

@functools.lru_cache(maxsize=10)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)

add = functools.partial(int.__add__, 1)
other = Other()
reference = weakref.ref(other)
by_key, by_value = weakref.WeakKeyDictionary({other: 1}), weakref.WeakValueDictionary({"a": other})

class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]

def ask():
    try:
        Shape()
    except TypeError as e:
        error = str(e)
    fib.cache_clear()
    shapes = error, Square().name, isinstance(other, Shape), isinstance(1, Shape), sorted(Shape.__abstractmethods__)
    dispatch = describe(1), describe(other), describe.dispatch(Shape) is describe.registry[Shape]
    weak = reference() is other, by_key[other], by_value["a"] is other
    cached = fib(20), fib.cache_info(), add(2), Pair(1, 2.5).b, Pair.b.offset
    return *get(), pickle.loads(pickle.dumps(UNSET)) is UNSET, shapes, dispatch, weak, cached
""",
    "pydantic": """
from typing import Generic, Optional, TypeVar
import pydantic
from pydantic import BaseModel, Field, computed_field, field_validator

T = TypeVar("T")

class Inner(BaseModel, extra="forbid", frozen=True):
    x: int = 1

class Model(BaseModel):
    inner: Inner = Inner()
    names: list[str] = Field(default_factory=list)
    child: "Optional[Model]" = None
    _hidden: int = pydantic.PrivateAttr(default=4)

    @field_validator("names")
    @classmethod
    def check(cls, names):
        return [name.upper() for name in names]

    @computed_field
    @property
    def count(self) -> int:
        return len(self.names)

class Reply(BaseModel, Generic[T]):
    data: T

def ask():
    class Sub(Model):
        more: int = 2
    model = Model(names=["a"], child=Model(names=["b"]))
    try:
        Model(inner={"y": 1})
    except pydantic.ValidationError as error:
        kind = error.errors(include_url=False)[0]["type"]
    return (
        model.model_dump(), model._hidden, Sub(names=["z"]).model_dump(), kind, Reply[int](data="3").data,
        sorted(Inner.model_json_schema()["properties"]), Model.model_validate_json('{"names": ["q"]}').names, type(model.inner) is Inner,
    )
""",
    "torch modules": """
import io
import torch
from torch import nn

class Net(nn.Module):
    scale: int = 2
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.tied = self.layer
        self.register_forward_hook(hook)
    def forward(self, x):
        return self.layer(x) * self.scale

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return 2 * x
    @staticmethod
    def backward(ctx, grad): return 2 * grad

class Named(torch.Tensor):
    pass

def hook(module, args, output):
    return output + 1

net = Net()

def ask():
    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    torch.save({"net": net, "class": Net}, saved := io.BytesIO())
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    same = type(loaded["net"]) is loaded["class"] is Net, net.layer is net.tied, type(torch.ones(1).as_subclass(Named)) is Named
    return net(torch.ones(2)).tolist(), loaded["net"](torch.ones(2)).tolist(), x.grad.tolist(), same, str(net)
""",
    "the beginning of a training script": """
import argparse, logging, sys, threading
from types import ModuleType
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

logger = logging.getLogger(__name__)
args = argparse.Namespace(lr=0.1)
torch.backends.cudnn.benchmark = True
ctx = torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16)
scaler = torch.amp.GradScaler("cpu")
generator = torch.Generator().manual_seed(1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
loader = DataLoader(TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.long)), batch_size=2)
aten = torch.ops.aten
lock = threading.Lock()  # used by no rank
STAND_INS = {name: each for name, each in sys.modules.items() if name.startswith("torch") and type(each) is not ModuleType}
SENT = *STAND_INS.values(), torch.bfloat16

def train():
    for x, y in tqdm(loader, disable=True):
        with ctx:
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    logger.info("loss %s", loss)
    return loss.isfinite().item()

def ask():
    torch._dynamo.config.suppress_errors = inductor_config.max_autotune = torch.backends.cudnn.deterministic = False
    assert STAND_INS.keys() > {"torch.backends.cudnn", "torch.ops", "torch.classes", "torch._dynamo.config"}
    assert all(each is sys.modules[name] for name, each in STAND_INS.items())
    return train(), aten.add(torch.ones(1), torch.ones(1)).item(), generator.initial_seed(), torch.get_default_dtype()
""",
    "torch.compile": """
import warnings
import torch

warnings.simplefilter("ignore")  # inductor uses what torch has deprecated

class Net(torch.nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x):
        return x * 2

@torch.compile
def unused(x):
    return x

class Trainer:
    def __init__(self):
        self.step = torch.compile(self._step, backend="eager")
    def _step(self, x):
        return x - 1

compiled, trainer = torch.compile(Net(), backend="eager"), Trainer()

def ask():
    unused
    return [fn(torch.ones(1)).tolist() for fn in (Net(), compiled, trainer.step)], compiled._orig_mod.training
""",
}

SLOW = ("the beginning of a training script", "torch.compile")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ROWS])
def test_a_construct_is_in_a_rank_what_it_is_in_the_caller(name, tmp_path):
    for package in ("pydantic", "torch"):
        if f"import {package}" in ROWS[name] and find_spec(package) is None:
            pytest.skip(f"needs {package}")
    script = tmp_path / "script.py"
    script.write_text(ROWS[name] + ASK)
    assert python("-W", "ignore", str(script)).stdout == "same\n"


# --- Modules that a fresh interpreter does not find

PLUGIN = """
import helper_of_plugin

class Plugin:
    pass

def work():
    return helper_of_plugin.VALUE, Plugin.__module__
"""
IMPORTER = """
import importlib.util, os, pathlib, pickle, sys, types
import mpwatch

folder = pathlib.Path("plugins").absolute()

def check(plugin):
    Plugin, work = plugin.Plugin, plugin.work

    def ask():
        is_found = plugin.__name__ not in sys.modules or pickle.loads(pickle.dumps(Plugin)) is Plugin
        return plugin.work(), work(), type(Plugin()) is plugin.Plugin, is_found

    assert list(mpwatch.run(ask, 1)) == [ask()]
    assert list(mpwatch.run(work, 1)) == [work()]

spec = importlib.util.spec_from_file_location("by_spec", folder / "plugin.py")
sys.path.insert(0, str(folder))
by_spec = sys.modules["by_spec"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(by_spec)
sys.path.remove(str(folder))
check(by_spec)

sys.path.insert(0, "plugins")  # a relative folder
import plugin
os.chdir("/")
check(plugin)

sys.path.insert(0, str(folder))
from_text = sys.modules["from_text"] = types.ModuleType("from_text")
exec((folder / "plugin.py").read_text(), vars(from_text))
check(from_text)
"""


def test_modules_that_only_the_caller_finds(tmp_path):
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "helper_of_plugin.py").write_text("VALUE = 5")
    python("-c", IMPORTER, cwd=tmp_path)


CHILDREN = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
import mpwatch

OFFSET = 3

class Answer:
    def __init__(self, x):
        self.x = x

class Process(multiprocessing.get_context("spawn").Process):
    def __init__(self, queue):
        super().__init__()
        self.queue = queue
    def run(self):
        self.queue.put(Answer(self.name and __file__))

def square(x):
    return Answer(x * x + OFFSET)

def deep(x):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(square, x).result()

def work():
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    process = Process(queue)
    process.start()
    found = [queue.get().x == __file__]
    process.join()
    for method, fn in (("spawn", deep), ("forkserver", square), ("fork", square)):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            answer = pool.submit(fn, 2).result()
        found.append(type(answer) is Answer and answer.x)
    return found

"""
PARENTS = {
    "a function, without a guard": """
print(*mpwatch.run(work, 1))
multiprocessing.set_start_method("forkserver")
assert list(mpwatch.run(multiprocessing.get_start_method, 1)) == ["forkserver"]
""",
    "a Script": """
if __name__ == "__main__":
    print(work()) if "RANK" in os.environ else mpwatch.run(mpwatch.Script(__file__), 1)
""",
}


@pytest.mark.parametrize("parent", PARENTS)
def test_a_rank_spawns_processes(parent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHILDREN + PARENTS[parent])
    assert python(str(script)).stdout == "[True, 7, 7, 7]\n"


SPAWNED = """
import multiprocessing, sys
import mpwatch

class Answer:
    def __init__(self, x):
        self.x = x

class Refused(Exception):
    pass

def inner(answer):
    return Answer(answer.x + 1)

def train(answer):
    return mpwatch.run(inner, 1, args=(answer,))[0], type(answer) is Answer

def fail():
    raise Refused("no")

def trial():
    (back, is_same), _ = mpwatch.run(train, 2, args=(Answer(1),))
    try:
        mpwatch.run(fail, 1)
    except mpwatch.RunFailedError as error:
        print(type(back) is Answer, back.x, is_same, repr(error.__cause__), type(error.__cause__) is Refused)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=trial)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_was_spawned_from_the_script_starts_ranks(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    assert python(str(script), method).stdout == "True 2 True Refused('no') True\n"


ARRAYS = """
import numpy as np
import mpwatch

class Tagged(np.ndarray):
    pass

MANY = 1 << 16
rows = np.arange(4 * MANY, dtype=np.float64).reshape(4, MANY)
tagged = rows.view(Tagged)
tagged.tag = "t"
np.save("rows.npy", rows)
opened = np.load("rows.npy", mmap_mode="r+")
memory = np.memmap("raw", np.int32, "w+", offset=8, shape=(MANY,))
memory[:] = 7

def look(strided, tagged, opened, part, memory):
    assert strided.shape == (4, MANY // 2) and strided[1, 1] == MANY + 2
    assert type(tagged) is Tagged and tagged.tag == "t" and tagged[3, 3] == 3 * MANY + 3
    assert type(opened) is type(part) is np.memmap and opened[2, 5] == part[0, 5] == 2 * MANY + 5 and part.filename == opened.filename
    assert memory[0] == memory[-1] == 7
    memory[1], part[0, 0] = 8, -5
    return part, type("Made", (), {})  # a class that the rank has made needs more than plain pickle

((returned, _),) = mpwatch.run(look, 1, args=(rows[:, ::2], tagged, opened, opened[2:3], memory))
assert returned[0, 5] == 2 * MANY + 5
assert memory[1] == 8 and opened[2, 0] == -5  # the memory of a file is shared
"""


def test_arrays_of_subclasses_and_of_files(tmp_path):
    python("-c", ARRAYS, cwd=tmp_path)
