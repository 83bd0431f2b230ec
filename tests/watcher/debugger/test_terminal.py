"""`breakpoint()` in a rank opens pdb in the caller's terminal."""

import re
import sys
import time
import traceback
from pathlib import Path

import pytest

import mpwatch
from support.process_state import is_alive
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
        assert program.ask("r")[0] == "--Return--"
        rows = program.finish("n")  # beyond the end of the function
    assert rows[-2:] == ["values: [2, 2]", "children that are left: []"]


def test_the_ranks_have_their_prompts_one_after_another():
    with debugged("loop", range(4), nprocs=4) as program:
        prompts = [program.wait_for_prompt()]
        for _ in range(3):
            assert program.ask("p rank()")[0] in prompts[-1]
            move, *_, prompt = program.ask("c")
            assert re.fullmatch(rf"now at {prompt[1:7]}: debugged_program.py:\d+ in loop", move)
            prompts.append(prompt)
        assert sorted(prompts) == [f"(rank {number}) (Pdb)" for number in range(4)]
        assert "values: [2, 2, 2, 2]" in program.finish("c")


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


def test_a_signal_at_a_prompt_ends_the_run_and_reaches_the_program():
    with debugged("loop", handles_sigterm=True) as program:
        program.wait_for_prompt()
        program.process.terminate()
        assert program.end() == 0
    assert [row for row in program.rows() if row.startswith(("SIGTERM", "KeyboardInterrupt", "failed"))] == [
        "SIGTERM has come",
        "failed: the run was stopped: this process received SIGTERM",
    ]


@pytest.mark.parametrize("key", ["c\r", "\x03"], ids=["c", "ctrl-c"])
def test_a_rank_that_has_ended_is_named_after_the_next_key(key, tmp_path, eventually):
    gate = tmp_path / "gate"
    with debugged("fail_while_others_stop", [0], env={**ENV, "GATE": str(gate)}) as program:
        program.wait_for_prompt()
        pid = int(program.ask("p os.getpid()")[0])
        gate.touch()
        eventually(lambda: not is_alive(pid))
        rows = program.finish(key)
    assert "rank 0 has ended" in rows
    assert any(row.startswith("failed: rank 1 failed first: ValueError: of another rank") for row in rows)


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
            program.ask("p step")
        program.ask("c")
        assert "values: [2, 2]" in program.finish("c")


def test_a_post_mortem_prompt_shows_the_variables_where_the_rank_raised():
    with debugged("raise_in_one", [1], debug="post_mortem") as program:
        assert program.wait_for_prompt() == "(rank 1) (Pdb)"
        assert "the rank has raised ValueError: secret of rank 1" in program.rows()
        assert program.ask("p secret")[0] == "'secret of rank 1'"
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
