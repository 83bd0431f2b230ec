"""Check the built packages: metadata and content. Install the wheel into a new environment and use it there.

python check.py DIST     the folder that has the wheel and the sdist
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

dist = Path(sys.argv[1])
(wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
version = wheel.name.split("-")[1]
assert sdist.name == f"mpwatch-{version}.tar.gz", sdist

subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)

in_wheel = set(zipfile.ZipFile(wheel).namelist())
assert {"mpwatch/py.typed", "mpwatch/guardian/main.py", "mpwatch/watcher/event_loop.py"} <= in_wheel
assert all(name.startswith(("mpwatch/", "mpwatch-")) for name in in_wheel), in_wheel
in_sdist = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
texts = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"}
assert texts | {"docs/index.md", "examples/crash.py", "mpwatch/_version.py", "tests/conftest.py"} <= in_sdist

with tempfile.TemporaryDirectory() as folder:
    venv.create(folder, with_pip=True)
    python = Path(folder) / "bin" / "python"
    # without dependencies: torch has hundreds of megabytes, and this code does not need it
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "cloudpickle", "tblib", "pytest>=8.2"], check=True)
    code = (
        "import mpwatch, importlib.metadata as metadata\n"
        "print(mpwatch.__version__, metadata.version('mpwatch'), list(mpwatch.run(abs, 2, args=(-3,))))"
    )
    finished = subprocess.run([python, "-W", "error", "-c", code], check=True, capture_output=True, text=True, cwd=folder)
    assert finished.stdout == f"{version} {version} [3, 3]\n", finished.stdout

    # pytest finds the plugin by its entry point, also if warnings are errors
    test = (
        "import mpwatch, pytest\n@pytest.mark.mpwatch(2)\ndef test():\n    assert mpwatch.current_worker().world_size == 3\n"
    )
    (Path(folder) / "test_it.py").write_text(test)
    program = [python, "-m", "pytest", "-W", "error", "--strict-markers", "test_it.py"]
    output = subprocess.run(program, check=False, capture_output=True, text=True, cwd=folder).stdout
    assert "AssertionError: assert 2 == 3\n" in output, output
    assert re.search(r"in rank [01] of 2\n", output), output
print("all checks of the package passed")
