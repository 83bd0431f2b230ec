"""Output of ranks arrives at the caller's stdout and stderr, in files, or nowhere."""

import contextlib
import gzip
import io
import os
import re
import resource
import signal
from pathlib import Path

import pytest

import mpwatch
from mpwatch import LogSpec, RestartPolicy
from support import screens
from support.process_state import SPAWN
from watcher.output import printing_functions

ALL_FILES = {(0, rank, stream): f"{stream[3:]} {rank}\n".encode() for rank in (0, 1) for stream in ("stdout", "stderr")}
OUT, ERR = ["[0] out 0", "[1] out 1"], ["[0] err 0", "[1] err 1"]


def files_of(folder):
    return {
        (int(path.parts[-3].removeprefix("attempt_")), int(path.parts[-2]), path.stem): path.read_bytes()
        for path in Path(folder).rglob("*.log")
    }


def shown_lines(capfd):
    return [sorted(text.splitlines()) for text in capfd.readouterr()]


@pytest.mark.parametrize(
    ("logs", "shown", "files"),
    [
        (None, [["out 0", "out 1"], ["err 0", "err 1"]], {}),
        ({"show": "none"}, [[], []], {}),
        ({"show": {"stdout": 0}}, [["out 0"], []], {}),
        ({"dir": "logs"}, [OUT, ERR], ALL_FILES),
        (
            {"show": 1, "prefix": "{role}/{rank}/{local_rank}{time:%%} "},
            [["default/1/1% out 1"], ["default/1/1% err 1"]],
            {},
        ),
        ({"dir": "logs", "show": "none"}, [[], []], ALL_FILES),
        (
            {"dir": "logs", "show": {"stdout": 0, "stderr": "all"}, "files": {"stdout": [1], "stderr": 0}},
            [OUT[:1], ERR],
            {key: ALL_FILES[key] for key in [(0, 1, "stdout"), (0, 0, "stderr")]},
        ),
    ],
    ids=str,
)
def test_output_goes_where_the_caller_has_chosen(logs, shown, files, tmp_path, capfd):
    with contextlib.chdir(tmp_path):
        result = mpwatch.run(printing_functions.print_hello, 2, logs=logs and LogSpec(**logs))
    assert shown_lines(capfd) == shown
    assert result.log_dir == (f"{tmp_path}/logs/{result.workers[0].run_id}" if files else "")
    assert files_of(tmp_path) == files


@pytest.mark.parametrize("no_color", ["", "1"])
def test_prefixes_have_colours_in_a_terminal(no_color):
    program = "import mpwatch; mpwatch.run(lambda: print('hello'), 2, logs=mpwatch.LogSpec(), progress=False)"
    with screens.Program("-c", program, env={**os.environ, "NO_COLOR": no_color}) as terminal:
        assert terminal.end() == 0
    expected = [b"[0] hello", b"[1] hello"] if no_color else [b"\x1b[36m[0] \x1b[0mhello", b"\x1b[33m[1] \x1b[0mhello"]
    assert sorted(terminal.output.splitlines()) == sorted(expected)


def test_lines_are_as_a_terminal_shows_them(capfdbinary):
    with mpwatch.WorkerGroup(1, logs=LogSpec(prefix="> ")) as group:
        for written, shown in {
            b"a\nb\n": b"> a\n> b\n",
            b"a\n\nb": b"> a\n> \n> b\n",
            b"a\r\nb\r\n": b"> a\n> b\n",
            b"10%\r20%\r30%\n": b"> 30%\n",
            b"\r10%\r20%": b"> 20%\n",
            b"10%\r20%\r": b"> 20%\n",
            b"10%\r\r\n20%\n": b"> 10%\n> 20%\n",
            b"a\nb\rc\nd\n": b"> a\n> c\n> d\n",
            b"\x1b[31mred\x1b[0m\n": b"> \x1b[31mred\x1b[0m\n",
            b"one\n\x1b[Atwo\x1b[2K\x1b[?25l\n": b"> one\n> two\n",
            b"\xff\xfe\n": b"> \xff\xfe\n",
            b"x" * 20_000 + b"\ny\n": b"> " + b"x" * 20_000 + b"\n> y\n",
            b"\r" * 1_000_000 + b"end\n": b"> end\n",  # with a quadratic algorithm, this would take minutes
        }.items():
            for size in {1, len(written)} if len(written) < 100 else {len(written)}:
                group.run(printing_functions.write_in_portions, (written, size))
                assert capfdbinary.readouterr().out == shown  # all has arrived when the call returns


def test_output_of_c_and_of_other_programs(tmp_path, capfdbinary):
    mpwatch.run(printing_functions.print_in_every_way, 1, logs=LogSpec(tmp_path))
    expected = b"python\nc\nc without an end, program\n\xff descriptor\nnot flushed"
    assert files_of(tmp_path)[0, 0, "stdout"] == expected
    assert capfdbinary.readouterr().out == expected


def test_output_just_before_a_crash_is_not_lost(tmp_path, capfdbinary):
    mpwatch.run(printing_functions.print_and_crash, 1, logs=LogSpec(tmp_path), check=False)
    shown = b"last line\nwithout an end, last line of c\n"
    assert files_of(tmp_path)[0, 0, "stdout"] == capfdbinary.readouterr().out == shown


@pytest.mark.parametrize("logs", [{}, {"dir": "logs"}, {"dir": "logs", "show": "none"}], ids=str)
def test_a_failure_has_the_last_stderr_lines_of_its_call_and_the_log_paths(logs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = "", "a warning\n" * 3 + "10%\r20%\n", "x" * 20_000 + "\n" + "".join(f"line {n}\n" for n in range(100))
    with mpwatch.WorkerGroup(1, logs=LogSpec(**logs), check=False) as group:
        group.run(printing_functions.print_hello)
        errors = [mpwatch.RunFailedError(group.run(printing_functions.warn_and_raise, (text,))) for text in texts]
    folder = f"{errors[0].result.log_dir}/attempt_0/0"
    paths = {stream: f"{folder}/{stream}.log" for stream in ("stdout", "stderr")} if "dir" in logs else {}
    assert [error.root_cause.log_files for error in errors] == [paths] * 3
    assert (f"\n  its logs: {', '.join(paths.values())}" in str(errors[1])) == bool(paths)
    shown = ["", "a warning\na warning\na warning\n20%", "\n".join(f"line {n}" for n in range(50, 100))]
    assert [error.root_cause.stderr.rstrip() for error in errors] == shown
    expected = "\n  the end of its stderr:\n    a warning\n    a warning\n    a warning\n    20%"
    assert expected in str(errors[1])


@pytest.mark.parametrize(("scope", "restarted"), [("group", [0, 1]), ("worker", [1])])
def test_each_attempt_has_its_own_files(scope, restarted, tmp_path, capfd):
    policy = RestartPolicy(1, scope=scope)
    result = mpwatch.run(printing_functions.fail_in_first_attempt, 2, logs=LogSpec(tmp_path), max_restarts=policy)
    files = files_of(tmp_path)
    assert {key for key in files if key[2] == "stdout"} == {
        *((0, rank, "stdout") for rank in (0, 1)),
        *((1, rank, "stdout") for rank in restarted),
    }
    assert [files[attempt, 1, "stdout"] for attempt in (0, 1)] == [b"attempt 0\n", b"attempt 1\n"]
    assert {"[1] attempt 0", "[1] attempt 1"} <= set(shown_lines(capfd)[0])
    assert result.attempts[0].root_cause.log_files["stdout"].endswith("/attempt_0/1/stdout.log")


def test_the_callers_streams_are_those_at_the_time_of_the_call(tmp_path):
    err, path = io.StringIO(), tmp_path / "packed"
    with gzip.open(path, "wt") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        print("before")
        mpwatch.run(printing_functions.print_hello, 1, logs=LogSpec())
        print("after")
    assert gzip.open(path, "rt").read() == "before\nout 0\nafter\n"
    assert err.getvalue() == "err 0\n"


def test_a_stream_that_raises_does_not_stop_the_ranks(tmp_path, caplog):
    class Broken(io.StringIO):
        def write(self, text):
            raise RuntimeError("full")

    with contextlib.redirect_stdout(Broken()):
        result = mpwatch.run(printing_functions.print_lines, 2, args=(1000,), logs=LogSpec(tmp_path))
    assert list(result) == [1000, 1000]
    assert caplog.messages == [
        "the output of the ranks can no longer be written to stdout: its rest is dropped (RuntimeError: full)"
    ]
    assert len(files_of(tmp_path)[0, 0, "stdout"]) == 100_000


@pytest.mark.parametrize("show", ["all", "none"])
def test_a_log_file_that_cannot_be_created(tmp_path, show):
    (tmp_path / "logs").write_text("a file")
    expected = r"stdout of rank 0 cannot be written to '.*/logs/.*/attempt_0/0/stdout.log'"
    for folder, text in ((tmp_path / "logs", expected), ("/proc/nope", r"\(see logs\): no folder can be made there$")):
        with pytest.raises(mpwatch.LaunchError, match=text):
            mpwatch.run(printing_functions.print_hello, 2, logs=LogSpec(folder, show=show))


def test_a_log_file_that_can_no_longer_be_written(tmp_path, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            result = mpwatch.run(printing_functions.print_lines, 1, args=(20_000,), logs=LogSpec(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(result) == [20_000]
    assert len(shown.getvalue()) == 2_000_000
    path = f"{result.log_dir}/attempt_0/0/stdout.log"
    assert caplog.messages == [f"the log file {path} is incomplete: [Errno 27] File too large"]


def test_lines_of_many_ranks_are_whole_and_in_order(tmp_path, capfd):
    nprocs, lines = 4, 4000
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
    pid = SPAWN.Value("i")
    try:
        mpwatch.run(printing_functions.start_daemon, 1, args=(pid,), logs=LogSpec(tmp_path), timeout=60)
        assert capfd.readouterr().out == "daemon started\n"
    finally:
        os.kill(pid.value, signal.SIGKILL)
