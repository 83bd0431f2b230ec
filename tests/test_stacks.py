"""Where the ranks were: what comes of a stack pipe, and real ranks that are looked at before they are stopped."""

import json
import multiprocessing
import time

import pytest
import saboteurs
from programs import python

import mpwatch
from mpwatch.watcher.diagnosis.stack_dumps import (
    MAIN_THREAD_MISSING,
    StackDumpParser,
    add_source_lines,
    format_stacks,
    parse_frames,
)

pytestmark = pytest.mark.usefixtures("_patient")
SPAWN = multiprocessing.get_context("spawn")
MAIN = 0x7F00
OTHER = 'Thread 0x0000000000001000 (most recent call first):\n  File "threading.py", line 1002 in _bootstrap\n\n'
HEAD = "Current thread 0x0000000000007f00 (most recent call first):\n"
FRAMES = '  File "/home/me/train.py", line 3 in step\n'
OURS = '  File "/x/mpwatch/worker/main.py", line 9 in _call\n'
END = '  File "<string>", line 1 in <module>\n'
CRASH = f"Fatal Python error: Aborted\n\n{HEAD}{FRAMES}{OURS}{END}"


def pipe_with(text):
    pipe = StackDumpParser()
    pipe.mark_ready(MAIN)
    pipe.start_dump()
    pipe.feed(text.encode())
    return pipe


def test_what_is_said_before_it_is_ready_is_no_stack():
    pipe = StackDumpParser()
    pipe.feed(b"no licence\n" * (1 << 17))  # more than is kept
    assert (pipe.failed_startup_output[:11], pipe.dump, pipe.crash_stack) == ("no licence\n", "", "")
    pipe.mark_ready(MAIN)
    assert pipe.startup_output[:11] == b"no licence\n"
    assert pipe.startup_output.endswith(b"the rest was cut off]\n")
    pipe.start_dump()
    pipe.feed((HEAD + END).encode())
    assert (pipe.failed_startup_output, pipe.dump) == ("", (HEAD + END).strip())


def test_what_nobody_has_asked_for_is_no_answer():
    pipe = StackDumpParser()
    pipe.mark_ready(MAIN)
    pipe.feed((HEAD + FRAMES + END).encode())
    assert (pipe.is_complete(), pipe.dump) == (False, "")
    pipe.start_dump()
    assert (pipe.is_complete(), pipe.dump) == (False, "")
    pipe.feed((HEAD + END).encode())
    assert (pipe.is_complete(), pipe.dump) == (True, (HEAD + END).strip())


def test_it_is_whole_when_the_last_frame_of_the_main_thread_has_come():
    text = OTHER + HEAD + FRAMES + END
    assert [n for n in range(len(text) + 1) if pipe_with(text[:n]).is_complete()] == [len(text)]


def test_a_main_thread_of_very_many_frames_has_no_known_end():
    assert not pipe_with(HEAD + 99 * FRAMES).is_complete()
    assert pipe_with(HEAD + 100 * FRAMES).is_complete()  # some versions say "..." then, some do not


def test_of_more_than_a_hundred_threads_the_main_one_is_not_seen():
    pipe = pipe_with(OTHER + OTHER + "...\n")
    assert pipe.is_complete()
    first, *others = format_stacks(pipe.dump, MAIN).split("\n\n")
    assert first == MAIN_THREAD_MISSING
    assert others[0] == OTHER.strip()
    assert list(parse_frames(format_stacks(pipe.dump, MAIN))) == []


def test_a_crash_comes_after_the_stacks():
    pipe = pipe_with(OTHER + HEAD + FRAMES + END + CRASH)
    assert pipe.dump.endswith("in <module>")
    assert pipe.crash_stack.splitlines()[0] == "Fatal Python error: Aborted"
    assert pipe.crash_stack.endswith("line 3 in step")


def test_the_main_thread_is_told_first_and_from_the_function_on():
    text = format_stacks(OTHER + HEAD + FRAMES + OURS + END, MAIN)
    assert text == (HEAD + FRAMES + "\n" + OTHER).strip()
    assert next(parse_frames(text)) == ("/home/me/train.py", "step", "")
    assert format_stacks(HEAD + OURS + END, MAIN) == ""
    assert list(parse_frames("")) == []
    assert next(parse_frames(f"{HEAD}  Garbage-collecting\n{FRAMES}    step()\n  File")) == (
        "/home/me/train.py",
        "step",
        "step()",
    )


def test_frames_show_their_source(tmp_path):
    (tmp_path / "program.py").write_text("first\n    second()\n")
    frame = f'  File "{tmp_path}/program.py", line 2 in f'
    assert (
        add_source_lines(f"{HEAD}{frame}\n{FRAMES}", since=time.time() + 1)
        == f"{HEAD}{frame}\n    second()\n{FRAMES}".strip()
    )
    changed = f"{HEAD}{frame}\n{FRAMES}".strip()  # since then: what is there now is not what the rank was doing
    assert add_source_lines(f"{HEAD}{frame}\n{FRAMES}", since=time.time() - 60) == changed


def test_a_thread_that_floods_the_pipe_is_cut_off():
    pipe = pipe_with("x" * (3 << 20))
    assert len(pipe.dump) == 1 << 20


def error_of(fn, *args, nprocs=2, **options):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fn, nprocs, args=args, **options)
    return caught.value


def test_a_rank_that_holds_the_gil_in_c_is_seen():
    error = error_of(saboteurs.fails_beside, saboteurs.holds_the_gil, SPAWN.Value("i", 0), grace_period=0.3)
    assert "rank 0: stopped by the watcher (saboteurs.py:" in str(error)
    assert "in holds_the_gil" in error.stacks[0]


def test_all_threads_are_seen():
    error = error_of(saboteurs.fails_beside, saboteurs.waits_with_a_thread, SPAWN.Value("i", 0))
    main, *others = error.stacks[0].split("\n\n")
    assert "in waits_with_a_thread" in main
    assert any("in wait_in_a_thread" in other for other in others)


def test_a_deep_stack_is_no_reason_to_wait():
    ended_at = SPAWN.Value("d", 0.0)
    error = error_of(saboteurs.fails_beside_a_deep_stack, SPAWN.Barrier(2), ended_at)
    assert time.monotonic() - ended_at.value < 5
    assert (
        error.stacks[0].count("in descends") >= 90
    )  # of 100: the others are of the barrier, which it may not have left yet


def test_a_suspended_rank_is_said_to_be_suspended(barrier):
    error = error_of(saboteurs.stops_itself, barrier, SPAWN.Value("i", 0), nprocs=3)
    assert "rank 0: stopped by the watcher (suspended, by SIGSTOP or SIGTSTP)" in str(error)


def test_nothing_is_written_into_what_took_the_place_of_the_pipe(tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]
    error = error_of(saboteurs.replaces_descriptors_and_waits, str(tmp_path))
    assert error.root_cause.rank == 1
    assert [file.read_bytes() for file in files] == [b"", b""]
    assert 0 not in error.stacks


def test_a_rank_that_has_become_another_program_is_not_asked(tmp_path):
    error = error_of(saboteurs.becomes_a_program_that_ends_well, str(tmp_path / "ended"))
    assert error.root_cause.rank == 1
    assert (tmp_path / "ended").read_text() == "by SIGTERM"


SITE = """
import os, sys
print("a word of the site", file=sys.stderr)
if os.environ.get("RANK") == "1" and os.environ.get("REFUSE"):
    raise SystemExit("no licence")
"""
STARTS = """
import os, sys, mpwatch
os.environ["PYTHONPATH"] = os.pathsep.join([sys.argv[1], os.environ["PYTHONPATH"]])
mpwatch.run(os.getpid, 2)
os.environ["REFUSE"] = "1"
result = mpwatch.run(os.getpid, 2, check=False)
print(result.root_cause.kind.name, result.root_cause.rank, "no licence" in result.root_cause.stderr)
print(mpwatch.RunFailedError(result))
"""


def test_what_an_interpreter_says_before_it_is_ready(tmp_path):
    """It goes to stderr, unless it is the last that is heard of the rank: then it is told with the failure."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    done = python("-c", STARTS, str(tmp_path))
    first, verdict, *rest = done.stdout.splitlines()
    assert first == "START 1 True"
    assert verdict == "rank 1 never started: its interpreter ended with exit code 1"
    assert rest[0] == "  what it printed:"
    assert "    SystemExit: no licence" in rest
    # two ranks, multiprocessing's resource tracker, and the other rank if it was called before it was stopped
    assert done.stderr in ("a word of the site\n" * 3, "a word of the site\n" * 4)


def test_an_interpreter_that_says_much_to_a_caller_that_nobody_reads(tmp_path):
    """It is the rank that waits, and the watcher's limits hold."""
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ: os.write(2, b'x' * 400_000)\n")
    code = (
        "import os, sys, threading, mpwatch\n"
        "os.environ['PYTHONPATH'] = os.pathsep.join([sys.argv[1], os.environ['PYTHONPATH']])\n"
        "unread = os.pipe()\n"
        "os.dup2(unread[1], 2)\n"
        "try: mpwatch.run(os.getpid, 2, timeout=2, grace_period=0.5)\n"
        "except mpwatch.RunTimeoutError as error: print(str(error).splitlines()[0])"
    )
    out = python("-c", code, str(tmp_path)).stdout
    assert out == "the run did not end within timeout=2 s: ranks 0-1 had not returned\n"


@pytest.mark.parametrize("closed", [(2,), (0, 1), (0, 1, 2)], ids=str)
def test_a_program_without_standard_descriptors(closed, tmp_path):
    """Nothing of ours takes their numbers, and they are closed again afterwards."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, mpwatch\n"
        "def look(): return [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]\n"
        f"for fd in {closed}: os.close(fd)\n"
        "(found,) = mpwatch.run(look, 1)\n"
        "left = [fd for fd in (0, 1, 2) if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "with open(sys.argv[1], 'w') as file: json.dump([found, left], file)\n"
    )
    python(str(program), str(tmp_path / "found"))
    found, left = json.loads((tmp_path / "found").read_text())
    assert [found[fd] for fd in closed] == ["/dev/null"] * len(closed)
    assert left == sorted({0, 1, 2} - set(closed))


def test_ranks_have_the_stderr_of_the_caller():
    code = (
        "import os, sys, mpwatch\n"
        "def speak():\n"
        "    os.write(2, b'by number\\n')\n"
        "    print('by name', file=sys.stderr)\n"
        "    return os.fstat(2)[:3]\n"
        "assert mpwatch.run(speak, 1)[0] == os.fstat(2)[:3]"
    )
    assert python("-c", code).stderr == "by number\nby name\n"


SUSPENDED = """
import multiprocessing, sys
import saboteurs, mpwatch
spawn = multiprocessing.get_context("spawn")
args = (sys.argv[1], spawn.Array("i", 3), spawn.Value("i", 0))
print(mpwatch.run(saboteurs.suspends_the_watcher, 3, args=args, check=False).root_cause.rank)
"""


@pytest.mark.parametrize(("order", "first"), [("death first", 2), ("exception first", 0)])
def test_a_watcher_that_looks_late_still_knows_who_was_first(order, first):
    """A rank suspends the watcher, so that it hears of a death and of an exception in one wake-up."""
    assert python("-c", SUSPENDED, order).stdout == f"{first}\n"


def test_deaths_of_one_wake_up_are_told_apart():
    program = (
        "import multiprocessing, saboteurs, mpwatch\n"
        "pids = multiprocessing.get_context('spawn').Array('i', 3)\n"
        "result = mpwatch.run(saboteurs.three_fail_while_the_watcher_does_not_look, 3, args=(pids,), check=False)\n"
        "print(sorted(result.failures, key=lambda rank: result.failures[rank].elapsed))"
    )
    assert python("-c", program).stdout == "[2, 1, 0]\n"


def test_a_forked_child_that_crashes_does_not_speak_for_the_rank():
    error = error_of(saboteurs.fails_beside, saboteurs.forks_a_child_that_crashes_and_waits, SPAWN.Value("i", 0))
    assert "in forks_a_child_that_crashes_and_waits" in error.stacks[0]
    assert error.root_cause.stack == ""
    killed = error_of(saboteurs.forks_a_child_that_crashes_and_is_killed, nprocs=1)
    assert (killed.root_cause.kind, killed.root_cause.stack) == (mpwatch.FailureKind.SIGNAL, "")


def test_a_dump_that_nobody_asked_for_is_nobody_s_answer():
    assert list(mpwatch.run(saboteurs.dumps_by_itself, 2)) == [0, 1]


def test_a_rank_with_very_many_threads():
    error = error_of(saboteurs.fails_beside, saboteurs.waits_with_very_many_threads, SPAWN.Value("i", 0))
    assert "rank 0: stopped by the watcher (main thread not seen: there are too many threads)" in str(error)


def test_what_a_look_makes_a_rank_do_is_not_its_own_doing():
    """A look interrupts what waits for a signal, or for a system call in C."""
    error = error_of(saboteurs.fails_beside, saboteurs.pauses_once, SPAWN.Value("i", 0))
    assert error.result.worker_states[0] is mpwatch.WorkerState.STOPPED
    assert set(error.failures) == {1}
