"""Stacks that a process writes of itself: real signals, and a real pipe. Each test has a Python process of its own."""

import gc
import os
import signal
import threading
import time
import weakref
from random import Random

from mpwatch.os_support.signals import PYTHON_DUMP_SIGNAL
from mpwatch.watcher.diagnosis.stack_dumps import StackDumpParser
from mpwatch.wire.messages import STACKS_END
from mpwatch.worker.stack_dumps import INNERMOST_FRAMES, LEFT_OUT_STACKS, OUTERMOST_FRAMES, register_stack_dumps
from support.programs import in_own_process


class StackPipe:
    """A pipe for the stacks of this process."""

    def __init__(self):
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.main_thread = register_stack_dumps(self.writer)

    def read(self):
        try:
            return os.read(self._reader, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def dump(self):
        """Return the stacks as the watcher shows them."""
        signal.raise_signal(PYTHON_DUMP_SIGNAL)
        parser = self.parse(self.read())
        assert parser.is_complete()
        return parser.dump

    def parse(self, text):
        parser = StackDumpParser()
        parser.mark_ready(self.main_thread)
        parser.start_dump()
        parser.feed(text.encode())
        return parser


def leave_local_variable(function):
    """Call the function while a local variable refers to an object. Return whether the object is gone after that."""
    gc.disable()

    def call():
        local = Item(1)
        function()
        return weakref.ref(local)

    return call()() is None


class Item:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


@in_own_process
def test_a_dump_keeps_no_variables_alive():
    """Otherwise the tensors of a function would stay in memory until Python's next garbage collection."""
    StackPipe()
    assert leave_local_variable(lambda: signal.raise_signal(PYTHON_DUMP_SIGNAL))


@in_own_process
def test_the_answer_of_the_main_thread_keeps_no_variables_alive():
    from mpwatch.worker.collectives import describe_rank

    assert leave_local_variable(describe_rank)


@in_own_process
def test_each_dump_while_functions_begin_and_end_is_whole():
    """faulthandler would crash here, or write a part of the stack: see worker/stack_dumps.py."""
    pipe = StackPipe()
    random, parent = Random(1), os.getpid()
    child = os.fork()
    if child == 0:
        for _ in range(1_000):
            os.kill(parent, PYTHON_DUMP_SIGNAL)
            time.sleep(random.random() / 2_000)
        os._exit(0)
    text = ""
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        sorted(map(Item, range(50)), key=Item.get)
        text += pipe.read()
    dumps = text.split("Current thread ")[1:]
    assert len(dumps) > 100  # Python's handler runs once for all signals that came since its last check
    outermost = '\n  File "<string>", line 1 in <module>\n'
    assert all(dump.replace(STACKS_END.decode(), "").endswith(outermost) for dump in dumps)


@in_own_process
def test_the_function_is_seen_where_it_is():
    def function_of_the_user():
        return pipe.dump()

    pipe = StackPipe()
    frames = function_of_the_user().splitlines()[1:]
    assert [frame.rpartition(" in ")[2] for frame in frames[:2]] == ["dump", "function_of_the_user"]
    line = function_of_the_user.__code__.co_firstlineno + 1
    assert frames[1] == f'  File "{__file__}", line {line} in function_of_the_user'


@in_own_process
def test_all_threads_are_seen():
    has_started = threading.Barrier(61)

    def wait_in_a_thread():
        has_started.wait()
        threading.Event().wait()

    threads = [threading.Thread(target=wait_in_a_thread, daemon=True) for _ in range(60)]
    for thread in threads:
        thread.start()
    has_started.wait()
    main, *others = StackPipe().dump().split("\n\n")
    assert "in test_all_threads_are_seen" in main
    assert sum("in wait_in_a_thread" in other for other in others) == 60


@in_own_process
def test_the_main_thread_is_seen_if_the_stacks_do_not_fit_into_the_pipe():
    def recurse(depth, fn):
        return recurse(depth - 1, fn) if depth else fn()

    def wait_in_a_thread():
        has_started.wait()
        threading.Event().wait()

    has_started = threading.Barrier(21)
    threads = [threading.Thread(target=recurse, args=(200, wait_in_a_thread), daemon=True) for _ in range(20)]
    for thread in threads:
        thread.start()
    has_started.wait()
    main, *others = recurse(200, StackPipe().dump).split("\n\n")
    assert others[-1] == LEFT_OUT_STACKS.decode().strip()
    assert 0 < len(others) - 1 < 20
    assert main.startswith("Current thread ")
    inner, outer = main.split("  ...\n")
    assert inner.count("in recurse") == INNERMOST_FRAMES - 1
    assert outer.count("  File ") == OUTERMOST_FRAMES
    assert outer.endswith('  File "<string>", line 1 in <module>')


@in_own_process
def test_a_name_with_a_line_break_stays_on_its_line():
    pipe = StackPipe()
    names = {"dump": pipe.dump}
    exec(compile("text = dump()", "ü\n\udcff", "exec"), names)
    assert '\n  File "\\xfc\\n\\udcff", line 1 in <module>\n' in names["text"]
    exec(compile("text = dump()", "ü", "exec"), names)
    assert '\n  File "ü", line 1 in <module>\n' in names["text"]


@in_own_process
def test_what_does_not_fit_into_a_full_or_closed_pipe_is_lost():
    pipe = StackPipe()
    for _ in range(1_000):
        signal.raise_signal(PYTHON_DUMP_SIGNAL)
    pipe.read()
    pipe.dump()
    os.close(pipe.writer)
    signal.raise_signal(PYTHON_DUMP_SIGNAL)


@in_own_process
def test_a_forked_child_writes_no_stacks():
    pipe = StackPipe()
    child = os.fork()
    if child == 0:
        signal.raise_signal(PYTHON_DUMP_SIGNAL)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pipe.read() == ""
