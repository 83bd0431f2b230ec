"""`WorkerGroup.stacks()` and Ctrl-\\: where the ranks are while they go on."""

import os
from contextlib import suppress

import pytest

import mpwatch
from support.functions import rank
from support.programs import ENV, command
from support.screens import Program
from watcher.observers import stack_request_functions as fn


@pytest.fixture
def gate(tmp_path):
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def open_gate(gate, is_waiting):
    """Let all go on that wait at the gate, and those that come to it later."""
    while is_waiting():
        with suppress(OSError):  # nobody waits at this moment
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))


def is_reading(text):
    return "in wait_at_gate\n    os.close(os.open(path" in text


def test_no_control_character_of_a_file_name_reaches_the_terminal(gate):
    with mpwatch.submit(fn.wait_in_a_file_with_an_odd_name, nprocs=1, args=(str(gate),)) as run:
        while r'File "/tmp/\x1b[31m\n.py", line 1 in <module>' not in (text := str(run.stacks())):
            assert not run.done()
            assert "\x1b" not in text
        open_gate(gate, lambda: not run.done())


def test_stacks_during_a_call_are_those_of_all_ranks_and_equal_ones_are_shown_once(gate):
    def condition(stacks):
        is_in_lock = "in release_at_gate" in stacks[1] and "\n    lock.acquire()" in stacks[1]
        return is_in_lock and all(is_reading(stacks[rank]) for rank in (0, 2))

    with mpwatch.WorkerGroup(3, env={"PYTHONUNBUFFERED": "1"}) as group:
        group.run(rank)
        assert str(group.stacks()) == "ranks 0-2: waiting for a call"
        call = group.submit(fn.wait_at_gate_or_in_a_lock, (str(gate),))
        while not condition(stacks := group.stacks()):
            assert not call.done()
        open_gate(gate, lambda: not call.done())
    assert (list(call.result()), dict(call.result().stacks)) == ([0, 1, 2], {})
    text = str(stacks)
    assert text.startswith("ranks 0, 2: (stack_request_functions.py:")
    assert "\nrank 1: (stack_request_functions.py:" in text
    assert "\n  another thread (most recent call first):\n" in text
    assert "0x" not in text
    assert "/mpwatch/worker/" not in text


def run_program(*args):
    return Program(*command(fn.main, *args), env=ENV, columns=160, rows=60)


def test_ctrl_backslash_shows_stacks_and_the_run_goes_on(gate):
    with run_program("wait", str(gate)) as program:
        program.read_until(lambda rows: any("rank 1 waits" in row for row in rows))
        requests = 0
        while "in wait_at_gate" not in "\n".join(program.emulator.all_rows()):  # a rank may not have come to it
            program.type(b"\x1c")
            requests += 1
            assert program.read_until(lambda _, n=requests: "\n".join(program.emulator.all_rows()).count("they go on") >= n)
        open_gate(gate, lambda: program.process.poll() is None)
        assert program.end() == 0
    rows = program.emulator.all_rows()
    assert "mpwatch: where the ranks are now (they go on)" in "\n".join(rows)
    assert {"values: [0, 1]", "handler: True"} <= set(rows)


def test_a_handler_of_the_user_for_sigquit_wins(gate):
    with run_program("handler", str(gate)) as program:
        program.read_until(lambda rows: any("rank 1 waits" in row for row in rows))
        program.type(b"\x1c")
        assert program.read_until(lambda rows: any("the user's handler" in row for row in rows))
        open_gate(gate, lambda: program.process.poll() is None)
        assert program.end() == 0
    assert "where the ranks are" not in "\n".join(program.emulator.all_rows())


NO_STACK = "running; no stack came in time"  # on a machine under load


def test_stacks_are_whole_while_functions_begin_and_end(tmp_path, eventually):
    """faulthandler alone would crash the rank here, or write a part of the stack."""

    def work_until(gate):
        class Item:
            def get(self):
                return id(self)

        while not os.path.exists(gate):
            sorted([Item() for _ in range(50)], key=Item.get)

    with mpwatch.submit(work_until, 1, args=(str(tmp_path / "gate"),)) as handle:
        eventually(lambda: " in work_until" in str(handle.stacks()))
        main_threads = [handle.stacks()[0].partition("\n\n")[0] for _ in range(50)]
        whole = [text for text in main_threads if text != NO_STACK]
        assert len(whole) > 10
        assert all(text.splitlines()[-2].endswith(" in work_until") for text in whole), whole
        (tmp_path / "gate").touch()
