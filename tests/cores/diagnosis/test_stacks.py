"""The text that ranks write when they are asked for their stacks, or crash: what reports keep of it."""

import json
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from cores.diagnosis.evidence import LIBRARY
from mpwatch.results.places import PACKAGE_FOLDER
from mpwatch.watcher.diagnosis import stack_dumps
from mpwatch.watcher.diagnosis.stack_dumps import StackDumpParser, cut_frames_of_mpwatch
from mpwatch.watcher.machine.transitions import RankPhase
from mpwatch.watcher.observers.stack_requests import StackRequests
from mpwatch.wire.messages import STACKS_END

MAIN = 0x7F00
HEAD = "Current thread 0x0000000000007f00 (most recent call first):\n"
NATIVE_HEAD = "Stack (most recent call first):\n"  # faulthandler does not name the thread
FRAMES = '  File "/home/me/train.py", line 3 in step\n'
GREENLET = FRAMES + '  File "/venv/site-packages/gevent/hub.py", line 647 in run\n'
RANK_MAIN = '  File "/x/mpwatch/worker/main.py", line 9 in _call\n'
OUTERMOST = '  File "<string>", line 1 in <module>\n'
OTHER = '\nThread 0x0000000000001000 (most recent call first):\n  File "threading.py", line 1002 in _bootstrap\n'
WHOLE = HEAD + FRAMES + OUTERMOST
NATIVE_WHOLE = NATIVE_HEAD + FRAMES + OUTERMOST
NATIVE_OF_THREAD = f'{NATIVE_HEAD}{FRAMES}  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n'
END = STACKS_END.decode()
ALL = WHOLE + OTHER.rstrip()


def parse(text):
    parser = StackDumpParser()
    parser.main_thread = MAIN
    parser.start_dump()
    parser.feed(text.encode())
    return parser


@pytest.mark.parametrize(
    ("text", "dump"),
    [
        (WHOLE + OTHER + END, ALL),
        (NATIVE_WHOLE, WHOLE.rstrip()),
        (NATIVE_HEAD + 100 * FRAMES, (HEAD + 100 * FRAMES).rstrip()),  # a stack is cut after 100 frames
        (NATIVE_OF_THREAD + NATIVE_WHOLE, WHOLE.rstrip()),  # another thread is never called the main thread
        (NATIVE_OF_THREAD + WHOLE + OTHER + END, ALL),
        # a rank may answer both signals; what Python wrote has all threads
        (NATIVE_HEAD + "  <invalid frame>\n" + WHOLE + OTHER + END, ALL),
        # the stack of a greenlet ends with its function, such as gevent's loop
        (HEAD + GREENLET + END, (HEAD + GREENLET).rstrip()),
    ],
)
def test_stacks_are_complete_when_their_last_line_has_come(text, dump):
    assert [n for n in range(len(text) + 1) if parse(text[:n]).is_complete()] == [len(text)]
    assert parse(text).dump == dump


@pytest.mark.parametrize(
    ("text", "dump"),
    [
        (NATIVE_HEAD + FRAMES[:20], HEAD + FRAMES[:20]),
        (WHOLE + OTHER, ALL),
        (NATIVE_OF_THREAD, ""),
    ],
)
def test_an_incomplete_answer_shows_what_has_come(text, dump):
    parser = parse(text)
    assert (parser.is_complete(), parser.is_unanswered(1), parser.dump) == (False, False, dump)


def test_only_what_the_last_request_has_brought_counts():
    parser = StackDumpParser()
    parser.main_thread = MAIN
    parser.feed((WHOLE + END).encode())
    parser.start_dump()
    assert (parser.is_complete(), parser.is_unanswered(1), parser.dump) == (False, True, "")
    parser.feed((HEAD + OUTERMOST + END).encode())
    assert (parser.is_complete(), parser.is_unanswered(1), parser.dump) == (True, False, (HEAD + OUTERMOST).strip())
    parser.end_dump()
    assert (parser.is_complete(), parser.is_unanswered(parser.dump_count), parser.dump) == (False, False, "")


@dataclass(eq=False)
class SimulatedRank:
    number: int
    phase: RankPhase
    collective_socket: SimpleNamespace
    stack_parser: SimpleNamespace
    observations: SimpleNamespace
    is_reaped = False


def test_a_request_is_not_answered_at_the_deadline_of_an_earlier_one():
    timers, answers = [], []
    sockets = SimpleNamespace(ask=lambda *_: False)
    parser = SimpleNamespace(end_dump=lambda: None)
    rank = SimulatedRank(0, RankPhase.RUNNING, sockets, parser, SimpleNamespace(is_dump_for_report=False))
    requests = StackRequests(lambda _: True, lambda _: "here", lambda _, do: timers.append(do), lambda: None)
    requests.begin(answers.append, [rank])
    requests.add_stacks(rank)
    requests.begin(answers.append, [rank])
    timers[0]()
    assert answers == [{0: "here"}]
    timers[1]()
    assert answers == 2 * [{0: "here"}]


CRASH = f"Fatal Python error: Aborted\n\n{HEAD}{FRAMES}"
C_HEAD = "Current thread's C stack trace (most recent call first):\n"  # Python 3.14 and newer write it
C_STACK = '  Binary file "python3.14", at _Py_DumpStack+0x4a [0x49b2f9]\n  Binary file "python3.14" [0x53d28e]\n'


@pytest.mark.parametrize("outer", ["", RANK_MAIN + OUTERMOST], ids=["thread", "in the main thread"])
def test_the_stack_of_a_crash_has_the_frames_of_the_user(outer):
    parser = parse(f"{WHOLE}{END}{CRASH}{outer}\n{C_HEAD}{C_STACK}")
    assert parser.dump == WHOLE.strip()
    assert parser.crash_stack == CRASH.rstrip()


# --- frames


def frame(file, line=9, function="f"):
    return f'  File "{file}", line {line} in {function}\n'


def test_a_stack_begins_at_the_function():
    assert cut_frames_of_mpwatch((HEAD + FRAMES + RANK_MAIN + OUTERMOST + OTHER).strip()) == HEAD + FRAMES + OTHER.rstrip()
    assert cut_frames_of_mpwatch(HEAD + RANK_MAIN + OUTERMOST) == cut_frames_of_mpwatch("") == ""


MPWATCH, THREADING = f"{PACKAGE_FOLDER}/worker/collectives.py", threading.__file__


@pytest.mark.parametrize(
    ("files", "is_shown"),
    [
        ([MPWATCH, THREADING, THREADING], False),
        ([json.__file__, f"{LIBRARY}/torch/distributed/distributed_c10d.py", MPWATCH, THREADING], False),
        (["/home/me/batch.py", MPWATCH, THREADING], True),  # `__repr__` of a local variable
        (["/home/me/train.py", THREADING], True),
        ([f"{LIBRARY}/torch/utils/data/_utils/pin_memory.py", THREADING], True),
    ],
)
def test_a_thread_of_mpwatch_is_not_shown(files, is_shown):
    thread = f"Thread 0x0000000000001000 (most recent call first):\n{''.join(map(frame, files))}".rstrip()
    text = cut_frames_of_mpwatch(f"{HEAD}{FRAMES}\n{thread}")
    assert text == (f"{HEAD}{FRAMES}\n{thread}" if is_shown else f"{HEAD}{FRAMES}".rstrip())


def test_frames_show_their_source_unless_the_file_was_changed_since_the_start(tmp_path):
    (tmp_path / "program.py").write_text("first\n    second()\n")
    text = f"{HEAD}{frame(tmp_path / 'program.py', 2)}{FRAMES}"
    with_source = text.replace("line 2 in f\n", "line 2 in f\n    second()\n").strip()
    assert stack_dumps.add_source_lines(text, started_at=time.time() + 1) == with_source
    assert stack_dumps.add_source_lines(text, started_at=time.time() - 60) == text.strip()
