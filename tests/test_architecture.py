"""The architecture: the import rules of the package, its public names, and the cost of its import."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mpwatch
from support.programs import call, python

PACKAGE = Path(mpwatch.__file__).parent
DATA = {"errors", "events", "options", "results"}
EVERYWHERE = {"mpwatch.os_support.clock", "mpwatch.wire", "mpwatch.watcher", "mpwatch.worker"}  # any module may import these
# From the lowest layer to the highest. A module may import its own layer and the named layers, and nothing else of mpwatch.
LAYERS = {
    "_version": set(),
    "version": {"_version"},
    "os_support": set(),
    "guardian": set(),
    "torch_private": set(),
    "wire": {"os_support", "torch_private"},
    "data": {"os_support", "wire"},
    "watcher": {"os_support", "wire", "data"},
    "live_view": {"data"},
    "multinode": {"version", "os_support", "torch_private", "wire", "data", "watcher", "live_view"},
    "worker": {"os_support", "torch_private", "wire", "data"},
    "run_handle": {"os_support", "data", "watcher", "wire"},
    "api": {"data", "live_view", "watcher", "multinode", "run_handle"},
    "group": {"data", "live_view", "watcher", "run_handle"},
    "item_map": {"data", "live_view", "watcher", "wire", "worker", "group", "run_handle"},
    "script": set(),
    "facade": {"version", "api", "group", "item_map", "run_handle", "script", "data", "worker"},
    "cluster": {"facade", "api", "live_view", "multinode", "watcher", "wire", "data"},
    "integrations": {"facade", "cluster"},  # only what a user can import
}


def layer_of(module):
    parts = module.split(".")[1:]
    if not parts:
        return "facade"
    return "data" if parts[0] in DATA else parts[0]


def find_imports(path, module):
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            imported = ".".join([*base, *([node.module] if node.module else [])])
            yield imported
            for alias in node.names:
                if (PACKAGE.parent / imported.replace(".", "/") / f"{alias.name}.py").exists():
                    yield f"{imported}.{alias.name}"


def find_modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield path, name.removesuffix(".__init__")


@pytest.mark.parametrize(
    ("path", "module"), list(find_modules()), ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_a_module_imports_only_allowed_layers(path, module):
    layer = layer_of(module)
    for name in find_imports(path, module):
        if name.startswith("mpwatch.") and name not in EVERYWHERE:
            assert layer_of(name) in LAYERS[layer] | {layer}, f"{module} imports {name}"


def test_no_import_is_circular():
    """Imports inside functions and imports for annotations count, too."""
    graph = {}
    for path, module in find_modules():
        names = set(find_imports(path, module))
        # `from package import module` needs the module; the package's own code does not import its importer
        names -= {name.rpartition(".")[0] for name in names}
        graph[module] = names - {module}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("path", "module"), list(find_modules()), ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_every_module_has_a_docstring(path, module):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_only_os_support_asks_for_the_operating_system():
    for path, module in find_modules():
        if not module.startswith("mpwatch.os_support"):
            source = path.read_text()
            assert "sys.platform" not in source
            assert "os.name" not in source


def test_private_names_of_others_are_imported_in_one_file_for_each():
    """torch_private and cpython_private say what breaks if a name goes. The pytest plugin is written against pytest itself."""
    homes = (
        "mpwatch.torch_private",
        "mpwatch.os_support.cpython_private",
        "mpwatch.integrations.pytest_plugin.rank_session",
    )
    for path, module in find_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("mpwatch", "__future__")):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".")]
            else:
                continue
            private = [name for name in names if name.startswith("_")]
            assert not private or module in homes, f"{module} imports {private}"


def test_each_answer_in_architecture_names_at_most_three_files_that_exist():
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("## Where do I find")[2].replace("\\_", "_")
    answers = [part.partition("**")[2] for part in text.split("**... ")[1:]]
    assert len(answers) >= 9
    for answer in answers:
        files = set(re.findall(r"[\w/]+\.py", answer))
        assert 1 <= len(files) <= 3, answer
        assert all((PACKAGE / file).exists() for file in files), answer


def test_the_public_names_exist_and_are_sorted():
    assert mpwatch.__all__ == sorted(mpwatch.__all__)
    for name in mpwatch.__all__:
        assert getattr(mpwatch, name) is not None
    assert set(mpwatch._HOME) | {"__version__"} == set(mpwatch.__all__)
    assert dir(mpwatch) == mpwatch.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mpwatch.nonsense


def test_public_names_are_documented():
    for name in set(mpwatch.__all__) - {"__version__"}:
        assert getattr(mpwatch, name).__doc__


def test_mpwatch_events_is_imported_at_first_use():
    program = "import mpwatch; print(mpwatch.events.JsonLines.__name__, mpwatch.events is mpwatch.events)"
    assert python("-c", program).stdout == "JsonLines True\n"


def test_import_mpwatch_loads_few_modules():
    out = python("-c", "import sys, mpwatch; mpwatch.run; print(*sys.modules)").stdout.split()
    assert not {"torch", "cloudpickle", "tblib", "numpy"} & set(out)


def list_modules_of_tblib():
    def find():
        return [name for name in sys.modules if name.partition(".")[0] == "tblib"]

    print(list(mpwatch.run(find, 2)), find())


def test_a_run_that_succeeds_does_not_import_tblib():
    assert call(list_modules_of_tblib).stdout == "[[], []] []\n"


def test_the_guardian_imports_no_module_of_mpwatch():
    program = PACKAGE / "guardian" / "main.py"
    code = f"import sys, runpy; runpy.run_path({str(program)!r}, run_name='x'); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "mpwatch" not in out
