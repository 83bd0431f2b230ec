"""`breakpoint()` in a rank opens pdb in the caller's terminal."""

import os
import signal
import sys
import termios
import time
import traceback
from pathlib import Path

import pytest

import mpwatch
from support.programs import ENV, python
from support.prompts import DebuggedProgram
from watcher.debugger import debugged_program

FILE = Path(debugged_program.__file__)


def debugged(function, ranks=(0, 1), **options):
    return DebuggedProgram(FILE, function, list(ranks), **options)


def test_one_rank_is_debugged_and_the_run_succeeds():
    with debugged("loop", [1]) as program:
        assert program.wait_for_prompt() == "(rank 1) (Pdb)"
        assert program.ask("p values, step") == ["({'rank': 1, 'step': 0}, 1)", "(rank 1) (Pdb)"]
        assert "debugged_program.py" in program.ask("w")[0]
        assert program.ask("!values['step'] = 7") == ["(rank 1) (Pdb)"]
        program.step_until("-> for step in range(3):")
        rows = program.finish("c")
    assert "values: [2, 2]" in rows


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


def test_the_stack_has_no_frame_of_mpwatch():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        assert len(program.ask("w")) == 3
        assert program.ask("u")[0] == "*** Oldest frame"
        assert any("breakpoint()" in row for row in program.ask("ll"))
        program.finish("c")


def test_stepping_beyond_the_end_of_the_function_ends_the_call():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        assert program.ask("r")[0] == "--Return--"
        assert "values: [2, 2]" in program.finish("n")


def test_ranks_stop_one_after_another():
    with debugged("loop") as program:
        first = program.wait_for_prompt()
        program.wait_for_ranks("ranks 0-1")
        other = {"(rank 0) (Pdb)": "1", "(rank 1) (Pdb)": "0"}[first]
        assert program.ask(f"rank {other}")[-1] == f"(rank {other}) (Pdb)"
        assert program.ask("p rank()")[0] == other
        assert program.ask("all p rank()") == ["rank 0: 0", "rank 1: 1", f"(rank {other}) (Pdb)"]
        (place, _) = program.ask("ranks")
        assert place.startswith("ranks 0-1: at a prompt (debugged_program.py:")
        assert program.ask("c")[-1] == first
        assert "values: [2, 2]" in program.finish("c")


def test_all_ranks_go_on_together():
    with debugged("loop") as program:
        program.wait_for_prompt()
        program.wait_for_ranks("ranks 0-1")
        assert "values: [2, 2]" in program.finish("all c")


@pytest.mark.parametrize(
    ("function", "place"), [("wait_for_stopped_ranks", "is still in wait ("), ("loop_without_end", "runs (")]
)
def test_the_prompt_moves_to_another_rank(function, place):
    with debugged(function) as program:
        program.wait_for_prompt()
        program.wait_for_ranks("ranks 0-1")
        program.ask("rank 1")
        row = program.ask("c")[0]
        assert row.startswith(f"rank 1 {place}debugged_program.py:"), row
        assert "; now at rank 0: debugged_program.py:" in row
        program.finish("q")


def test_ranks_that_all_does_not_reach():
    with debugged("wait_for_stopped_ranks", [1, 3], nprocs=4) as program:
        program.wait_for_prompt()
        program.wait_for_ranks("ranks 1, 3")
        rows = program.ask("all p rank()")
        assert rows[:-1] == ["rank 1: 1", "rank 3: 3", "not at a prompt: ranks 0, 2"]
        program.finish("q")


def test_a_rank_that_waits_has_a_stack_and_no_prompt():
    with debugged("wait_for_stopped_ranks", [1]) as program:
        program.wait_for_prompt()
        while not (rows := program.ask("rank 0"))[1].startswith("rank 0: in wait (debugged_program.py:"):
            pass
        assert rows[0] == "rank 0 is not at a prompt; with debug='post_mortem' this command shows its variables"
        assert any(row.endswith(" in wait_for_peer") for row in rows)
        assert rows[-1] == "(rank 1) (Pdb)"
        assert program.ask("ranks")[1].startswith("rank 1: at a prompt (debugged_program.py:")
        program.finish("q")


def test_a_rank_that_has_returned_has_no_prompt():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        while program.ask("rank 0")[0] != "rank 0 is not at a prompt (has returned)":
            pass
        program.finish("c")


def test_a_rank_that_does_not_exist():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        assert program.ask("rank 7") == ["there is no rank 7 here, only ranks 0-1", "(rank 1) (Pdb)"]
        program.finish("c")


@pytest.mark.parametrize("key", ["q\r", "\x04", "\x03"], ids=["q", "ctrl-d", "ctrl-c"])
def test_the_user_ends_the_run(key):
    with debugged("loop", grace_period=60) as program:
        program.wait_for_prompt()
        started_at = time.monotonic()
        rows = program.finish(key)
        assert time.monotonic() - started_at < 10  # it takes 20 ms; grace_period is longer
    assert rows[-1] == "children that are left: []"
    assert any(row.startswith("KeyboardInterrupt: the user has ended the run at the prompt of rank") for row in rows)


@pytest.mark.parametrize("options", [{"logs": True}, {"logs": True, "progress": True}], ids=str)
def test_output_and_view_do_not_disturb_the_prompt(options):
    with debugged("print_lines", [0], **options) as program:
        program.wait_for_prompt()
        assert program.ask("p number")[-2:] == ["10", "(rank 0) (Pdb)"]
        assert program.ask("p number")[-2:] == ["10", "(rank 0) (Pdb)"]
        rows = program.finish("c")
    lines = [f"<{rank}> line {n} of rank {rank}" for n in range(20) for rank in (0, 1)]
    assert [line for line in lines if line not in rows] == [], "\n".join(rows)


def test_what_a_step_prints_comes_before_the_next_prompt():
    with debugged("print_lines", [0], logs=True) as program:
        program.wait_for_prompt()
        assert program.step_until("-> if rank() in ranks and number == 10:")[0] == "<0> line 11 of rank 0"
        assert program.ask("!print('from pdb')") == ["from pdb", "(rank 0) (Pdb)"]
        program.finish("c")


def test_the_help_has_the_commands_for_ranks():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        assert any({"all", "rank", "ranks"} <= set(row.split()) for row in program.ask("help"))
        for command in ("all COMMAND", "rank N", "ranks"):
            assert program.ask(f"help {command.split()[0]}")[0].startswith(f"{command}: ")
        program.finish("c")


def test_completion_and_history():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        before = program.emulator.cursor[0]
        program.type(b"p valu\t")
        assert program.read_until(lambda rows: rows[before].endswith("(Pdb) p values"))
        program.type(b"['rank']\r")
        program.wait_for_prompt(after=before)
        assert program.emulator.rows()[before + 1] == "1"
        before = program.emulator.cursor[0]
        program.type(b"\x1b[A")
        assert program.read_until(lambda rows: rows[before].endswith("(Pdb) p values['rank']"))
        program.type(b"\r")
        program.wait_for_prompt(after=before)
        program.finish("c")


def test_set_trace():
    with debugged("call_set_trace") as program:
        program.wait_for_prompt()
        program.wait_for_ranks("ranks 0-1")
        assert program.ask("n")[-2:] != []
        assert "values: [1, 1]" in program.finish("all c")


def test_a_rank_that_reads_the_terminal_raises():
    """It would be stopped by SIGTTIN if the terminal were its controlling one."""
    with debugged("read_terminal") as program:
        assert program.end() == 0
    assert any("OSError: [Errno 6] No such device or address: '/dev/tty'" in row for row in program.rows())


@pytest.mark.slow
def test_pdb_post_mortem_in_a_rank():
    with debugged("debug_an_exception") as program:
        program.wait_for_prompt()
        assert program.ask("p rank()")[0] == "0"
        assert "values: [2, 1.0]" in program.finish("q")


def test_breakpoints_and_interact():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        line = 1 + FILE.read_text().splitlines().index('    return values["step"]')
        assert program.ask(f"b {line}")[0].startswith("Breakpoint 1 at ")
        assert "return values" in "".join(program.ask("c"))
        program.type(b"clear\r")
        assert program.read_until(lambda rows: any("Clear all breaks?" in row for row in rows))
        before = program.emulator.cursor[0]
        program.type(b"y\r")
        program.wait_for_prompt(after=before)
        program.finish("c")


def test_a_thread_of_a_rank():
    with debugged("stop_in_a_thread", nprocs=1) as program:
        assert program.wait_for_prompt() == "(rank 0, worker) (Pdb)"
        assert program.ask("p step")[0] == "1"
        assert "values: [1]" in program.finish("c")


def test_a_fork_of_a_rank_has_no_prompt():
    with debugged("stop_in_a_fork", nprocs=1) as program:
        assert program.end() == 0
    text = "".join(program.rows())
    assert "breakpoint() works in the rank itself, not in a process that the rank has forked" in text
    assert "set PYTHONBREAKPOINT=0 to ignore breakpoints" in text


def test_the_prompt_is_closed_when_another_rank_fails():
    with debugged("fail_while_others_stop", [0]) as program:
        program.wait_for_prompt()
        assert program.end() == 0
    rows = program.rows()
    assert any(row.startswith("failed: rank 1 failed first: ValueError: of another rank") for row in rows)


def test_a_group_keeps_its_debugger():
    with debugged("loop", [0], group=True) as program:
        first = program.wait_for_prompt()
        assert first == "(rank 0) (Pdb)"
        assert "values: [2, 2]" in program.ask("c")
        rows = program.finish("c")
    assert rows.count("values: [2, 2]") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_watcher_closes_the_prompt(number):
    with debugged("loop") as program:
        program.wait_for_prompt()
        os.kill(program.process.pid, number)
        assert program.end() == -number


def test_a_killed_watcher_leaves_the_terminal_as_it_was():
    with debugged("loop") as program:
        before = termios.tcgetattr(program.controller_fd)
        program.wait_for_prompt()
        assert termios.tcgetattr(program.controller_fd) != before  # readline has changed the modes
        children = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text().split()
        program.process.kill()
        program.process.wait()
        deadline = time.monotonic() + 10
        while termios.tcgetattr(program.controller_fd) != before or any(is_alive(int(pid)) for pid in children):
            assert time.monotonic() < deadline


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_terminal_the_error_says_so():
    done = python(str(FILE), "loop", "[0, 1]", "{}", program="")
    assert (
        "breakpoint() can open no prompt: the program that started the run has neither a terminal on stdin nor a notebook"
        in done.stdout
    )
    assert "set PYTHONBREAKPOINT=0 to ignore breakpoints" in done.stdout


def test_the_error_without_a_terminal_has_no_frame_of_pdb_or_mpwatch(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(debugged_program.stop_once, nprocs=1, args=(0,))
    assert [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)] == ["stop_once"]


def test_ignored_breakpoints():
    done = python(str(FILE), "loop", "[0, 1]", "{}", program="", env={**ENV, "PYTHONBREAKPOINT": "0"})
    assert "values: [2, 2]" in done.stdout


@pytest.mark.slow
def test_the_limits_stand_still_while_a_prompt_is_open():
    with debugged("loop", timeout=5, heartbeat_timeout=1) as program:
        program.wait_for_prompt()
        until = time.monotonic() + 8
        while time.monotonic() < until:
            program.ask("ranks")
            time.sleep(0.2)
        assert "values: [2, 2]" in program.finish("all c")


def test_a_post_mortem_prompt_shows_the_variables_of_all_ranks():
    with debugged("raise_in_one", [1], debug="post_mortem") as program:
        assert program.wait_for_prompt() == "(rank 1) (Pdb)"
        assert "the rank has raised ValueError: secret of rank 1" in program.rows()
        assert program.ask("p secret")[0] == "'secret of rank 1'"
        assert program.ask("rank 0")[-1] == "(rank 0) (Pdb)"
        assert program.ask("p text")[0] == "'secret of rank 0'"
        rows = program.ask("q")
        assert rows[0].startswith("now at rank 1: debugged_program.py:")
        assert rows[1:] == ["(rank 1) (Pdb)"]
        assert program.ask("ranks")[0].startswith("rank 0: in wait (debugged_program.py:")
        rows = program.finish("q")
    assert any(row.startswith("failed: rank 1 failed first: ValueError: secret of rank 1") for row in rows)


@pytest.mark.parametrize("answers", [["q"], ["rank 0", "q"]], ids=["one prompt", "the later failure first"])
def test_the_rank_that_raised_first_is_blamed_whatever_the_user_looks_at(answers):
    with debugged("raise_one_after_another", [1], debug="post_mortem") as program:
        program.wait_for_prompt()
        program.wait_for_ranks("rank 0", "rank 1")
        for answer in answers[:-1]:
            program.ask(answer)
        rows = program.finish(answers[-1])
    assert any(row.startswith("failed: rank 1 failed first: ValueError: the cause") for row in rows)
    assert any(row.startswith("  rank 0: KeyError: 'the consequence'") for row in rows)


@pytest.mark.slow
def test_a_rank_that_ends_during_a_post_mortem_is_not_blamed():
    with debugged("exit_while_another_has_raised", [1], debug="post_mortem") as program:
        assert program.wait_for_prompt() == "(rank 1) (Pdb)"
        assert program.end() == 0
    rows = program.rows()
    assert any(row.startswith("failed: rank 1 failed first: ValueError: the cause") for row in rows)


@pytest.mark.slow
def test_a_call_from_a_thread_has_no_prompt_and_a_later_call_has_one():
    with debugged("call_from_threads") as program:
        assert program.wait_for_prompt() == "(rank 0) (Pdb)"
        rows = program.ask("c")
        assert any("breakpoint() can open no prompt: the run was started in a thread" in row for row in rows)
        assert rows[-1] == "(rank 0) (Pdb)"
        assert "third: [1]" in program.finish("c")


def test_ctrl_d_leaves_interact():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        program.type(b"interact\r")
        assert program.read_until(lambda rows: rows[program.emulator.cursor[0]].endswith(">>>"))
        before = program.emulator.cursor[0]
        program.type(b"\x04")
        program.wait_for_prompt(after=before)
        program.finish("c")


def test_restart_is_refused():
    with debugged("loop", [1]) as program:
        program.wait_for_prompt()
        assert program.ask("restart")[0] == "*** a rank cannot be restarted from its debugger; q ends the run"
        program.finish("c")


@pytest.mark.slow
def test_the_user_ends_ranks_that_ignore_sigterm():
    with debugged("ignore_sigterm", grace_period=60) as program:
        program.wait_for_prompt()
        started_at = time.monotonic()
        program.finish("q")
        assert time.monotonic() - started_at < 20  # it takes 0.5 s; grace_period is longer


@pytest.mark.slow
def test_a_breakpoint_in_a_thread_of_a_rank_that_ends():
    with debugged("stop_in_a_thread_at_the_end", nprocs=1) as program:
        assert program.end() == 0
    assert "breakpoint() can open no prompt: the rank is ending" in "".join(program.rows())


def test_post_mortem_without_a_terminal_says_once_why_it_has_no_effect():
    done = python(str(FILE), "raise_in_one", "[0, 1]", '{"debug": "post_mortem"}', program="")
    assert "failed first: ValueError: secret of rank" in done.stdout
    warning = (
        "debug='post_mortem' can open no prompt: the program that started the run has neither a terminal on stdin nor a"
    )
    assert done.stderr.count(warning) == 1, done.stderr


def test_a_breakpoint_beside_a_call_in_the_background():
    with debugged("call_beside_another") as program:
        assert program.wait_for_prompt() == "(rank 0) (Pdb)"
        assert "values: [1]" in program.finish("c")
