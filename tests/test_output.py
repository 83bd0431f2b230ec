"""Where what ranks print arrives: at the caller's stdout and stderr, in files, or nowhere."""

import contextlib
import errno
import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import saboteurs
import talkers
from conftest import SPAWN
from programs import ENV

import mpwatch
from mpwatch import FailureKind, LogSpec, RestartPolicy

HELLO = {("stdout", rank): f"out {rank}\n" for rank in (0, 1)} | {("stderr", rank): f"err {rank}\n" for rank in (0, 1)}


def files_of(folder):
    """By attempt, rank and stream."""
    return {(path.parts[-3], int(path.parts[-2]), path.stem): path.read_bytes() for path in Path(folder).rglob("*.log")}


def shown(capfd):
    return [sorted(text.splitlines()) for text in capfd.readouterr()]


def failed(*args, **options):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(*args, **options)
    return caught.value


def test_by_default_ranks_have_the_callers_own(capfd):
    result = mpwatch.run(talkers.says_hello, 2)
    assert shown(capfd) == [["out 0", "out 1"], ["err 0", "err 1"]]
    assert result.log_dir == ""


def test_files_and_the_caller(capfd, tmp_path):
    result = mpwatch.run(talkers.says_hello, 2, logs=LogSpec(tmp_path))
    assert shown(capfd) == [["[0] out 0", "[1] out 1"], ["[0] err 0", "[1] err 1"]]
    assert result.log_dir == str(tmp_path / result.workers[0].run_id)
    assert files_of(result.log_dir) == {("attempt_0", rank, stream): text.encode() for (stream, rank), text in HELLO.items()}


def test_files_alone(capfd, tmp_path):
    result = mpwatch.run(talkers.says_hello, 2, logs=LogSpec(tmp_path, show="none"))
    assert shown(capfd) == [[], []]
    assert files_of(result.log_dir) == {("attempt_0", rank, stream): text.encode() for (stream, rank), text in HELLO.items()}


def test_by_stream_and_by_rank(capfd, tmp_path):
    logs = LogSpec(tmp_path, show={"stdout": 0, "stderr": "all"}, files={"stdout": [1], "stderr": 0})
    result = mpwatch.run(talkers.says_hello, 2, logs=logs)
    assert shown(capfd) == [["[0] out 0"], ["[0] err 0", "[1] err 1"]]
    assert files_of(result.log_dir) == {("attempt_0", 1, "stdout"): b"out 1\n", ("attempt_0", 0, "stderr"): b"err 0\n"}


def test_one_rank_alone_is_passed_on_as_it_comes(capfd):
    mpwatch.run(talkers.says, 2, args=("\r10%\r{}0%", "no end"), logs=LogSpec(show=1))
    assert capfd.readouterr() == ("\r10%\r10%", "no end")


def test_a_prefix_of_ones_own(capfd):
    logs = LogSpec(show=1, prefix="{time:%Y}/{role}/{rank}/{local_rank}: ")
    mpwatch.run(talkers.says, 2, args=("a\n\nb",), logs=logs, role="reader")
    assert re.fullmatch(r"(20\d\d/reader/1/1: (a|b|)\n){3}", capfd.readouterr().out)


def test_nothing_at_all(capfd):
    result = mpwatch.run(talkers.says_hello, 2, logs=LogSpec(show="none"))
    assert (shown(capfd), result.log_dir) == ([[], []], "")


def test_c_and_other_programs_too(tmp_path, capfdbinary):
    result = mpwatch.run(talkers.says_hello_in_every_way, 1, logs=LogSpec(tmp_path))
    said = b"python\nc\nc without an end, program\n\xff descriptor\n"
    assert files_of(result.log_dir)["attempt_0", 0, "stdout"] == said
    assert capfdbinary.readouterr().out == said


def test_a_thread_of_c_that_reads_delays_nothing(capfd):
    with mpwatch.WorkerGroup(1, logs=LogSpec(), timeout=10) as group:
        group.run(talkers.says_while_c_reads)
        assert capfd.readouterr().out == "said"


def test_a_rank_whose_stdout_raises_when_it_is_flushed():
    with mpwatch.WorkerGroup(1, logs=LogSpec()) as group:
        assert list(group.run(talkers.has_a_stdout_that_exits)) == [0]


def test_from_the_first_import_on(tmp_path):
    logs = LogSpec(tmp_path, show="none")
    result = mpwatch.run(talkers.says_hello, 1, logs=logs, env={"PYTHONPROFILEIMPORTTIME": "1"})
    text = files_of(result.log_dir)["attempt_0", 0, "stderr"].decode()
    assert text.startswith("import time: ")
    assert text.index("encodings") < text.index("mpwatch.wire") < text.index("err 0\n")


@pytest.mark.parametrize("show", ["all", "none"])
def test_what_an_interpreter_says_that_does_not_start(tmp_path, show, capfd):
    error = failed(talkers.says_hello, 1, logs=LogSpec(tmp_path, show=show), env={"PYTHONHOME": "/nowhere"})
    assert error.root_cause.kind is FailureKind.START
    assert "No module named 'encodings'" in files_of(tmp_path)["attempt_0", 0, "stderr"].decode()
    assert ("No module named 'encodings'" in capfd.readouterr().err) == (show == "all")


@pytest.mark.parametrize("show", ["all", "none"])
@pytest.mark.parametrize(
    ("what", "out"),
    [
        (talkers.speaks_and_is_killed, b"last words\nwithout an end"),
        (talkers.speaks_in_c_and_crashes, b"last words of c\n"),
    ],
)
def test_what_was_written_just_before_the_end(what, out, show, tmp_path, capfdbinary):
    failed(what, 1, logs=LogSpec(tmp_path, show=show))
    assert files_of(tmp_path)["attempt_0", 0, "stdout"] == out
    assert capfdbinary.readouterr().out == (out if show == "all" else b"")


@pytest.mark.parametrize("logs", [{}, {"show": 0}, {"dir": "logs"}, {"dir": "logs", "show": "none"}])
def test_a_failure_carries_the_end_of_its_stderr_and_where_its_logs_are(logs, barrier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = failed(talkers.only_rank_1_fails, 3, args=(barrier, talkers.complains_and_raises), logs=LogSpec(**logs))
    assert error.root_cause.stderr == "rank 1 works\na warning\na warning\na warning\n20%"
    said = "\n  the end of its stderr:\n    rank 1 works\n    a warning\n    a warning\n    a warning\n    20%\n"
    assert said in str(error)
    folder = f"{tmp_path}/logs/{error.result.workers[0].run_id}"
    paths = {stream: f"{folder}/attempt_0/1/{stream}.log" for stream in ("stdout", "stderr")} if "dir" in logs else {}
    assert error.root_cause.log_files == paths
    assert (f"\n  its logs: {', '.join(paths.values())}\n" in str(error)) == bool(paths)
    assert error.result.log_dir == (folder if paths else "")


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("nprocs", [2])
def test_a_rank_that_its_watchdog_ends_is_a_victim_of_the_one_that_did_not_come(nprocs, barrier):
    error = failed(talkers.gives_up_as_nccl_does, nprocs, args=(barrier,), logs=LogSpec(show="none"))
    assert str(error).startswith("rank 1 kept its peers waiting until they timed out: still at work (talkers.py:")
    assert error.failures[0].is_secondary
    said = "a victim of rank 1: was killed by SIGABRT (NCCL's watchdog: a peer did not come to a collective in time)"
    assert f"  rank 0: {said}" in str(error).splitlines()


def test_a_timeout_tells_where_the_logs_are(tmp_path):
    error = failed(saboteurs.wait_to_be_stopped, 1, timeout=0.5, logs=LogSpec(tmp_path))
    assert f"  logs: {error.result.log_dir}" in str(error).splitlines()


def test_each_life_has_files_of_its_own(tmp_path):
    logs = LogSpec(tmp_path, show="none")
    result = mpwatch.run(talkers.fails_in_its_first_life, 2, logs=logs, max_restarts=1)
    files = files_of(result.log_dir)
    assert [files[f"attempt_{n}", 1, "stdout"] for n in (0, 1)] == [b"life 0\n", b"life 1\n"]
    assert result.attempts[0].root_cause.log_files["stdout"].endswith("/attempt_0/1/stdout.log")


def test_a_rank_that_is_replaced_alone_has_files_of_its_own(tmp_path, capfd):
    policy = RestartPolicy(1, scope="worker")
    result = mpwatch.run(talkers.fails_in_its_first_life, 2, logs=LogSpec(tmp_path), restart_policy=policy)
    assert {key for key in files_of(result.log_dir) if key[2] == "stdout"} == {
        ("attempt_0", 0, "stdout"),
        ("attempt_0", 1, "stdout"),
        ("attempt_1", 1, "stdout"),
    }
    assert shown(capfd)[0] == ["[0] life 0", "[1] life 0", "[1] life 1"]


def test_a_line_is_whole_though_another_rank_is_started_again_meanwhile(capfd):
    policy = RestartPolicy(1, scope="worker")
    args = (SPAWN.Barrier(2),)
    mpwatch.run(talkers.takes_its_time_for_a_line, 2, args=args, logs=LogSpec(), restart_policy=policy)
    assert capfd.readouterr().out == "[0] begun, and ended\n"


def test_what_a_call_prints_is_there_when_it_returns(tmp_path, capfd):
    with mpwatch.WorkerGroup(2, logs=LogSpec(tmp_path)) as group:
        for n in range(3):
            group.run(talkers.says, (f"call {n} of {{}}, no end",))
            assert shown(capfd)[0] == [f"[{rank}] call {n} of {rank}, no end" for rank in range(2)]
        group.run(talkers.says_in_c, (b"c",))
        assert shown(capfd)[0] == ["[0] c", "[1] c"]
        (_, text) = sorted(files_of(tmp_path).items())[1]
        assert text.endswith(b"call 2 of 0, no endc")


def test_what_is_printed_between_two_calls_is_not_lost(tmp_path, capfd, monkeypatch, eventually):
    """In a notebook it is held back for a moment, to see whether others speak; the next call may come before."""
    monkeypatch.setattr("mpwatch.watcher.output.rank_output.in_notebook", lambda: True)
    monkeypatch.setattr("mpwatch.watcher.output.multiplexer.HOLD_SECONDS", 60.0)
    event = SPAWN.Event()
    with mpwatch.WorkerGroup(2, logs=LogSpec(tmp_path)) as group:
        group.run(talkers.rank_0_says_later, (event, "between"))
        event.set()
        eventually(lambda: list(files_of(tmp_path).values()).count(b"") == 3)
        group.run(saboteurs.rank)
        assert shown(capfd)[0] == ["between"]


@pytest.mark.filterwarnings("error")
def test_a_call_of_ranks_that_have_ended_leaves_nothing_open(eventually, tmp_path, caplog):
    with open(tmp_path / "out", "w+") as file, contextlib.redirect_stdout(file):
        with mpwatch.WorkerGroup(2, logs=LogSpec()) as group:
            os.kill(group.run(os.getpid)[0], signal.SIGKILL)
            eventually(lambda: {thread.name for thread in threading.enumerate()}.isdisjoint({"mpwatch", "mpwatch-output"}))
            group.run(talkers.says_hello)
        file.seek(0)
        assert sorted(file) == ["[0] out 0\n", "[1] out 1\n"]


@pytest.mark.parametrize("logs", [{}, {"dir": "logs"}, {"dir": "logs", "show": "none"}])
def test_the_stderr_of_an_earlier_call_is_not_that_of_a_failure(logs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    with mpwatch.WorkerGroup(1, logs=LogSpec(**logs)) as group:
        group.run(talkers.says_hello)
        for fails in (saboteurs.raises_value_error, talkers.complains_and_raises, saboteurs.raises_value_error):
            with pytest.raises(mpwatch.RunFailedError) as caught:
                group.run(fails)
            said.append(caught.value.root_cause.stderr)
    assert said == ["", "a warning\na warning\na warning\n20%", ""]


def test_stdout_and_stderr_of_the_caller_are_those_that_it_has_at_the_call():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        mpwatch.run(talkers.says_hello, 2, logs=LogSpec())
    assert [sorted(text.getvalue().splitlines()) for text in (out, err)] == [
        ["[0] out 0", "[1] out 1"],
        ["[0] err 0", "[1] err 1"],
    ]


def test_a_stream_that_raises_stops_nothing(tmp_path, caplog):
    class Broken(io.StringIO):
        def write(self, text):
            raise RuntimeError("full")

    with contextlib.redirect_stdout(Broken()):
        result = mpwatch.run(talkers.counts, 2, args=(1000,), logs=LogSpec(tmp_path))
    assert list(result) == [1000, 1000]
    (record,) = caplog.records
    assert record.getMessage() == "what the ranks print cannot be written to stdout any more (RuntimeError: full)"
    assert len(files_of(tmp_path)["attempt_0", 0, "stdout"]) == 100_000


def test_a_caller_without_streams(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    mpwatch.run(talkers.says_hello, 1, logs=LogSpec(tmp_path))
    assert files_of(tmp_path)["attempt_0", 0, "stdout"] == b"out 0\n"


@pytest.mark.parametrize("show", ["all", "none"])
def test_the_files_are_where_the_call_was_made(tmp_path, monkeypatch, show):
    monkeypatch.chdir(tmp_path)
    with mpwatch.WorkerGroup(1, logs=LogSpec("logs", show=show)) as group:
        monkeypatch.chdir("/")
        with pytest.raises(mpwatch.RunFailedError) as caught:
            group.run(talkers.speaks_and_is_killed)
        assert caught.value.root_cause.stderr == "oh\nno"
        group.run(talkers.says_hello)
    assert {path.parent.parent for path in tmp_path.glob("logs/*/*/*/*")} == {
        Path(caught.value.result.log_dir) / f"attempt_{n}" for n in (0, 1)
    }


@pytest.mark.parametrize("show", ["all", "none"])
def test_files_that_cannot_be_written(tmp_path, show):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(
        mpwatch.LaunchError, match=r"stdout of rank 0 cannot be written to '.*/logs/.*/attempt_0/0/stdout.log'"
    ):
        mpwatch.run(talkers.says_hello, 2, logs=LogSpec(tmp_path / "logs", show=show))


def test_a_file_that_cannot_be_written_any_more(tmp_path, caplog, monkeypatch):
    def is_full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mpwatch.watcher.output.output_thread.write_all", is_full)
    result = mpwatch.run(talkers.counts, 1, args=(1000,), logs=LogSpec(tmp_path))
    (record,) = caplog.records
    path = f"{result.log_dir}/attempt_0/0/stdout.log"
    assert record.getMessage() == f"{path} is not complete: [Errno 28] No space left on device"
    assert list(result) == [1000]


def test_lines_of_many_ranks_are_whole_and_in_order(tmp_path, capfd):
    nprocs, lines = 8, 4000
    mpwatch.run(talkers.counts, nprocs, args=(lines,), logs=LogSpec(tmp_path))
    seen = [0] * nprocs
    for line in capfd.readouterr().out.splitlines():
        found = re.fullmatch(r"\[(\d)\] (\d) (\d+)\.+", line)
        rank = int(found[1])
        assert (int(found[2]), int(found[3]), len(line)) == (rank, seen[rank], 103)
        seen[rank] += 1
    assert seen == [lines] * nprocs
    assert {len(text) for key, text in files_of(tmp_path).items() if key[2] == "stdout"} == {lines * 100}


def test_a_helper_that_keeps_the_descriptors_delays_nothing(tmp_path, capfd):
    pids = SPAWN.Array("i", 2)
    try:
        mpwatch.run(talkers.leaves_a_daemon, 2, args=(pids,), logs=LogSpec(tmp_path), timeout=60)
        assert shown(capfd)[0] == ["[0] daemon started", "[1] daemon started"]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def test_progress_bars_stay_readable(tmp_path, capfd):
    result = mpwatch.run(talkers.is_bars, 2, args=(50,), logs=LogSpec(tmp_path))
    lines = shown(capfd)[1]
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert re.match(rf"\[{rank}\] bar {rank}: 100%\|.*\| 50/50 \[", line)
    assert files_of(result.log_dir)["attempt_0", 0, "stderr"].count(b"\r") > 10


# Tells on its stderr how much its rank has written by now, when it is asked.
COUNTING = """
import os, sys, threading, mpwatch, talkers
from conftest import SPAWN
written = SPAWN.Value("i")
def tell():
    for line in sys.stdin:
        print(written.value, file=sys.stderr, flush=True)
threading.Thread(target=tell, daemon=True).start()
try:
    mpwatch.run(talkers.counts_and_marks, 1, args=(3000, written), logs=mpwatch.LogSpec(prefix="> "), grace_period=1)
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    os._exit(0)
"""


@pytest.fixture
def counting():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", COUNTING], **pipes, env=ENV, text=True) as program:
        yield program


def written(program):
    program.stdin.write("\n")
    program.stdin.flush()
    return int(program.stderr.readline())


def test_a_slow_reader_slows_the_rank_and_loses_nothing(counting):
    """3 MB are written. What has been written and not read is never more than the pipes hold, and what is in the pump."""
    for n in range(3000):
        assert counting.stdout.readline() == "> " + f"{n}".ljust(999, ".") + "\n"
        assert n % 100 or written(counting) - n < 600
    assert counting.stdout.read() == ""
    counting.stdin.close()
    assert counting.wait() == 0


def test_a_reader_that_goes_away_stops_nothing(tmp_path):
    program = (
        "import sys, mpwatch, talkers\n"
        f"result = mpwatch.run(talkers.counts, 2, args=(20000,), logs=mpwatch.LogSpec({str(tmp_path)!r}))\n"
        "print(list(result), file=sys.stderr)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, text=True
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert "what the ranks print cannot be written to stdout any more (BrokenPipeError" in said
    assert "[20000, 20000]" in said
    assert {len(text) for key, text in files_of(tmp_path).items() if key[2] == "stdout"} == {20000 * 100}


def test_ctrl_c_ends_a_run_whose_reader_has_stopped(counting, eventually):
    counting.stdout.readline()  # and nothing more is read
    eventually(lambda: written(counting) > 300)
    counting.send_signal(signal.SIGINT)
    counting.stdin.close()
    said = counting.stderr.read()
    assert counting.wait() == 0
    assert "not all that the ranks have printed could be shown: nobody reads it" in said
    assert said.endswith("interrupted\n")


def test_an_error_of_ours_is_told_and_keeps_nobody_waiting(monkeypatch, caplog):
    monkeypatch.setattr("mpwatch.watcher.output.output_thread.OutputThread._take_in", lambda *_: 1 / 0)
    error = failed(talkers.counts, 1, args=(20_000,), logs=LogSpec())
    assert isinstance(error.root_cause.exception, BrokenPipeError)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["what the ranks print is lost from here on: ZeroDivisionError('division by zero')"]
