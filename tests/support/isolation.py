"""Give each process that runs tests a tag, a temporary folder, and the usual SIGINT. conftest.py imports this first.

- The tag is in the environment of all processes that the tests start, see process_state.py.
- `tmp_path` stays where it was, since paths of sockets must be short.
- Variables that launchers of ranks set are removed. Tests take a process with RANK for a rank.
- `nohup`, and shells for what runs in the background, ignore SIGINT. Child processes inherit that.
"""

import os
import shutil
import signal
import tempfile

TAG = "MPWATCH_TESTS"

os.environ[TAG] = str(os.getpid())
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
FOLDER = tempfile.mkdtemp(prefix="tests-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def remove_folder():
    shutil.rmtree(FOLDER, ignore_errors=True)
