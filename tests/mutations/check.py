"""Check that the quick tests notice faults: make each fault of mutations.py in a copy of the package, and run the tests.

    python tests/mutations/check.py             all of them; three minutes, but a missed fault takes the whole suite
    python tests/mutations/check.py 3 17        only these
    python tests/mutations/check.py --quick     run only the tests that should find the fault, in TESTED_BY of mutations.py

A fault is found if a test fails. The tests of TESTED_BY run first, also once without a fault. They are followed by the folder
that mirrors the mutated file, and then by all quick tests. The tests run in the environment of this Python. The exit status
is the number of faults that were missed beyond the two that may be.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mutations import MUTATIONS, TESTED_BY, Mutation

ROOT = Path(__file__).parents[2]
MAY_BE_MISSED = 2
MINUTES = 20  # for the whole suite; a fault may make tests hang, until pytest-timeout ends them


def copy_package(root: Path) -> None:
    """Copy the package and its tests to this new folder."""
    for name in ("mpwatch", "tests", "examples", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, root)


def apply(mutation: Mutation, root: Path) -> None:
    """Make the fault in this copy of the package. Raises ValueError if the code has changed since the list was written."""
    path = root / "mpwatch" / mutation.file
    source = path.read_text()
    if source.count(mutation.old) != 1:
        raise ValueError(f"{mutation.old!r} must occur once in mpwatch/{mutation.file}: mend the list in mutations.py")
    path.write_text(source.replace(mutation.old, mutation.new))


def find_failing_test(root: Path, tests: list[str], processes: str = "logical") -> str:
    """Run these tests in the copy. Return the name of the first one that fails; empty if all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        f"--numprocesses={processes}",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status = process.wait(MINUTES * 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return f"no end within {MINUTES} minutes"
        output.seek(0)
        failed = [line for line in output.read().splitlines() if line.startswith(("FAILED", "ERROR", "E   "))]
        output.seek(0)
        if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED}:
            sys.exit(f"pytest could not run the tests:\n{output.read()}")
    return "" if status == 0 else (failed or [f"exit status {status}"])[-1]


def check_without_fault(tests: list[str]) -> None:
    """End this program if one of these tests fails in an unchanged copy."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "copy")
        copy_package(root)
        if failed := find_failing_test(root, tests):
            sys.exit(f"a test fails without a fault: {failed}")


def check(mutation: Mutation, *, quick: bool) -> str:
    """Return the test that finds the fault; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "copy")
        copy_package(root)
        apply(mutation, root)
        # in one process, which is faster for a few tests
        found_by = find_failing_test(root, get_tests(mutation), processes="0")
        mirror = Path("tests", mutation.file).parent
        for folder_of_tests in () if quick else (mirror, Path("tests")):
            if (root / folder_of_tests).is_dir():
                found_by = found_by or find_failing_test(root, [str(folder_of_tests)])
        return found_by


def get_tests(mutation: Mutation) -> list[str]:
    """Return the tests that should find the fault."""
    return [f"tests/{name}" for name in TESTED_BY[mutation.file]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="which faults; default: all")
    parser.add_argument("--quick", action="store_true", help="run only the tests that should find the fault")
    options = parser.parse_args()
    chosen = {number: MUTATIONS[number] for number in options.numbers or range(len(MUTATIONS))}
    check_without_fault(sorted({name for mutation in chosen.values() for name in get_tests(mutation)}))
    missed = []
    for number, mutation in chosen.items():
        start = time.monotonic()
        found_by = check(mutation, quick=options.quick)
        print(f"{number:2}  {time.monotonic() - start:4.0f} s  {mutation.file}: {mutation.new!r}", flush=True)
        print(f"    {found_by or 'MISSED'}", flush=True)
        missed += [] if found_by else [number]
    print(f"{len(missed)} missed: {missed}")
    return max(0, len(missed) - MAY_BE_MISSED)


if __name__ == "__main__":
    sys.exit(main())
