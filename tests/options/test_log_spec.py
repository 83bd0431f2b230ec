"""LogSpec: where each stream of each rank goes, and which arguments are invalid. No process."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpwatch import LogSpec, Worker, WorkerSpec
from mpwatch.options.log_spec import StreamRoute, format_prefix

WORKER = Worker(
    rank=3,
    local_rank=1,
    world_size=4,
    local_world_size=2,
    role="reader",
    role_rank=3,
    role_world_size=4,
    run_id="r",
    master_addr="a",
    master_port=1,
)


def routes(spec, rank):
    return spec.route_of("stdout", rank).name, spec.route_of("stderr", rank).name


@pytest.mark.parametrize(
    ("spec", "of_0", "of_1"),
    [
        (LogSpec(), ("PIPE", "PIPE"), ("PIPE", "PIPE")),
        (LogSpec("logs"), ("PIPE", "PIPE"), ("PIPE", "PIPE")),
        (LogSpec(Path("logs"), show="none"), ("FILE", "FILE"), ("FILE", "FILE")),
        (LogSpec("logs", show=0), ("PIPE", "PIPE"), ("FILE", "FILE")),
        (LogSpec("logs", show={"stderr": "all"}), ("FILE", "PIPE"), ("FILE", "PIPE")),
        (LogSpec("logs", show="none", files={"stderr": [1]}), ("DISCARD", "PIPE"), ("DISCARD", "FILE")),
        (LogSpec(show={0, 2}), ("PIPE", "PIPE"), ("DISCARD", "PIPE")),
        (LogSpec(show="inherit"), ("INHERIT", "INHERIT"), ("INHERIT", "INHERIT")),
        (LogSpec(show={"stdout": "inherit"}), ("INHERIT", "PIPE"), ("INHERIT", "PIPE")),
        (
            LogSpec("logs", show={"stdout": "inherit", "stderr": 0}, files={"stderr": 1}),
            ("INHERIT", "PIPE"),
            ("INHERIT", "FILE"),
        ),
    ],
)
def test_route_of_each_stream(spec, of_0, of_1):
    assert (routes(spec, 0), routes(spec, 1)) == (of_0, of_1)


def test_ranks_that_are_shown_and_written():
    spec = LogSpec("logs", show={"stdout": 0, "stderr": range(2)}, files=np.int64(1))
    assert [spec.shows("stdout", rank) for rank in range(3)] == [True, False, False]
    assert [spec.shows("stderr", rank) for rank in range(3)] == [True, True, False]
    assert [spec.writes("stdout", rank) for rank in range(3)] == [False, True, False]
    assert not LogSpec(files="all").writes("stdout", 0)
    assert (spec.count_shown_ranks(range(3)), LogSpec().count_shown_ranks(range(3))) == (2, 3)
    assert spec.folder_of_run("run").endswith("logs/run")
    assert LogSpec().folder_of_run("run") == ""


def test_prefix():
    assert format_prefix("[{node}:{rank}] ", replace(WORKER, group_rank=2), "here") == "[2:3] "
    assert format_prefix("{role}{rank}/{local_rank}@{host} {{}}: ", WORKER, "here") == "reader3/1@here {}: "
    assert len(format_prefix("{time}", WORKER, "here")) == len("12:34:56")
    assert format_prefix("{time:%Y}", WORKER, "here").startswith("20")
    assert format_prefix("{rank:>3}|", WORKER, "here") == "  3|"
    assert StreamRoute.PIPE is LogSpec(prefix="").route_of("stdout", 0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dir": 3}, TypeError, "dir must be a path, not 3"),
        ({"dir": b"logs"}, TypeError, "dir must be a path, not b'logs'"),
        ({"dir": ""}, ValueError, "dir must be the path of a folder"),
        ({"show": "some"}, ValueError, "show must be one of 'all', 'none', 'inherit', or ranks, not 'some'"),
        ({"files": "inherit"}, ValueError, "files must be one of 'all', 'none', or ranks, not 'inherit'"),
        ({"show": None}, TypeError, "show must be 'all', 'none', a rank or several of them, not None"),
        ({"show": -1}, ValueError, "a rank in show must be at least 0, not -1"),
        ({"show": {0, "1"}}, TypeError, "a rank in show must be an int, not '1'"),
        ({"show": True}, TypeError, "a rank in show must be an int, not True"),
        ({"show": {"stdin": "all"}}, ValueError, "show may have the keys 'stdout' and 'stderr', not 'stdin'"),
        ({"show": {"stdout": {"a": 1}}}, TypeError, "show must be 'all', 'none', a rank or several of them"),
        ({"dir": "logs", "show": "inherit"}, ValueError, "show='inherit' gives the ranks the caller's own stdout"),
        ({"prefix": 3}, TypeError, "prefix must be a string or None, not 3"),
        ({"prefix": "{pid}"}, ValueError, "prefix may have the fields {rank}, {local_rank}, .*there is no field 'pid'"),
        ({"prefix": "{rank"}, ValueError, "'{rank' cannot be filled in"),
        ({"prefix": "{rank:s}"}, ValueError, "'{rank:s}' cannot be filled in"),
        ({"prefix": "{}"}, ValueError, "there is no field ''"),
        ({"prefix": "a\nb"}, ValueError, "prefix must be a part of a line"),
        ({"prefix": "a\n"}, ValueError, "prefix must be a part of a line"),
    ],
)
def test_invalid_arguments(arguments, error, text):
    with pytest.raises(error, match=f"^logs: {text}|^logs: .*{text}"):
        LogSpec(**arguments)


@pytest.mark.parametrize(
    ("logs", "error", "text"),
    [
        ("folder", TypeError, r"logs must be a LogSpec, such as LogSpec\('folder'\), or None, not 'folder'"),
        (LogSpec(show=2), ValueError, "logs: show names rank 2, but nprocs=2: ranks are 0 to 1"),
        (LogSpec("logs", files={"stderr": {0, 7}}), ValueError, "logs: files names rank 7, but nprocs=2"),
    ],
)
def test_invalid_logs_of_a_run(logs, error, text):
    with pytest.raises(error, match=text):
        WorkerSpec(fn=print, nprocs=2, logs=logs)
