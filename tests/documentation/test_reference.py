"""The reference is complete: every public name, kind, event, variable and option has its place in the documentation."""

import ast
import inspect
import os
import re
from pathlib import Path

import mpwatch

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
ENTRY = re.compile(r"^::: ([\w.]+)", re.MULTILINE)
PUBLIC_MODULES = (  # those that users import by name
    "mpwatch.cluster",
    "mpwatch.events",
    "mpwatch.integrations.dask",
    "mpwatch.integrations.lightning",
    "mpwatch.integrations.lightning.stop_callback",
    "mpwatch.integrations.ray",
    "mpwatch.integrations.submitit",
    "mpwatch.integrations.transformers",
)


def read(name):
    return (REFERENCE / name).read_text()


def exported_names(module):
    """The `__all__` of a module, without an import: Lightning and transformers may be missing."""
    path = ROOT.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return names


def test_every_public_name_has_one_entry():
    found = [name for path in REFERENCE.glob("*.md") for name in ENTRY.findall(path.read_text())]
    wanted = {f"mpwatch.{name}" for name in mpwatch.__all__} - {"mpwatch.__version__"}
    # An Event is exported by both modules.
    wanted |= {f"{module}.{name}" for module in PUBLIC_MODULES for name in exported_names(module)} - {"mpwatch.events.Event"}
    # The version, and what stacks() returns
    wanted |= {f"mpwatch.{name}" for name in ("version.__version__", "results.stacks.Stacks")}
    assert sorted(found) == sorted(wanted)


def test_every_kind_of_failure_is_explained():
    explained = re.findall(r"^## (\w+)$", read("failure-kinds.md"), re.MULTILINE)
    assert sorted(explained) == sorted(kind.name for kind in mpwatch.FailureKind)


def test_every_state_is_explained():
    assert [state.name for state in mpwatch.WorkerState if f"\n| `{state.name}` | " not in read("states.md")] == []


def test_every_variable_of_a_rank_is_listed():
    (names,) = mpwatch.run(lambda: set(os.environ), 1)
    assert [name for name in sorted(names - set(os.environ)) if f"`{name}`" not in read("environment.md")] == []


def test_the_docstrings_of_run_and_of_a_group_have_all_options():
    for documented in (mpwatch.run, mpwatch.WorkerGroup):
        sections = re.findall(r"^Args:.*\n((?:    .*\n)+)", inspect.cleandoc(documented.__doc__), re.MULTILINE)
        named = re.findall(r"^    (\w+): |^    (\w+), (\w+): ", "".join(sections), re.MULTILINE)
        assert {name for names in named for name in names if name} == set(inspect.signature(documented).parameters)


def test_the_help_of_long_functions_fits_in_80_columns():
    for documented in (mpwatch.run, mpwatch.submit, mpwatch.main, mpwatch.map, mpwatch.should_stop, mpwatch.request_stop):
        assert [line for line in inspect.getdoc(documented).splitlines() if len(line) > 76] == []  # help() indents by 4
