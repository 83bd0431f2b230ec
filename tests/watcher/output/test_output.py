"""Output of ranks arrives at the caller's stdout and stderr, in files, or nowhere."""

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

import mpwatch
from mpwatch import FailureKind, LogSpec, RestartPolicy
from support import failing
from support.process_state import SPAWN
from support.programs import ENV
from watcher.output import printing_functions

HELLO_OUTPUT = {("stdout", rank): f"out {rank}\n" for rank in (0, 1)} | {
    ("stderr", rank): f"err {rank}\n" for rank in (0, 1)
}


def files_of(folder):
    """Return the contents of all log files by attempt, rank and stream."""
    return {(path.parts[-3], int(path.parts[-2]), path.stem): path.read_bytes() for path in Path(folder).rglob("*.log")}


def shown_lines(capfd):
    return [sorted(text.splitlines()) for text in capfd.readouterr()]


def run_and_fail(*args, **options):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(*args, **options)
    return caught.value


def test_by_default_ranks_inherit_the_callers_streams(capfd):
    result = mpwatch.run(printing_functions.print_hello, 2)
    assert shown_lines(capfd) == [["out 0", "out 1"], ["err 0", "err 1"]]
    assert result.log_dir == ""


def test_output_goes_to_files_and_the_caller(capfd, tmp_path):
    result = mpwatch.run(printing_functions.print_hello, 2, logs=LogSpec(tmp_path))
    assert shown_lines(capfd) == [["[0] out 0", "[1] out 1"], ["[0] err 0", "[1] err 1"]]
    assert result.log_dir == str(tmp_path / result.workers[0].run_id)
    assert files_of(result.log_dir) == {
        ("attempt_0", rank, stream): text.encode() for (stream, rank), text in HELLO_OUTPUT.items()
    }


def test_output_goes_to_files_only(capfd, tmp_path):
    result = mpwatch.run(printing_functions.print_hello, 2, logs=LogSpec(tmp_path, show="none"))
    assert shown_lines(capfd) == [[], []]
    assert files_of(result.log_dir) == {
        ("attempt_0", rank, stream): text.encode() for (stream, rank), text in HELLO_OUTPUT.items()
    }


def test_output_is_chosen_by_stream_and_rank(capfd, tmp_path):
    logs = LogSpec(tmp_path, show={"stdout": 0, "stderr": "all"}, files={"stdout": [1], "stderr": 0})
    result = mpwatch.run(printing_functions.print_hello, 2, logs=logs)
    assert shown_lines(capfd) == [["[0] out 0"], ["[0] err 0", "[1] err 1"]]
    assert files_of(result.log_dir) == {("attempt_0", 1, "stdout"): b"out 1\n", ("attempt_0", 0, "stderr"): b"err 0\n"}


def test_output_of_one_shown_rank_is_unchanged(capfd):
    mpwatch.run(printing_functions.print_text, 2, args=("\r10%\r{}0%", "no end"), logs=LogSpec(show=1))
    assert capfd.readouterr() == ("\r10%\r10%", "no end")


def test_a_custom_prefix(capfd):
    logs = LogSpec(show=1, prefix="{time:%Y}/{role}/{rank}/{local_rank}: ")
    mpwatch.run(printing_functions.print_text, 2, args=("a\n\nb",), logs=logs)
    assert re.fullmatch(r"(20\d\d/default/1/1: (a|b|)\n){3}", capfd.readouterr().out)


def test_no_output_at_all(capfd):
    result = mpwatch.run(printing_functions.print_hello, 2, logs=LogSpec(show="none"))
    assert (shown_lines(capfd), result.log_dir) == ([[], []], "")


def test_output_of_c_and_of_other_programs(tmp_path, capfdbinary):
    result = mpwatch.run(printing_functions.print_in_every_way, 1, logs=LogSpec(tmp_path))
    expected = b"python\nc\nc without an end, program\n\xff descriptor\n"
    assert files_of(result.log_dir)["attempt_0", 0, "stdout"] == expected
    assert capfdbinary.readouterr().out == expected


def test_a_c_stream_locked_by_a_thread_delays_nothing(capfd):
    with mpwatch.WorkerGroup(1, logs=LogSpec(), timeout=10) as group:
        group.run(printing_functions.print_while_c_reads)
        assert capfd.readouterr().out == "printed"


def test_the_line_of_one_call_is_not_torn_by_another(capfd):
    barrier, event = SPAWN.Barrier(2), SPAWN.Event()
    with mpwatch.WorkerGroup(2, logs=LogSpec()) as group:
        printing = group.submit(printing_functions.print_half_a_line, (barrier, event), ranks=1)
        barrier.wait()
        for _ in range(3):
            group.run(printing_functions.rank, ranks=0)
        event.set()
        printing.result(60)
    assert capfd.readouterr().out == "[1] one line\n"


def test_a_stdout_that_raises_when_it_is_flushed():
    with mpwatch.WorkerGroup(1, logs=LogSpec()) as group:
        assert list(group.run(printing_functions.install_stdout_that_exits)) == [0]


def test_output_is_captured_from_the_first_import_on(tmp_path):
    logs = LogSpec(tmp_path, show="none")
    result = mpwatch.run(printing_functions.print_hello, 1, logs=logs, env={"PYTHONPROFILEIMPORTTIME": "1"})
    text = files_of(result.log_dir)["attempt_0", 0, "stderr"].decode()
    assert text.startswith("import time: ")
    assert text.index("encodings") < text.index("mpwatch.wire") < text.index("err 0\n")


@pytest.mark.parametrize("show", ["all", "none"])
def test_output_of_an_interpreter_that_cannot_start(tmp_path, show, capfd):
    error = run_and_fail(
        printing_functions.print_hello, 1, logs=LogSpec(tmp_path, show=show), env={"PYTHONHOME": "/nowhere"}
    )
    assert error.root_cause.kind is FailureKind.START
    assert "No module named 'encodings'" in files_of(tmp_path)["attempt_0", 0, "stderr"].decode()
    assert ("No module named 'encodings'" in capfd.readouterr().err) == (show == "all")


@pytest.mark.parametrize("show", ["all", "none"])
@pytest.mark.parametrize(
    ("what", "out"),
    [
        (printing_functions.print_and_kill_itself, b"last line\nwithout an end"),
        (printing_functions.print_in_c_and_crash, b"last line of c\n"),
    ],
)
def test_output_just_before_a_crash_is_not_lost(what, out, show, tmp_path, capfdbinary):
    run_and_fail(what, 1, logs=LogSpec(tmp_path, show=show))
    assert files_of(tmp_path)["attempt_0", 0, "stdout"] == out
    assert capfdbinary.readouterr().out == (out if show == "all" else b"")


@pytest.mark.parametrize("logs", [{}, {"show": 0}, {"dir": "logs"}, {"dir": "logs", "show": "none"}])
def test_a_failure_has_the_last_stderr_lines_and_the_log_paths(logs, barrier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = run_and_fail(
        printing_functions.fail_in_rank_1,
        3,
        args=(barrier, printing_functions.print_to_stderr_and_raise),
        logs=LogSpec(**logs),
    )
    assert error.root_cause.stderr == "rank 1 works\na warning\na warning\na warning\n20%"
    expected = "\n  the end of its stderr:\n    rank 1 works\n    a warning\n    a warning\n    a warning\n    20%\n"
    assert expected in str(error)
    folder = f"{tmp_path}/logs/{error.result.workers[0].run_id}"
    paths = {stream: f"{folder}/attempt_0/1/{stream}.log" for stream in ("stdout", "stderr")} if "dir" in logs else {}
    assert error.root_cause.log_files == paths
    assert (f"\n  its logs: {', '.join(paths.values())}\n" in str(error)) == bool(paths)
    assert error.result.log_dir == (folder if paths else "")


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.parametrize("nprocs", [2])
def test_a_rank_aborted_by_its_nccl_watchdog_is_a_victim(nprocs, barrier):
    error = run_and_fail(printing_functions.abort_as_nccl_does, nprocs, args=(barrier,), logs=LogSpec(show="none"))
    assert re.match(
        r"rank 1 kept its peers waiting until they timed out: still at work.* \(printing_functions\.py:", str(error)
    )
    assert error.result.failures[0].is_secondary
    expected = "a victim of rank 1: killed by SIGABRT (NCCL's watchdog: a peer did not come to a collective in time)"
    assert f"  rank 0: {expected}" in str(error).splitlines()


def test_a_timeout_error_names_the_log_folder(tmp_path):
    error = run_and_fail(failing.wait_to_be_stopped, 1, timeout=0.5, logs=LogSpec(tmp_path))
    assert f"  logs: {error.result.log_dir}" in str(error).splitlines()


def test_each_attempt_has_its_own_files(tmp_path):
    logs = LogSpec(tmp_path, show="none")
    result = mpwatch.run(printing_functions.fail_in_first_generation, 2, logs=logs, max_restarts=1)
    files = files_of(result.log_dir)
    assert [files[f"attempt_{n}", 1, "stdout"] for n in (0, 1)] == [b"generation 0\n", b"generation 1\n"]
    assert result.attempts[0].root_cause.log_files["stdout"].endswith("/attempt_0/1/stdout.log")


def test_a_rank_restarted_alone_has_its_own_files(tmp_path, capfd):
    policy = RestartPolicy(1, scope="worker")
    result = mpwatch.run(printing_functions.fail_in_first_generation, 2, logs=LogSpec(tmp_path), max_restarts=policy)
    assert {key for key in files_of(result.log_dir) if key[2] == "stdout"} == {
        ("attempt_0", 0, "stdout"),
        ("attempt_0", 1, "stdout"),
        ("attempt_1", 1, "stdout"),
    }
    assert shown_lines(capfd)[0] == ["[0] generation 0", "[1] generation 0", "[1] generation 1"]


def test_a_line_stays_whole_while_another_rank_is_restarted(capfd):
    policy = RestartPolicy(1, scope="worker")
    args = (SPAWN.Barrier(2),)
    mpwatch.run(printing_functions.print_half_a_line_during_restart, 2, args=args, logs=LogSpec(), max_restarts=policy)
    assert capfd.readouterr().out == "[0] begun, and ended\n"


def test_output_of_a_call_has_arrived_when_it_returns(tmp_path, capfd):
    with mpwatch.WorkerGroup(2, logs=LogSpec(tmp_path)) as group:
        for n in range(3):
            group.run(printing_functions.print_text, (f"call {n} of {{}}, no end",))
            assert shown_lines(capfd)[0] == [f"[{rank}] call {n} of {rank}, no end" for rank in range(2)]
        group.run(printing_functions.print_in_c, (b"c",))
        assert shown_lines(capfd)[0] == ["[0] c", "[1] c"]
        (_, text) = sorted(files_of(tmp_path).items())[1]
        assert text.endswith(b"call 2 of 0, no endc")


def test_output_between_two_calls_is_not_lost(tmp_path, capfd, monkeypatch, eventually):
    """In a notebook, first output is held back until it is known which ranks print. The next call may begin before."""
    monkeypatch.setattr("mpwatch.watcher.output.rank_output.in_notebook", lambda: True)
    monkeypatch.setattr("mpwatch.watcher.output.multiplexer.HOLD_SECONDS", 60.0)
    event = SPAWN.Event()
    with mpwatch.WorkerGroup(2, logs=LogSpec(tmp_path)) as group:
        group.run(printing_functions.print_later_in_rank_0, (event, "between"))
        event.set()
        eventually(lambda: list(files_of(tmp_path).values()).count(b"") == 3)
        group.run(failing.rank)
        assert shown_lines(capfd)[0] == ["between"]


@pytest.mark.filterwarnings("error")
def test_a_call_of_dead_ranks_leaves_no_descriptor_open(eventually, tmp_path, caplog):
    with open(tmp_path / "out", "w+") as file, contextlib.redirect_stdout(file):
        with mpwatch.WorkerGroup(2, logs=LogSpec()) as group:
            os.kill(group.run(os.getpid)[0], signal.SIGKILL)
            eventually(lambda: {thread.name for thread in threading.enumerate()}.isdisjoint({"mpwatch", "mpwatch-output"}))
            group.run(printing_functions.print_hello)
        file.seek(0)
        assert sorted(file) == ["[0] out 0\n", "[1] out 1\n"]


@pytest.mark.parametrize("logs", [{}, {"dir": "logs"}, {"dir": "logs", "show": "none"}])
def test_a_failure_has_no_stderr_of_an_earlier_call(logs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stderrs = []
    with mpwatch.WorkerGroup(1, logs=LogSpec(**logs)) as group:
        group.run(printing_functions.print_hello)
        for fails in (failing.raises_value_error, printing_functions.print_to_stderr_and_raise, failing.raises_value_error):
            with pytest.raises(mpwatch.RunFailedError) as caught:
                group.run(fails)
            stderrs.append(caught.value.root_cause.stderr)
    assert stderrs == ["", "a warning\na warning\na warning\n20%", ""]


def test_the_callers_streams_are_those_at_the_time_of_the_call():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        mpwatch.run(printing_functions.print_hello, 2, logs=LogSpec())
    assert [sorted(text.getvalue().splitlines()) for text in (out, err)] == [
        ["[0] out 0", "[1] out 1"],
        ["[0] err 0", "[1] err 1"],
    ]


def test_a_stream_that_raises_does_not_stop_the_ranks(tmp_path, caplog):
    class Broken(io.StringIO):
        def write(self, text):
            raise RuntimeError("full")

    with contextlib.redirect_stdout(Broken()):
        result = mpwatch.run(printing_functions.print_lines, 2, args=(1000,), logs=LogSpec(tmp_path))
    assert list(result) == [1000, 1000]
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "the output of the ranks can no longer be written to stdout: its rest is dropped (RuntimeError: full)"
    )
    assert len(files_of(tmp_path)["attempt_0", 0, "stdout"]) == 100_000


def test_a_caller_without_stdout(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    mpwatch.run(printing_functions.print_hello, 1, logs=LogSpec(tmp_path))
    assert files_of(tmp_path)["attempt_0", 0, "stdout"] == b"out 0\n"


@pytest.mark.parametrize("show", ["all", "none"])
def test_a_relative_folder_is_resolved_when_the_group_is_made(tmp_path, monkeypatch, show):
    monkeypatch.chdir(tmp_path)
    with mpwatch.WorkerGroup(1, logs=LogSpec("logs", show=show)) as group:
        monkeypatch.chdir("/")
        with pytest.raises(mpwatch.RunFailedError) as caught:
            group.run(printing_functions.print_and_kill_itself)
        assert caught.value.root_cause.stderr == "oh\nno"
        group.run(printing_functions.print_hello)
    assert {path.parent.parent for path in tmp_path.glob("logs/*/*/*/*")} == {
        Path(caught.value.result.log_dir) / f"attempt_{n}" for n in (0, 1)
    }


@pytest.mark.parametrize("show", ["all", "none"])
def test_a_log_file_that_cannot_be_created(tmp_path, show):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(
        mpwatch.LaunchError, match=r"stdout of rank 0 cannot be written to '.*/logs/.*/attempt_0/0/stdout.log'"
    ):
        mpwatch.run(printing_functions.print_hello, 2, logs=LogSpec(tmp_path / "logs", show=show))


@pytest.mark.parametrize("plant", [os.mkfifo, printing_functions.link_to_passwords])
@pytest.mark.parametrize("show", ["all", "none"])
def test_a_log_file_is_no_fifo_and_no_symbolic_link(tmp_path, plant, show):
    """Both could be there in a folder that others may write to: the watcher would wait, or write to another's file."""
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(
        mpwatch.LaunchError, match=r"stdout of rank 0 .*attempt_1/0/stdout.log.*; remove (the symbolic link|it)"
    ):
        logs = tmp_path / "link"
        mpwatch.run(printing_functions.plant_log_file, 1, args=(logs, plant), max_restarts=1, logs=LogSpec(logs, show=show))
    assert not (tmp_path / "passwords").exists()


def test_a_log_file_on_a_full_disk(tmp_path, caplog, monkeypatch):
    def fail_with_disk_full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mpwatch.watcher.output.output_thread.write_all", fail_with_disk_full)
    result = mpwatch.run(printing_functions.print_lines, 1, args=(1000,), logs=LogSpec(tmp_path))
    (record,) = caplog.records
    path = f"{result.log_dir}/attempt_0/0/stdout.log"
    assert record.getMessage() == f"the log file {path} is incomplete: [Errno 28] No space left on device"
    assert list(result) == [1000]


def test_lines_of_many_ranks_are_whole_and_in_order(tmp_path, capfd):
    nprocs, lines = 8, 4000
    mpwatch.run(printing_functions.print_lines, nprocs, args=(lines,), logs=LogSpec(tmp_path))
    seen = [0] * nprocs
    for line in capfd.readouterr().out.splitlines():
        found = re.fullmatch(r"\[(\d)\] (\d) (\d+)\.+", line)
        rank = int(found[1])
        assert (int(found[2]), int(found[3]), len(line)) == (rank, seen[rank], 103)
        seen[rank] += 1
    assert seen == [lines] * nprocs
    assert {len(text) for key, text in files_of(tmp_path).items() if key[2] == "stdout"} == {lines * 100}


def test_a_daemon_that_keeps_the_pipes_open_delays_nothing(tmp_path, capfd):
    pids = SPAWN.Array("i", 2)
    try:
        mpwatch.run(printing_functions.start_daemon, 2, args=(pids,), logs=LogSpec(tmp_path), timeout=60)
        assert shown_lines(capfd)[0] == ["[0] daemon started", "[1] daemon started"]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def test_progress_bars_of_several_ranks_are_shown_as_lines(tmp_path, capfd):
    result = mpwatch.run(printing_functions.show_progress_bar, 2, args=(50,), logs=LogSpec(tmp_path))
    lines = shown_lines(capfd)[1]
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert re.match(rf"\[{rank}\] bar {rank}: 100%\|.*\| 50/50 \[", line)
    assert files_of(result.log_dir)["attempt_0", 0, "stderr"].count(b"\r") > 10


# For each line on its stdin, prints to stderr how many lines its rank has written by now.
LINE_COUNTER = """
import os, sys, threading, mpwatch
from watcher.output import printing_functions
from support.process_state import SPAWN
written = SPAWN.Value("i")
def answer():
    for line in sys.stdin:
        print(written.value, file=sys.stderr, flush=True)
threading.Thread(target=answer, daemon=True).start()
logs = mpwatch.LogSpec(prefix="> ")
try:
    mpwatch.run(printing_functions.print_and_count_lines, 1, args=(3000, written), logs=logs, grace_period=1)
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    os._exit(0)
"""


@pytest.fixture
def line_counter():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", LINE_COUNTER], **pipes, env=ENV, text=True) as program:
        yield program


def count_written(program):
    program.stdin.write("\n")
    program.stdin.flush()
    return int(program.stderr.readline())


def test_a_slow_reader_slows_the_rank_and_loses_nothing(line_counter):
    """The rank writes 3 MB. Bytes that are written and not yet read fit into the pipes and the output thread's buffer."""
    for n in range(3000):
        assert line_counter.stdout.readline() == "> " + f"{n}".ljust(999, ".") + "\n"
        assert n % 100 or count_written(line_counter) - n < 600
    assert line_counter.stdout.read() == ""
    line_counter.stdin.close()
    assert line_counter.wait() == 0


def test_a_reader_that_closes_the_pipe_does_not_stop_the_ranks(tmp_path):
    program = (
        "import sys, mpwatch\nfrom watcher.output import printing_functions\n"
        f"result = mpwatch.run(printing_functions.print_lines, 2, args=(20000,), logs=mpwatch.LogSpec({str(tmp_path)!r}))\n"
        "print(list(result), file=sys.stderr)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, text=True
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert "the output of the ranks can no longer be written to stdout: its rest is dropped (BrokenPipeError" in stderr
    assert "[20000, 20000]" in stderr
    assert {len(text) for key, text in files_of(tmp_path).items() if key[2] == "stdout"} == {20000 * 100}


def test_ctrl_c_ends_a_run_whose_reader_does_not_read(line_counter, eventually):
    line_counter.stdout.readline()  # nothing more is read
    eventually(lambda: count_written(line_counter) > 300)
    line_counter.send_signal(signal.SIGINT)
    line_counter.stdin.close()
    stderr = line_counter.stderr.read()
    assert line_counter.wait() == 0
    assert "the output of the ranks is incomplete: the reader of stdout or stderr did not read it in time" in stderr
    assert stderr.endswith("interrupted\n")


def test_a_bug_in_the_output_thread_is_logged_and_blocks_no_rank(monkeypatch, caplog):
    monkeypatch.setattr("mpwatch.watcher.output.output_thread.OutputThread._distribute", lambda *_: 1 / 0)
    error = run_and_fail(printing_functions.print_lines, 1, args=(20_000,), logs=LogSpec())
    assert isinstance(error.root_cause.exception, BrokenPipeError)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "the output of the ranks is lost from here on, by a bug in mpwatch: ZeroDivisionError('division by zero')"
    ]
