"""Source lines that are in no file are sent with the call, come back with the exception, and replace no known lines."""

import linecache
import types

import pytest

import mpwatch
from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.decoder import decode_exception
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from support.programs import TESTS, python

PROGRAM = """\
import sys, traceback
import mpwatch

def divide(x):
    return 1 / x  # the division

def train():
    return divide(mpwatch.current_worker().rank - 1)

try:
    mpwatch.run(train, 2)
except mpwatch.RunFailedError as error:
    print("# the division" in error.root_cause.traceback)
    print("# the division" in "".join(traceback.format_exception(error.__cause__)))
    print(str(error).splitlines()[0])
"""


@pytest.mark.parametrize("source", ["file", "file on stdin"])
def test_source_lines_of_a_program(source, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    if source == "file":
        done = python(str(script))
    else:
        with script.open() as file:
            done = python(stdin=file)
    in_rank, in_caller, message = done.stdout.splitlines()
    assert (in_rank, in_caller) == ("True", "True")
    assert message.startswith("rank 1 failed first: ZeroDivisionError: division by zero (")
    assert message.endswith(":5 in divide)")


def test_a_program_from_a_pipe_has_line_numbers_but_no_source_lines():
    in_rank, _, message = python("-", program=PROGRAM).stdout.splitlines()
    assert in_rank == "False"
    assert message == "rank 1 failed first: ZeroDivisionError: division by zero (<stdin>:5 in divide)"


def test_generated_code_named_stdin_has_no_source_lines(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(TESTS.parent)!r})\n"
        "from mpwatch.wire.exceptions import source_lines\n"
        "def f(): pass\n"
        "exec(compile('def g():\\n    return 2', '<stdin>', 'exec'))\n"
        "print(len(source_lines.collect_for_code([f.__code__])), len(source_lines.collect_for_code([f.__code__, g.__code__])))\n"
    )
    with script.open() as file:
        assert python(stdin=file).stdout == "1 0\n"


def test_code_from_a_string_has_no_source_lines():
    program = PROGRAM.replace("return 1 / x  # the division", "exec('1 / 0')")
    in_rank, _, message = python("-c", program.replace("# the division", "spawn_main")).stdout.splitlines()
    assert in_rank == "False"
    assert message.endswith("(<string>:1 in <module>)")


def test_code_from_a_string_without_line_numbers_has_no_place():
    code = compile("1 / 0", "<string>", "exec").replace(co_linetable=b"")
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(types.FunctionType(code, {}), 1)
    assert str(caught.value) == "rank 0 failed first: ZeroDivisionError: division by zero"
    assert caught.value.root_cause.traceback.endswith("ZeroDivisionError: division by zero\n")


def test_source_lines_of_code_generated_in_a_rank():
    def generate():
        source = "def made(x):\n    return 1 / x  # made in the rank\n"
        import linecache

        linecache.cache["<made>"] = (len(source), None, source.splitlines(keepends=True), "<made>")
        names = {}
        exec(compile(source, "<made>", "exec"), names)
        names["made"](0)

    with pytest.raises(mpwatch.RunFailedError):
        mpwatch.run(generate, 1)
    assert linecache.getline("<made>", 2) == "    return 1 / x  # made in the rank\n"
    del linecache.cache["<made>"]


def test_known_source_lines_are_not_replaced():
    linecache.cache["<ours>"] = (4, None, ["ours"], "<ours>")
    source_lines.add_to_linecache({"<ours>": "theirs", __file__: "theirs"})
    assert linecache.getline("<ours>", 1) == "ours"
    assert linecache.getline(__file__, 1).startswith('"""Source lines that')
    del linecache.cache["<ours>"]


def test_lines_of_files_are_not_sent():
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0
    assert b"Source lines that are in no file" not in ExceptionEncoder(caught.value).plain()


def test_very_long_sources_are_left_out():
    linecache.cache["<long>"] = (4, None, ["x" * (2 << 20)], "<long>")
    assert source_lines.collect_for_files(["<long>"]) == {}
    del linecache.cache["<long>"]
    code = compile("1 / 0", "<none>", "exec")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(code)
    assert decode_exception(ExceptionEncoder(caught.value).plain()).__traceback__ is not None


def raise_from_a_string():
    exec("raise ValueError(2)")


def test_code_from_a_string_is_not_shown_with_the_command_that_started_the_rank():
    """From Python 3.13 on, linecache has that command as the source of "<string>"."""
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(raise_from_a_string, 1)
    assert 'File "<string>", line 1, in <module>' in caught.value.root_cause.traceback
    assert "spawn_main" not in caught.value.root_cause.traceback
