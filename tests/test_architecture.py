"""The shape of the package and of its tests: imports go one way, public names are documented, and an import is cheap."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mpwatch
from support.programs import python

TESTS = Path(__file__).parent
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
    "data": {"version", "os_support", "wire"},
    "watcher": {"version", "os_support", "wire", "data", "live_view"},
    "live_view": {"data", "wire"},
    "nodes": {"version", "os_support", "wire", "data", "watcher", "live_view"},
    "worker": {"os_support", "torch_private", "wire", "data"},
    "run_handle": {"os_support", "data", "watcher", "wire"},
    "api": {"data", "live_view", "watcher", "nodes", "run_handle"},
    "group": {"data", "live_view", "watcher", "run_handle"},
    "running_jobs": {"version", "os_support", "wire", "data", "live_view"},
    "__main__": {"running_jobs", "data"},
    "item_map": {"data", "live_view", "watcher", "wire", "worker", "group"},
    "script": set(),
    "facade": {"version", "api", "group", "item_map", "run_handle", "running_jobs", "script", "data", "worker"},
    "cluster": {"os_support", "facade", "api", "live_view", "nodes", "watcher", "wire", "data"},
    "integrations": {"facade", "cluster"},  # only what a user can import
}
PUBLIC = {"events", "cluster", "integrations"}
PURE_CORES = {"machine", "diagnosis", "nodes", "codecs", "options", "placement", "view"}  # folders of tests/cores


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


@pytest.fixture(scope="module")
def imports():
    """The imported names by module. Imports inside functions and imports for annotations count, too."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {
        name.removesuffix(".__init__"): set(find_imports(path, name.removesuffix(".__init__")))
        for name, path in paths.items()
    }


def test_imports_go_one_way(imports):
    wrong = [
        f"{module} imports {name}"
        for module, names in imports.items()
        for name in names - EVERYWHERE
        if name.startswith("mpwatch.") and layer_of(name) not in LAYERS[layer_of(module)] | {layer_of(module)}
    ]
    assert wrong == []


def test_no_import_is_circular(imports):
    # `from package import module` needs the module; the package's own code does not import its importer
    graph = {module: names - {name.rpartition(".")[0] for name in names} - {module} for module, names in imports.items()}
    TopologicalSorter(graph).prepare()


def test_only_the_pure_cores_are_tested_from_inside():
    """So the mechanism can change without a change of tests. A private module is also private in a text or a patched name.

    conftest.py has the one exception: it lengthens a limit of mpwatch for tests on a busy machine.
    """
    private = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()} - PUBLIC
    module = re.compile(
        rf"mpwatch\.({'|'.join(sorted(private - set(mpwatch.__all__)))})\b(?!\()|from mpwatch import _[a-z]|mpwatch\._[a-zA-Z]"
    )
    assert {path.name for path in (TESTS / "cores").iterdir() if path.is_dir() and path.name != "__pycache__"} <= PURE_CORES
    found = [
        f"{path.relative_to(TESTS)}: {match.group()}"
        for path in TESTS.rglob("*.py")
        if path.relative_to(TESTS).parts[0] not in ("cores", "conftest.py", "test_architecture.py")
        for match in module.finditer(path.read_text())
    ]
    assert found == []


def test_public_names_are_sorted_and_documented():
    assert mpwatch.__all__ == sorted(mpwatch.__all__)
    assert dir(mpwatch) == sorted([*mpwatch.__all__, "events", "integrations"])
    assert "lightning" in dir(mpwatch.integrations)
    for name in set(mpwatch.__all__) - {"__version__"}:
        assert getattr(mpwatch, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mpwatch.nonsense


def test_import_mpwatch_loads_no_large_package():
    program = "import sys, mpwatch; mpwatch.run, mpwatch.events.JsonLines; print(*sys.modules)"
    assert not {"torch", "cloudpickle", "tblib", "numpy", "asyncio"} & set(python("-c", program).stdout.split())


def test_a_rank_starts_without_what_only_some_functions_need():
    program = "import sys; before = {*sys.modules}; import mpwatch.worker.main; print(*sys.modules.keys() - before)"
    assert not {"typing", "logging", "pdb", "cloudpickle"} & set(python("-c", program).stdout.split())
