"""The recipe for conda-forge says the same as pyproject.toml and CITATION.cff."""

import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
NAMES_IN_CONDA = {"torch": "pytorch"}


def test_the_recipe_agrees_with_the_project():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    host, run = recipe["requirements"]["host"], recipe["requirements"]["run"]
    assert host[2:] == [name.replace(">=", " >=") for name in pyproject["build-system"]["requires"]]
    needed = [name.partition(">=") for name in project["dependencies"]]
    assert run[2:] == [f"{NAMES_IN_CONDA.get(name, name)} >={version}" for name, _, version in needed]
    assert f">={recipe['context']['python_min']}" == project["requires-python"]
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (project["description"], project["license"])
    assert [about["license_file"]] == project["license-files"]
    assert recipe["context"]["version"] == str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"])
