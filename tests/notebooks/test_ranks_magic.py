"""`%%ranks` in a real kernel: cells that run on all ranks of a group. One kernel runs all the tests."""

import re

import pytest

from notebooks.kernels import run_kernel
from support.process_state import is_alive

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def loaded_kernel():
    yield from run_kernel("%load_ext mpwatch\nimport os")


@pytest.fixture
def kernel(loaded_kernel):
    """A kernel with three ranks. They live from test to test if none ends them."""
    loaded_kernel.run("%%ranks 3\nimport mpwatch, os\nrank = mpwatch.current_worker().rank")
    return loaded_kernel


def table(outputs):
    """Return the text of the only output, a value."""
    (output,) = outputs
    assert output["output_type"] == "execute_result", output
    return output["data"]["text/plain"]


def error(outputs):
    """Return the text of the error that ends a cell."""
    output = outputs[-1]
    if output["output_type"] == "error":
        return COLOURS.sub("", "\n".join(output["traceback"]))
    return output["text"].strip()  # of a UsageError


def pids_of(kernel):
    assert kernel.run("%%ranks --pull pid\npid = os.getpid()") == []
    return list(kernel.value("pid").values())


def test_variables_live_from_cell_to_cell(kernel):
    assert kernel.run("%%ranks\nx = [rank]\ndef double(): return 2 * x[0]") == []
    assert table(kernel.run("%%ranks\nx.append(7)\ndouble()")) == "rank 0: 0\nrank 1: 2\nrank 2: 4"
    assert table(kernel.run("%%ranks\nx")) == "rank 0: [0, 7]\nrank 1: [1, 7]\nrank 2: [2, 7]"
    assert kernel.value("_[2]") == "[2, 7]"
    assert kernel.value("'double' in globals()") is False
    (output,) = kernel.run("%%ranks\nprint('hello from', rank)")
    assert sorted(output["text"].splitlines()) == [f"[{rank}] hello from {rank}" for rank in range(3)]


def test_the_last_value_is_a_table(kernel):
    (output,) = kernel.run("%%ranks\n'<b>' if rank else rank")
    assert output["data"]["text/plain"] == "rank 0: 0\nranks 1-2: '<b>'"
    assert output["data"]["text/html"].count("<tr>") == 2
    assert "<pre>&#x27;&lt;b&gt;&#x27;</pre>" in output["data"]["text/html"]
    for cell in ("rank;", "rank; # twice", "None", "x = 1"):
        assert kernel.run(f"%%ranks\n{cell}") == []
    assert table(kernel.run("%%ranks\nrank if rank == 1 else None")) == "rank 1: 1"
    assert table(kernel.run("%%ranks\nopen(os.devnull)")).startswith("ranks 0-2: <_io.TextIOWrapper")


def test_some_ranks_run_a_cell(kernel):
    assert table(kernel.run("%%ranks --on 0,2\nrank")) == "rank 0: 0\nrank 2: 2"
    assert table(kernel.run("%%ranks --on 1-2\nrank")) == "rank 1: 1\nrank 2: 2"
    assert error(kernel.run("%%ranks --on 3\nrank")) == "UsageError: ranks: ranks=[3] has 3, but the ranks are 0 to 2"


def test_variables_are_copied(kernel):
    kernel.run("import numpy, mpwatch\na, scale = numpy.arange(4), mpwatch.PerRank([1, 10, 100])\ndef f(x): return x + 1")
    assert kernel.run("%%ranks --push a,scale,f --pull b,total\nb = f(a * scale)\ntotal = int(b.sum())") == []
    assert kernel.value("total") == {0: 10, 1: 64, 2: 604}
    assert kernel.value("list(map(int, b[2]))") == [1, 101, 201, 301]
    assert kernel.run("%%ranks --on 1 --pull b\nb = 3") == []
    assert kernel.value("b") == {1: 3}
    expected = "UsageError: --push a,nothing: there is no variable 'nothing' here"
    assert error(kernel.run("%%ranks --push a,nothing\na")) == expected
    text = error(kernel.run("%%ranks --on 2 --pull nothing\n1"))
    assert "NameError: --pull: rank 2 has no variable 'nothing'" in text


def test_an_error_shows_the_cell(kernel):
    text = error(kernel.run("%%ranks\nif rank == 1:\n    values = []\n    values[3]"))
    (number,) = set(re.findall(r"Cell In\[(\d+)\]", text))
    assert f"Cell In[{number}], line 4\n      2 if rank == 1:\n      3     values = []\n----> 4     values[3]" in text
    assert f"rank 1 failed first: IndexError: list index out of range (Cell In[{number}]:4 in <module>)" in text
    assert "/mpwatch/" not in text
    text = error(kernel.run("%%ranks\nx = 5\nreturn x"))
    assert "SyntaxError: 'return' outside function" in text
    assert ", line 3" in text


def test_an_interrupt_leaves_the_ranks_and_their_variables(kernel, tmp_path, eventually):
    pids = pids_of(kernel)
    path = tmp_path / "begun"
    cell = kernel.start_cell(f"%%ranks\nimport time\nkept = 5\nif rank == 0: open({str(path)!r}, 'w')\ntime.sleep(1000)")
    eventually(path.exists)
    kernel.interrupt()
    assert "KeyboardInterrupt" in error(kernel.wait_for_cell(cell))
    assert table(kernel.run("%%ranks --on 0\nkept")) == "rank 0: 5"
    kernel.interrupt()  # ignored between two calls
    assert pids_of(kernel) == pids


def test_a_rank_that_dies_is_restarted_without_its_variables(kernel):
    text = error(kernel.run("%%ranks\nif rank == 1: os._exit(3)"))
    assert "rank 1 ended with exit code 3" in text, text
    assert "name 'rank' is not defined" in error(kernel.run("%%ranks\nrank"))


def test_the_group(kernel):
    assert kernel.value("group = %ranks\nlist(group.run(max, (1, 2)))") == [2, 2, 2]
    for line, text in {
        "4": "the ranks have nprocs=3, not 4. To keep them, leave nprocs out. For new ranks, end these with %ranks --close",
        "--close": "%%ranks --close would not run this cell; write %ranks --close in a line of its own",
        "--push 'a b'": "--push a b: there is no variable 'a b' here",
    }.items():
        assert error(kernel.run(f"%%ranks {line}\nrank")).startswith(f"UsageError: {text}"), line


@pytest.mark.slow
def test_a_process_group(loaded_kernel):
    loaded_kernel.run("%ranks --close")
    cell = "%%ranks 2 --backend gloo --preload torch\nimport torch\nt = torch.ones(2)\ntorch.distributed.all_reduce(t)\nt"
    assert table(loaded_kernel.run(cell)) == "ranks 0-1: tensor([2., 2.])"
    loaded_kernel.run("%ranks --close")


def test_ranks_end_with_the_extension(kernel):
    pids = pids_of(kernel)
    assert kernel.run("%unload_ext mpwatch") == []
    assert not any(map(is_alive, pids))
    assert "UsageError: Cell magic `%%ranks` not found" in error(kernel.run("%%ranks\n1"))
    assert kernel.run("%load_ext mpwatch") == []
    assert error(kernel.run("%%ranks\n1")) == "UsageError: there are no ranks yet; say how many, as in %%ranks 4"
