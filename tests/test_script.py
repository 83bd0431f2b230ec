"""`mpwatch.Script`: a script in each rank is what it is under `python train.py` and `python -m train`."""

import json
import os
import re
import sys
import traceback
from pathlib import Path

import pytest

import mpwatch
from support.programs import ENV, python
from support.runs import failed

# Writes what it finds in its process to a file that is named by its rank.
REPORTER = """
import json, os, pickle, sys
import __main__
from beside import VALUE

class Cfg:
    pass

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Cfg)) is __main__.Cfg is Cfg
    assert __builtins__.len is len
    spec = __spec__ and __spec__.name
    found = [VALUE, __file__, __package__, spec, sys.argv, sys.path[0], os.getcwd(), type(__loader__).__name__, Cfg.__module__]
    with open(os.environ.get("RANK", "python"), "w") as file:
        json.dump(found, file)
    sys.exit(0)
"""
# Rank 1 waits for rank 0, and fails.
FAILING = """
import os, signal

class BadShardError(Exception):
    def __init__(self, *, shard):
        super().__init__(f"shard {shard} is bad")
        self.shard = shard

def load(shard):
    open("both").close()
    raise BadShardError(shard=shard)  # THE-LINE

if os.environ["RANK"] == "1":
    load(7)
os.open("both", os.O_WRONLY), signal.pause()
"""


def write(folder, **texts):
    """Write these modules into the folder, in which `a__b` is the name of `a/b.py`."""
    for name, text in texts.items():
        path = Path(folder, f"{name.replace('__', '/', 1)}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("args", "options", "as_python"),
    [
        (["src/train.py", "--lr", "0.1"], {}, ["src/train.py", "--lr", "0.1"]),
        ([Path("link.py")], {}, ["link.py"]),
        (["--lr", "0.1"], {"module": "pkg.train"}, ["-m", "pkg.train", "--lr", "0.1"]),
        ([], {"module": "pkg"}, ["-m", "pkg"]),
    ],
    ids=["file", "link", "module", "package"],
)
def test_a_script_finds_in_a_rank_what_python_gives_it(args, options, as_python, tmp_path, monkeypatch):
    write(tmp_path, src__train=REPORTER, src__beside="VALUE = 5", beside="VALUE = 6")
    write(tmp_path, pkg__train=REPORTER, pkg____main__=REPORTER)
    (tmp_path / "link.py").symlink_to("src/train.py")
    python(*as_python, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    script = mpwatch.Script(*args, **options)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")  # relative paths are those of the moment at which the Script was made
    result = mpwatch.submit(script, nprocs=2).result(60)
    assert list(result) == [None, None]
    expected = json.loads((tmp_path / "python").read_text())
    expected[4][0], expected[6] = expected[1], str(tmp_path / "elsewhere")  # sys.argv[0] is absolute
    assert [json.loads(Path(rank).read_text()) for rank in ("0", "1")] == [expected, expected]


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_a_failure_is_reported_with_the_lines_of_the_script(tmp_path, monkeypatch):
    write(tmp_path, train=FAILING)
    os.mkfifo(tmp_path / "both")
    monkeypatch.chdir(tmp_path)
    error = failed(mpwatch.Script("train.py"), nprocs=2)
    line = next(number for number, text in enumerate(FAILING.splitlines(), 1) if "THE-LINE" in text)
    assert re.fullmatch(
        rf"rank 1 failed first: BadShardError: shard 7 is bad \(train.py:{line} in load\)\n"
        r"  rank 0: stopped by the watcher \(train.py:\d+ in <module>: os.open\(.both., os.O_WRONLY\), signal.pause\(\)\)",
        str(error),
    )
    assert error.__cause__.shard == 7
    frames = [
        (frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__cause__.__traceback__)
    ]
    assert frames == [(str(tmp_path / "train.py"), name) for name in ("<module>", "load")]
    assert error.result.stacks[0].count("  File ") == 1  # no frames of mpwatch
    assert error.result.events[0].fn == "train.py"


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        (["wrong.py"], {}, r"SyntaxError: invalid syntax \(wrong.py, line 1\)$"),
        ([], {"module": "nothing_here"}, "ModuleNotFoundError: there is no module nothing_here that can be run"),
    ],
)
def test_a_script_that_cannot_run_is_named(args, options, text, tmp_path, monkeypatch):
    write(tmp_path, wrong="x = = 3")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mpwatch.RunFailedError, match=text):
        mpwatch.run(mpwatch.Script(*args, **options), nprocs=1)


def get_main(name):
    return getattr(sys.modules["__main__"], name, None), sys.argv[1:]


def test_ranks_of_a_group_are_as_before_after_a_script(tmp_path):
    write(tmp_path, one="import sys\nvalue = sys.argv[1]\nassert value == 'a'", two="assert 'value' not in globals()")
    with mpwatch.WorkerGroup(1) as group:
        before = group.run(get_main, ("value",))[0]
        assert list(group.run(mpwatch.Script(tmp_path / "one.py", "a"))) == [None]
        assert list(group.run(mpwatch.Script(tmp_path / "two.py"))) == [None]
        assert group.run(get_main, ("value",))[0] == before
    before = sys.modules["__main__"], sys.argv[:], sys.path[:]
    mpwatch.Script(tmp_path / "one.py", "a")()
    assert (sys.modules["__main__"], sys.argv, sys.path) == before


@pytest.mark.parametrize(
    ("args", "options", "error"),
    [
        (["nowhere.py"], {}, FileNotFoundError(f"there is no script {os.path.abspath('nowhere.py')}")),
        ([], {}, TypeError("Script needs the path of a script")),
        ([__file__, "--lr", 0.1], {}, TypeError("must be strings or paths, as in sys.argv, not 0.1")),
        ([], {"module": "pkg/train.py"}, ValueError("to run a file, pass its path: Script('pkg/train.py')")),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else "",
)
def test_a_wrong_argument_is_refused_before_a_rank_starts(args, options, error):
    with pytest.raises(type(error), match=re.escape(str(error))):
        mpwatch.Script(*args, **options)


def test_a_script_that_starts_itself_in_its_ranks_is_refused(tmp_path):
    write(tmp_path, train="import mpwatch\nmpwatch.main(mpwatch.Script(__file__), nprocs=1)")
    done = python("train.py", cwd=tmp_path, env=ENV, check=False)
    assert done.returncode == 1
    assert "train.py') would start itself in each of its ranks, without end" in done.stderr
