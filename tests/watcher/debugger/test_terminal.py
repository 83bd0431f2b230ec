"""`breakpoint()` in a rank opens pdb in the caller's terminal."""

import re
import sys
import time
import traceback
from pathlib import Path

import pytest

import mpwatch
from support.programs import ENV
from support.prompts import DebuggedProgram
from support.runs import failed
from watcher.debugger import debugged_program

FILE = Path(debugged_program.__file__)


def debugged(function, ranks=(0, 1), **options):
    return DebuggedProgram(FILE, function, ranks and list(ranks), **options)


def test_one_rank_is_debugged_and_the_run_succeeds():
    with debugged("loop", [1]) as program:
        assert program.wait_for_prompt() == "(rank 1) (Pdb)"
        assert program.ask("p values, step") == ["({'rank': 1, 'step': 0}, 1)", "(rank 1) (Pdb)"]
        stack = program.ask("w")
        assert len(stack) == 3  # no frame of mpwatch
        assert "debugged_program.py" in stack[0]
        assert program.ask("u")[0] == "*** Oldest frame"
        assert program.ask("!values['step'] = 7") == ["(rank 1) (Pdb)"]
        program.step_until("-> for step in range(3):")
        while program.ask("rank 0")[0] != "rank 0 is not at a prompt (has returned)":
            pass
        assert program.ask("r")[0] == "--Return--"
        rows = program.finish("n")  # beyond the end of the function
    assert rows[-2:] == ["values: [2, 2]", "children that are left: []"]


def test_the_user_goes_from_rank_to_rank():
    with debugged("wait_for_stopped_ranks", [0, 1], nprocs=3) as program:
        first = program.wait_for_prompt()
        program.wait_for_ranks("ranks 0-1")
        while not (rows := program.ask("rank 2"))[1].startswith("rank 2: in wait (debugged_program.py:"):
            pass
        assert rows[0] == "rank 2 is not at a prompt"
        assert any(row.endswith(" in wait_for_peer") for row in rows)
        assert program.ask("rank 7")[0] == "there is no rank 7 here, only ranks 0-2"
        other = {"(rank 0) (Pdb)": "1", "(rank 1) (Pdb)": "0"}[first]
        assert program.ask(f"rank {other}")[-1] == f"(rank {other}) (Pdb)"
        assert program.ask("p rank()")[0] == other
        assert program.ask("all p rank()")[:-1] == ["rank 0: 0", "rank 1: 1", "not at a prompt: rank 2"]
        assert any({"all", "rank", "ranks"} <= set(row.split()) for row in program.ask("help"))
        assert program.ask("help rank")[0].startswith("rank N: ")
        row, *_, prompt = program.ask("c")
        assert re.match(
            rf"rank {other} is still in wait \(debugged_program.py:.*; now at {first[1:7]}: debugged_program", row
        ), row
        assert prompt == first
        program.finish("q")


@pytest.mark.parametrize("key", ["q\r", "\x04", "\x03"], ids=["q", "ctrl-d", "ctrl-c"])
def test_the_user_ends_the_run(key):
    with debugged("loop", grace_period=60) as program:
        program.wait_for_prompt()
        started_at = time.monotonic()
        rows = program.finish(key)
        assert time.monotonic() - started_at < 10  # it takes 20 ms; grace_period is longer
    assert rows[-1] == "children that are left: []"
    assert any(row.startswith("KeyboardInterrupt: the user has ended the run at the prompt of rank") for row in rows)


def test_output_and_view_do_not_disturb_the_prompt():
    with debugged("print_lines", [0], logs=True, progress=True) as program:
        program.wait_for_prompt()
        assert program.ask("p number")[-2:] == ["10", "(rank 0) (Pdb)"]
        assert program.step_until("-> mpwatch.report(step=number, total=20)")[0] == "<0> line 11 of rank 0"
        assert program.ask("!print('from pdb')") == ["from pdb", "(rank 0) (Pdb)"]
        rows = program.finish("c")
    lines = [f"<{rank}> line {n} of rank {rank}" for n in range(20) for rank in (0, 1)]
    assert [line for line in lines if line not in rows] == [], "\n".join(rows)


def test_ctrl_z_at_a_prompt_suspends_the_program_at_once():
    with debugged("loop", [1], timeout=60, has_shell=True) as program:
        program.wait_for_prompt()
        program.type(b"\x1a")
        assert program.read_until(lambda rows: "stopped by SIGTSTP" in rows)
        program.type(b"fg\n")  # the program has left the terminal in the modes of the prompt, and this shell sets no others
        assert program.read_until(lambda rows: "in the foreground" in rows)
        program.type(b"\r")
        program.wait_for_prompt(after=program.emulator.cursor[0])
        assert program.ask("p values, step")[0] == "({'rank': 1, 'step': 0}, 1)"
        assert "values: [2, 2]" in program.finish("c")


def test_threads_have_a_prompt_and_forks_have_none():
    with debugged("stop_elsewhere") as program:
        assert program.wait_for_prompt() == "(rank 0, worker) (Pdb)"
        assert program.ask("p step")[0] == "1"
        text = "".join(program.finish("c"))
    assert "breakpoint() works in the rank itself, not in a process that the rank has forked" in text
    assert "set PYTHONBREAKPOINT=0 to ignore breakpoints" in text


def test_the_prompt_is_closed_when_another_rank_fails(tmp_path):
    gate = tmp_path / "gate"
    with debugged("fail_while_others_stop", [0], env={**ENV, "GATE": str(gate)}) as program:
        program.wait_for_prompt()
        gate.touch()
        assert program.end() == 0
    assert any(row.startswith("failed: rank 1 failed first: ValueError: of another rank") for row in program.rows())


def test_calls_of_a_group_have_a_prompt_in_the_main_thread_only_also_after_a_quit():
    with debugged("call_group", None) as program:
        assert program.wait_for_prompt() == "(rank 0) (Pdb)"
        assert program.ask("c")[-1] == "(rank 0) (Pdb)"
        program.ask("c")
        assert program.ask("q")[-1] == "(rank 0) (Pdb)"
        rows = program.finish("c")
    assert rows[-1] == "after the quit: [1]"
    assert any("breakpoint() can open no prompt: the run was started in a thread" in row for row in rows)
    assert rows.count("values: [1]") == 2


@pytest.mark.slow
def test_the_limits_stand_still_while_a_prompt_is_open():
    with debugged("loop", timeout=3, heartbeat_timeout=1) as program:
        program.wait_for_prompt()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            program.ask("ranks")
        assert "values: [2, 2]" in program.finish("all c")


def test_a_post_mortem_prompt_shows_the_variables_where_the_rank_raised():
    with debugged("raise_in_one", [1], debug="post_mortem") as program:
        assert program.wait_for_prompt() == "(rank 1) (Pdb)"
        assert "the rank has raised ValueError: secret of rank 1" in program.rows()
        assert program.ask("p secret")[0] == "'secret of rank 1'"
        assert program.ask("ranks")[0].startswith("rank 0: in wait (debugged_program.py:")
        rows = program.finish("q")
    assert any(row.startswith("failed: rank 1 failed first: ValueError: secret of rank 1") for row in rows)


NO_PROMPT = "can open no prompt: the program that started the run has neither a terminal on stdin nor a notebook"


def test_without_a_terminal_the_error_or_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stdin", None)
    error = failed(debugged_program.stop_once, nprocs=1).__cause__
    assert str(error).startswith(f"breakpoint() {NO_PROMPT}")
    assert "set PYTHONBREAKPOINT=0 to ignore breakpoints" in str(error)
    assert traceback.extract_tb(error.__traceback__)[0].name == "stop_once"
    assert list(mpwatch.run(debugged_program.stop_once, nprocs=1, env={"PYTHONBREAKPOINT": "0"})) == [1]
    mpwatch.run(debugged_program.raise_in_one, 2, args=([0, 1],), debug="post_mortem", check=False)
    (text,) = caplog.messages
    assert text.startswith(f"debug='post_mortem' {NO_PROMPT}")
