"""Stacks of ranks: parsing of the stack pipe, and real ranks whose stacks the watcher reads before it stops them."""

import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import pytest

import mpwatch
from mpwatch.results.places import PACKAGE_FOLDER
from mpwatch.results.stack_frames import parse_frames
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.diagnosis.stack_dumps import (
    CUT_STACK,
    MISSING_STACK,
    MISSING_THREADS,
    StackDumpParser,
    add_source_lines,
    cut_frames_of_mpwatch,
)
from mpwatch.wire.messages import STACKS_END
from support import failing
from support.observations import LIBRARY
from support.programs import call, in_own_process
from watcher.diagnosis import stack_functions

pytestmark = pytest.mark.usefixtures("_wait_for_all_stacks")
SPAWN = multiprocessing.get_context("spawn")
MAIN = 0x7F00
OTHER = '\nThread 0x0000000000001000 (most recent call first):\n  File "threading.py", line 1002 in _bootstrap\n'
HEAD = "Current thread 0x0000000000007f00 (most recent call first):\n"
NATIVE_DUMP_HEAD = "Stack (most recent call first):\n"
FRAMES = '  File "/home/me/train.py", line 3 in step\n'
INVALID = FRAMES + "  <invalid frame>\n"
GREENLET = FRAMES + '  File "/venv/site-packages/gevent/hub.py", line 647 in run\n'
MPWATCH = f"{PACKAGE_FOLDER}/worker/collectives.py"
THREADING = threading.__file__
RANK_MAIN = '  File "/x/mpwatch/worker/main.py", line 9 in _call\n'
OUTERMOST = '  File "<string>", line 1 in <module>\n'
WHOLE = HEAD + FRAMES + OUTERMOST
NATIVE_WHOLE = NATIVE_DUMP_HEAD + FRAMES + OUTERMOST
END = STACKS_END.decode()
CRASH = f"Fatal Python error: Aborted\n\n{HEAD}{FRAMES}{RANK_MAIN}{OUTERMOST}"


def parser_with(text):
    parser = StackDumpParser()
    parser.mark_ready(MAIN)
    parser.start_dump()
    parser.feed(text.encode())
    return parser


def test_output_before_the_rank_is_ready_is_no_stack():
    parser = StackDumpParser()
    parser.feed(b"no licence\n" * (1 << 17))  # more than is kept
    assert (parser.failed_startup_output[:11], parser.dump, parser.crash_stack) == ("no licence\n", "", "")
    parser.mark_ready(MAIN)
    assert parser.startup_output[:11] == b"no licence\n"
    assert parser.startup_output.endswith(b"the rest was cut off]\n")
    parser.start_dump()
    parser.feed((WHOLE + END).encode())
    assert (parser.failed_startup_output, parser.dump) == ("", WHOLE.strip())


def test_stacks_that_were_not_requested_are_ignored():
    parser = StackDumpParser()
    parser.mark_ready(MAIN)
    parser.feed((WHOLE + END).encode())
    assert (parser.is_complete(), parser.dump) == (False, "")
    parser.start_dump()
    assert (parser.is_complete(), parser.dump) == (False, "")
    parser.feed((HEAD + OUTERMOST + END).encode())
    assert (parser.is_complete(), parser.dump) == (True, (HEAD + OUTERMOST).strip())
    parser.discard_dump()
    assert (parser.is_complete(), parser.dump) == (False, "")


@pytest.mark.parametrize("end", [StackDumpParser.end_dump, StackDumpParser.discard_dump])
def test_a_request_that_is_over_is_not_unanswered(end):
    parser = StackDumpParser()
    parser.mark_ready(MAIN)
    assert not parser.is_unanswered(0)
    parser.start_dump()
    assert parser.is_unanswered(1)
    end(parser)
    assert not parser.is_unanswered(1)
    parser.start_dump()
    assert [parser.is_unanswered(number) for number in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    "text", [WHOLE + OTHER + END, HEAD + 100 * FRAMES + END, NATIVE_WHOLE, NATIVE_DUMP_HEAD + 100 * FRAMES]
)
def test_a_dump_is_complete_when_its_last_line_has_come(text):
    """A stack is cut after 100 frames."""
    assert [n for n in range(len(text) + 1) if parser_with(text[:n]).is_complete()] == [len(text)]


@pytest.mark.parametrize("text", [NATIVE_DUMP_HEAD + 100 * FRAMES + "  ...\n", NATIVE_WHOLE + HEAD + "  File"])
def test_a_dump_stays_complete(text):
    assert parser_with(text).is_complete()


@pytest.mark.parametrize("text", [HEAD, WHOLE, WHOLE + OTHER, NATIVE_DUMP_HEAD + "  <invalid frame>\n"])
def test_a_dump_that_has_begun_is_not_complete(text):
    parser = parser_with(text)
    assert (parser.is_unanswered(1), parser.is_complete()) == (False, False)
    assert parser.dump.splitlines()[0] == HEAD.strip()


@pytest.mark.parametrize(
    "text",
    [
        WHOLE + OTHER + END,
        NATIVE_DUMP_HEAD + "  <invalid frame>\n" + WHOLE + OTHER + END,
        WHOLE + NATIVE_WHOLE + OTHER + END,
        WHOLE + OTHER + END + NATIVE_DUMP_HEAD + "  <inv",
        WHOLE + OTHER + END + WHOLE,
    ],
)
def test_a_rank_may_answer_both_signals(text):
    """What Python wrote has all threads."""
    parser = parser_with(text)
    assert parser.is_complete()
    assert parser.dump == WHOLE + OTHER.rstrip()


@pytest.mark.parametrize("later", ["", WHOLE.replace("step", "later") + OTHER + END])
def test_the_main_thread_alone_is_seen_in_c_code(later):
    """When the C code has ended, Python's handler still runs, and writes where the rank is then."""
    assert parser_with(NATIVE_WHOLE + later).dump == WHOLE.strip()


NATIVE_OF_THREAD = (
    NATIVE_DUMP_HEAD
    + '  File "/x/collectives.py", line 181 in _answer_requests\n'
    + '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n'
)


def test_another_thread_is_never_called_the_main_thread():
    """faulthandler writes the stack of the thread that gets the signal, and does not name the thread."""
    for length in range(len(NATIVE_OF_THREAD) + 1):
        assert not parser_with(NATIVE_OF_THREAD[:length]).is_complete()
    assert parser_with(NATIVE_OF_THREAD).dump == ""
    assert parser_with(NATIVE_OF_THREAD + NATIVE_WHOLE).dump == WHOLE.strip()
    assert parser_with(NATIVE_OF_THREAD + WHOLE + OTHER + END).dump == WHOLE + OTHER.rstrip()


def test_an_incomplete_dump_says_what_is_missing():
    other = OTHER.strip()
    whole = WHOLE.strip()
    assert parser_with(NATIVE_DUMP_HEAD + FRAMES[:20]).dump == f"{HEAD}{FRAMES[:20]}\n{CUT_STACK}"
    assert parser_with(NATIVE_DUMP_HEAD + INVALID).dump == f"{HEAD}{INVALID}{CUT_STACK}"
    assert parser_with(HEAD + FRAMES[:20]).dump == f"{HEAD}{FRAMES[:20]}\n{CUT_STACK}\n\n{MISSING_THREADS}"
    assert parser_with(HEAD + FRAMES[:20] + OTHER + END).dump == f"{HEAD}{FRAMES[:20]}\n{CUT_STACK}\n\n{other}"
    assert parser_with(WHOLE).dump == f"{whole}\n\n{MISSING_THREADS}"
    assert parser_with(WHOLE + OTHER).dump == f"{whole}\n\n{other}\n\n{MISSING_THREADS}"
    assert parser_with(OTHER + END).dump == f"{HEAD}{MISSING_STACK}\n\n{other}"
    for text in (HEAD + FRAMES[:20], OTHER):  # the notes are in the report, too
        assert cut_frames_of_mpwatch(parser_with(text).dump) == parser_with(text).dump
    stacks = Stacks({0: parser_with(OTHER).dump})
    assert str(stacks).startswith(f"rank 0:\n  main thread (most recent call first):\n  {MISSING_STACK}\n")


@pytest.mark.parametrize(
    "text", [HEAD + GREENLET + END, NATIVE_DUMP_HEAD + GREENLET, NATIVE_DUMP_HEAD + GREENLET + WHOLE + END]
)
def test_the_stack_of_a_greenlet_is_whole(text):
    """It ends with the function of the greenlet, such as gevent's loop, and not with the outermost frame of the thread."""
    assert parser_with(text).dump == HEAD + GREENLET.rstrip()


def test_a_crash_comes_after_the_stacks():
    parser = parser_with(WHOLE + END + CRASH)
    assert parser.dump.endswith("in <module>")
    assert parser.crash_stack.splitlines()[0] == "Fatal Python error: Aborted"
    assert parser.crash_stack.endswith("line 3 in step")


NATIVE_HEAD = "Current thread's C stack trace (most recent call first):\n"
NATIVE_HANDLER = (
    '  Binary file "python3.14", at _Py_DumpStack+0x4a [0x49b2f9]\n'
    '  Binary file "python3.14" [0x53d28e]\n'
    '  Binary file "/usr/lib/x86_64-linux-gnu/libc.so.6", at +0x406b0 [0x7f04eca726b0]\n'
)
NATIVE_CRASH = (
    '  Binary file "/usr/lib/x86_64-linux-gnu/libc.so.6", at +0x16a499 [0x7f04ecb9c499]\n'
    '  Binary file "/usr/lib/x86_64-linux-gnu/libffi.so.8", at ffi_call+0x155 [0x7f04ec735fe5]\n'
)
NATIVE_INTERPRETER = '  Binary file "python3.14" [0x576aab]\n  Binary file "/usr/lib/x86_64-linux-gnu/libc.so.6", at +0x29fba [0x7f04eca5bfba]\n'


@pytest.mark.parametrize("rank_main", ["", RANK_MAIN], ids=["thread", "main thread"])
@pytest.mark.parametrize("crash", ["", NATIVE_CRASH], ids=["in Python", "in a library"])
def test_native_frames_between_the_crash_and_the_interpreter(rank_main, crash):
    """As Python 3.14 and 3.15 write them, with the frames of the signal handler and of the interpreter."""
    python_stack = f"Fatal Python error: Aborted\n\n{HEAD}{FRAMES}{rank_main}"
    parser = parser_with(f"{python_stack}\n" + NATIVE_HEAD + NATIVE_HANDLER + crash + NATIVE_INTERPRETER)
    python_stack, _, native_stack = parser.crash_stack.partition("\n\n" + NATIVE_HEAD)
    assert python_stack.endswith("line 3 in step")
    assert native_stack == crash.rstrip("\n")


def test_stacks_begin_at_the_function():
    text = cut_frames_of_mpwatch((HEAD + FRAMES + RANK_MAIN + OUTERMOST + OTHER).strip())
    assert text == HEAD + FRAMES + OTHER.rstrip()
    assert next(parse_frames(text)) == ("/home/me/train.py", 3, "step", "")
    assert cut_frames_of_mpwatch(HEAD + RANK_MAIN + OUTERMOST) == ""
    assert list(parse_frames("")) == []
    assert next(parse_frames(f"{HEAD}  Garbage-collecting\n{FRAMES}    step()\n  File")) == (
        "/home/me/train.py",
        3,
        "step",
        "step()",
    )


def frames_in(*files):
    return "".join(f'  File "{file}", line 9 in f\n' for file in files).rstrip()


@pytest.mark.parametrize(
    ("files", "is_shown"),
    [
        ([MPWATCH, THREADING, THREADING], False),
        ([json.__file__, f"{LIBRARY}/torch/distributed/distributed_c10d.py", MPWATCH, THREADING], False),
        (["/home/me/batch.py", MPWATCH, THREADING], True),  # `__repr__` of a local variable
        (["/home/me/train.py", THREADING], True),
        ([MPWATCH, "/home/me/train.py", THREADING], True),
        ([THREADING, THREADING], True),
        ([f"{LIBRARY}/torch/utils/data/_utils/pin_memory.py", THREADING], True),
    ],
)
def test_a_thread_of_mpwatch_is_not_shown(files, is_shown):
    thread = f"Thread 0x0000000000001000 (most recent call first):\n{frames_in(*files)}"
    text = cut_frames_of_mpwatch(f"{HEAD}{FRAMES}\n{thread}")
    assert text == (f"{HEAD}{FRAMES}\n{thread}" if is_shown else f"{HEAD}{FRAMES}".rstrip())


def test_stacks_begin_below_a_handler_that_still_writes_the_stacks_before():
    """The watcher may ask again before the handler has returned."""
    handler = "".join(
        f'  File "/x/{file}", line 9 in {function}\n'
        for file, function in [
            ("contextlib.py", "__exit__"),
            ("mpwatch/worker/stack_dumps.py", "_write"),
            ("mpwatch/worker/stack_dumps.py", "__call__"),
        ]
    )
    text = f"{HEAD}{handler}{FRAMES}{RANK_MAIN}{OUTERMOST}{OTHER}".strip()
    assert cut_frames_of_mpwatch(text) == HEAD + FRAMES + OTHER.rstrip()
    assert cut_frames_of_mpwatch("") == ""


def test_frames_show_their_source(tmp_path):
    (tmp_path / "program.py").write_text("first\n    second()\n")
    frame = f'  File "{tmp_path}/program.py", line 2 in f'
    assert (
        add_source_lines(f"{HEAD}{frame}\n{FRAMES}", started_at=time.time() + 1)
        == f"{HEAD}{frame}\n    second()\n{FRAMES}".strip()
    )
    changed = f"{HEAD}{frame}\n{FRAMES}".strip()  # after the start: the rank runs an earlier version
    assert add_source_lines(f"{HEAD}{frame}\n{FRAMES}", started_at=time.time() - 60) == changed


def test_a_thread_that_floods_the_pipe_is_cut_off():
    parser = parser_with(HEAD + "x" * (3 << 20))
    assert len(parser.dump.partition(f"\n{CUT_STACK}")[0]) == 1 << 20


def error_of(fn, *args, nprocs=2, **options):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fn, nprocs, args=args, **options)
    return caught.value


def test_stacks_of_a_rank_that_holds_the_gil_in_c():
    error = error_of(
        stack_functions.fails_while_rank_0_sleeps, stack_functions.holds_the_gil, SPAWN.Value("i", 0), grace_period=0.3
    )
    assert "rank 0: stopped by the watcher (stack_functions.py:" in str(error)
    assert "in holds_the_gil" in error.result.stacks[0]


def test_stacks_of_a_rank_whose_faulthandler_does_not_answer():
    error = error_of(
        stack_functions.fails_while_rank_0_sleeps, stack_functions.waits_without_faulthandler, SPAWN.Value("i", 0)
    )
    assert "in waits_without_faulthandler" in error.result.stacks[0]


def test_a_rank_of_which_only_another_thread_can_get_the_signal_has_no_stack(monkeypatch):
    monkeypatch.setattr("mpwatch.watcher.machine.state_machine.STACK_DUMP_SECONDS", 0.5)
    function = stack_functions.takes_no_signal_in_its_main_thread
    error = error_of(stack_functions.fails_while_rank_0_sleeps, function, SPAWN.Value("i", 0), grace_period=0.3)
    assert error.result.fates == ["rank 0: stopped by the watcher"]
    assert error.result.stacks == {}


def test_stacks_of_all_threads():
    error = error_of(stack_functions.fails_while_rank_0_sleeps, stack_functions.waits_with_a_thread, SPAWN.Value("i", 0))
    main, *others = error.result.stacks[0].split("\n\n")
    assert "in waits_with_a_thread" in main
    assert any("in wait_in_a_thread" in other for other in others)


def test_a_deep_stack_is_no_reason_to_wait():
    ended_at = SPAWN.Value("d", 0.0)
    error = error_of(stack_functions.fails_beside_a_deep_stack, SPAWN.Barrier(2), ended_at)
    assert time.monotonic() - ended_at.value < 5
    assert (
        error.result.stacks[0].count("in recurses_then_waits") >= 80
    )  # of 100: the others are those of the barrier and of mpwatch


def test_a_suspended_rank_is_reported_as_suspended(barrier):
    error = error_of(failing.fails_beside_a_suspended_rank, barrier, SPAWN.Value("i", 0), nprocs=3)
    assert "rank 0: stopped by the watcher (suspended, by SIGSTOP or SIGTSTP)" in str(error)


def test_nothing_is_written_into_a_file_that_replaced_the_pipe(tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]
    error = error_of(stack_functions.replaces_descriptors_and_waits, str(tmp_path))
    assert error.root_cause.rank == 1
    assert [file.read_bytes() for file in files] == [b"", b""]
    assert 0 not in error.result.stacks


def test_a_rank_that_executed_another_program_gets_no_dump_signal(tmp_path):
    error = error_of(stack_functions.execs_a_program_that_exits_at_sigterm, str(tmp_path / "ended"))
    assert error.root_cause.rank == 1
    assert (tmp_path / "ended").read_text() == "by SIGTERM"


def start_ranks_that_a_site_refuses(site):
    add_to_path_of_ranks(site)
    mpwatch.run(os.getpid, 2)
    os.environ["REFUSE"] = "1"
    result = mpwatch.run(os.getpid, 2, check=False)
    print(result.root_cause.kind.name, result.root_cause.rank, "no licence" in result.root_cause.stderr)
    print(mpwatch.RunFailedError(result))


def add_to_path_of_ranks(site):
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ["PYTHONPATH"]])


def test_startup_output_of_an_interpreter():
    """It goes to stderr. If the rank never becomes ready, it is in the report instead."""
    done = call(start_ranks_that_a_site_refuses, str(Path(__file__).parent / "site_that_prints"))
    first, verdict, *rest = done.stdout.splitlines()
    assert first == "START 1 True"
    assert verdict == "rank 1 never started: its interpreter ended with exit code 1"
    assert rest[0] == "  what it printed:"
    assert "    SystemExit: no licence" in rest
    # two ranks, multiprocessing's resource tracker, and the other rank if it was called before it was stopped
    assert done.stderr in ("output of the site\n" * 3, "output of the site\n" * 4)


def run_with_unread_stderr(site):
    add_to_path_of_ranks(site)
    unread = os.pipe()
    os.dup2(unread[1], 2)
    with pytest.raises(mpwatch.RunTimeoutError) as caught:
        mpwatch.run(os.getpid, 2, timeout=2, grace_period=0.5)
    print(str(caught.value).splitlines()[0])


def test_much_startup_output_if_the_caller_s_stderr_is_not_read(tmp_path):
    """The rank blocks. The watcher does not, and the timeout holds."""
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ: os.write(2, b'x' * 400_000)\n")
    out = call(run_with_unread_stderr, str(tmp_path)).stdout
    assert out == "the run did not end within timeout=2 s: ranks 0-1 had not returned\n"


def close_descriptors_and_run(closed, path):
    def read_links():
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]

    for fd in closed:
        os.close(fd)
    (found,) = mpwatch.run(read_links, 1)
    left = [fd for fd in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{fd}")]
    Path(path).write_text(json.dumps([found, left]))


@pytest.mark.parametrize("closed", [(2,), (0, 1), (0, 1, 2)], ids=str)
def test_a_program_without_standard_descriptors(closed, tmp_path):
    """No descriptor of mpwatch takes their numbers, and they are closed again afterwards."""
    call(close_descriptors_and_run, closed, str(tmp_path / "found"))
    found, left = json.loads((tmp_path / "found").read_text())
    assert [found[fd] for fd in closed] == ["/dev/null"] * len(closed)
    assert left == sorted({0, 1, 2} - set(closed))


def write_to_stderr():
    def write():
        os.write(2, b"by number\n")
        print("by name", file=sys.stderr)
        return os.fstat(2)[:3]

    assert mpwatch.run(write, 1)[0] == os.fstat(2)[:3]


def test_ranks_have_the_stderr_of_the_caller():
    assert call(write_to_stderr).stderr == "by number\nby name\n"


@pytest.mark.parametrize(("order", "first"), [("death first", 2), ("exception first", 0)])
@in_own_process
def test_a_watcher_that_wakes_up_late_still_finds_the_first_failure(order, first):
    """A rank suspends the watcher, so that it notices a death and an exception in one wake-up."""
    args = (order, SPAWN.Array("i", 3), SPAWN.Value("i", 0))
    result = mpwatch.run(stack_functions.two_fail_while_the_watcher_is_suspended, 3, args=args, check=False)
    assert result.root_cause.rank == first


@in_own_process
def test_deaths_of_one_wake_up_are_ordered():
    pids = SPAWN.Array("i", 3)
    result = mpwatch.run(stack_functions.three_fail_while_the_watcher_is_suspended, 3, args=(pids,), check=False)
    assert sorted(result.failures, key=lambda rank: result.failures[rank].elapsed) == [2, 1, 0]


def test_a_crash_of_a_forked_child_is_not_the_rank_s():
    error = error_of(
        stack_functions.fails_while_rank_0_sleeps, stack_functions.forks_a_child_that_crashes_and_waits, SPAWN.Value("i", 0)
    )
    assert "in forks_a_child_that_crashes_and_waits" in error.result.stacks[0]
    assert error.root_cause.stack == ""
    killed = error_of(stack_functions.forks_a_child_that_crashes_and_is_killed, nprocs=1)
    assert (killed.root_cause.kind, killed.root_cause.stack) == (mpwatch.FailureKind.SIGNAL, "")


@pytest.mark.parametrize("options", [{}, {"all_threads": True}], ids=str)
def test_the_report_of_a_crash_has_the_stack_if_the_function_has_enabled_faulthandler(options, capfd):
    error = error_of(stack_functions.crashes_with_faulthandler_enabled, nprocs=1, kwargs=options)
    assert "in crashes_with_faulthandler_enabled" in error.root_cause.stack
    assert capfd.readouterr().err == ""


def test_the_stack_of_a_crash_goes_to_the_file_that_the_function_gives_to_faulthandler(tmp_path):
    path = tmp_path / "crash.txt"
    error = error_of(stack_functions.crashes_with_faulthandler_enabled, nprocs=1, kwargs={"file": str(path)})
    assert error.root_cause.stack == ""
    assert "in crashes_with_faulthandler_enabled" in path.read_text()


def test_a_dump_that_the_watcher_did_not_request_is_ignored():
    assert list(mpwatch.run(stack_functions.dumps_its_own_stack, 2)) == [0, 1]


def test_a_rank_with_very_many_threads():
    error = error_of(stack_functions.fails_while_rank_0_sleeps, stack_functions.waits_with_120_threads, SPAWN.Value("i", 0))
    main, *others = error.result.stacks[0].split("\n\n")
    assert "in waits_with_120_threads" in main
    assert len(others) > 100


def test_what_the_dump_signal_makes_a_rank_do_is_no_failure():
    """The dump signal interrupts code that waits for a signal, or for a system call in C."""
    error = error_of(stack_functions.fails_while_rank_0_sleeps, stack_functions.pauses_once, SPAWN.Value("i", 0))
    assert error.result.worker_states[0] is mpwatch.WorkerState.STOPPED
    assert set(error.result.failures) == {1}
