"""The process of the watcher: what signals and its death do to the ranks."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

import mpwatch
from support import failing
from support.programs import call, python
from support.runs import failed
from support.thoroughness import choose
from watcher.programs import Program, alive
from watcher.watched_program import PATIENT_RUN, RUN

SAVE = r"signal.signal(2, lambda *_: (os.write(1, b'saved\n'), os._exit(0)))"
IGNORE = r"signal.signal(2, lambda *_: os.write(1, b'received\n')); signal.signal(15, signal.SIG_IGN)"
JOINED_THREAD = "thread = threading.Thread(target=call_in_thread); thread.start(); thread.join()"
IN_THREAD = "thread = threading.Thread(target=mpwatch.run, args=(work, 2)); thread.start(); thread.join()"
FORK = "threading.Timer(0.2, lambda: os.fork() or (signal.alarm(2), signal.pause(), os._exit(0))).start()"
MAP = "list(mpwatch.map(lambda _: work(), range(2), 2, grace_period=5))"
GROUP = "mpwatch.WorkerGroup(2, grace_period=5).run(work)"


def guardian_of(pid):
    found = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    (guardian,) = (int(child) for child in found if b"\0guardian\0" in Path(f"/proc/{child}/cmdline").read_bytes())
    return guardian


@pytest.mark.parametrize(
    ("statements", "has_guardian"),
    [
        ({}, True),
        ({}, False),
        ({"call": IN_THREAD}, True),
        ({"in_host": FORK}, True),
        ({"in_rank": "os.closerange(3, 4096)"}, True),
    ],
    ids=["in the main thread", "only the kernel", "in a thread", "a fork holds every pipe open", "ranks closed its pipes"],
)
def test_no_rank_outlives_a_killed_watcher(statements, has_guardian, eventually):
    program = Program(**statements)
    if not has_guardian:
        os.kill(guardian_of(program.process.pid), signal.SIGKILL)
    program.signal(signal.SIGKILL)
    program.process.wait()
    eventually(lambda: not alive(program.pids), seconds=3)
    assert program.end()[0] == -signal.SIGKILL


def test_ctrl_c_reaches_the_functions_raises_keyboard_interrupt_and_prints_one_traceback():
    program = Program(in_rank=SAVE)
    program.signal(signal.SIGINT, group=True)
    out, err = program.end_soon(signal.SIGINT)
    assert out.count("saved") == 2
    assert err.count("Traceback") == 1
    assert "KeyboardInterrupt\nthe run was stopped: this process received SIGINT\n" in err
    assert re.search(r"\n  ranks? .*: stopped by the watcher \(\w+\.py:\d+ in \w+: ", err)


def test_ctrl_c_twice_ends_ranks_that_ignore_the_first():
    program = Program(call=PATIENT_RUN, in_rank=IGNORE)
    program.signal(signal.SIGINT)
    assert [program.process.stdout.readline() for _ in range(2)] == ["received\n"] * 2
    text = r"waiting up to \d+ s for ranks 0-1 to end after Ctrl-C; press Ctrl-C again to kill them\n"
    assert re.fullmatch(text, program.process.stderr.readline())
    program.signal(signal.SIGINT)
    program.end_soon(signal.SIGINT)


@pytest.mark.parametrize(
    ("in_rank", "call", "printed"),
    [
        (SAVE, "executor().submit(call_in_thread).result()", ["interrupted", "saved", "saved"]),
        (SAVE, JOINED_THREAD, ["interrupted", "saved", "saved"]),
        (SAVE, "mpwatch.submit(work, 2, grace_period=5).result()", ["saved", "saved"]),
        ("", f"executor().submit(call_in_thread, {GROUP!r}).result()", ["interrupted"]),
    ],
)
def test_ctrl_c_that_ends_a_script_interrupts_the_call_of_a_thread(in_rank, call, printed):
    program = Program(call, in_rank)
    program.signal(signal.SIGINT, group=True)
    out, _ = program.end_soon(signal.SIGINT)
    assert sorted(out.split()) == printed


def test_ctrl_c_after_the_script_ends_the_ranks():
    options = "{'on_event': lambda event: event.name == 'worker_ready' and ready.set()}"
    start = f"threading.Thread(target=mpwatch.run, args=(work, 2), kwargs={options}).start()"
    program = Program(f"ready = threading.Event(); {start}; ready.wait()")
    program.signal(signal.SIGINT, group=True)
    program.end()
    assert time.monotonic() - program.since < 4


@pytest.mark.parametrize(
    ("number", "call"), [(signal.SIGTERM, RUN), (signal.SIGHUP, RUN), (signal.SIGTERM, GROUP), (signal.SIGTERM, MAP)]
)
def test_sigterm_and_sighup_end_the_program_after_its_ranks(number, call):
    """The report is shown before, since no exception has it."""
    program = Program(call)
    program.signal(number)
    verdict, *places = program.end_soon(number)[1].splitlines()
    assert verdict == f"the run was stopped: this process received {number.name}"
    assert places  # one line, unless the ranks were at different places, or one of them did not answer in time
    assert all(re.match(r"  ranks? [01-]+: stopped by the watcher( |$)", place) for place in places), places


def test_handlers_of_the_host_and_nohup_are_respected():
    own = "signal.signal(1, signal.SIG_IGN); signal.signal(15, lambda *_: print('own handler', flush=True))"
    program = Program(in_host=own)
    program.signal(signal.SIGHUP)
    program.signal(signal.SIGTERM)
    status, out, err = program.end()
    assert (status, "own handler" in out) == (1, True)
    assert "RunFailedError: the run was stopped: this process received SIGTERM" in err
    assert err.count("the run was stopped") == 1


def send_signals_at_the_end():
    def send(event):
        if event.name == "run_ended":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGTERM, lambda *_: print("the handler", flush=True))
    mpwatch.run(failing.rank, 1, on_event=send)


def test_no_signal_at_the_end_of_a_run_is_lost():
    done = call(send_signals_at_the_end, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "the handler\n")
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_ctrl_c_while_a_failed_run_is_stopped_keeps_the_failure(eventually):
    fail = "signal.signal(10, lambda *_: failing.raises_value_error()); signal.signal(15, signal.SIG_IGN)"
    program = Program(call=PATIENT_RUN, in_rank=fail)
    os.kill(program.ranks[0], signal.SIGUSR1)
    eventually(lambda: len(alive(program.ranks)) == 1)  # the failed rank has ended, and the other one ignores SIGTERM
    program.signal(signal.SIGINT)
    _, err = program.end_soon(signal.SIGINT)
    assert "failed first: ValueError: the batch is bad" in err
    assert err.endswith("KeyboardInterrupt\n")


def test_ranks_do_not_ignore_sigterm_if_the_host_does(barrier):
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        error = failed(failing.call_on_rank_1, 3, args=(failing.raises_value_error, barrier), grace_period=60)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert error.result.elapsed < 20


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("what", "stride", "chaos_stride"),
    [
        ("run", 97, 13),
        ("submit", 97, 1),
        ("group", 601, 31),
        pytest.param("run", 13, 3, marks=pytest.mark.slow),
        pytest.param("group", 53, 7, marks=pytest.mark.slow),
    ],
)
def test_an_exception_at_any_bytecode_leaves_nothing(what, stride, chaos_stride):
    """Throw at some places. `tox -e chaos` throws at more."""
    stride = choose(stride, chaos_stride)
    program = Path(__file__).parent / "exception_at_any_bytecode.py"
    done = python("-W", "ignore", str(program), what, "1", str(stride), timeout=None)
    *leaks, line = done.stdout.splitlines()
    assert not leaks, done.stdout + done.stderr
    thrown, of = (int(word) for word in line.split() if word.isdigit())
    assert thrown > 0.5 * (of // stride), line  # a run that is done sooner than the first one has fewer places
