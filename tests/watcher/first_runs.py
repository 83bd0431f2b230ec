"""Programs whose first run meets a shortage. They import no module that this run would import."""

import os
import resource
from pathlib import Path

from mpwatch import LaunchError, run
from support import functions


def with_100_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 100))
    try:
        run(functions.double, 2, args=(Path("x"),))  # a reducer may be needed for it
    except LaunchError as error:
        print(error)


def with_room_for_some_processes(group):
    """Print the result of each run, and how many processes are left."""
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    for room in range(6):
        with open(f"{group}/pids.max", "w") as file:
            file.write(str(1 + room))
        try:
            print(list(run(functions.rank, 2)))
        except LaunchError as error:
            print(error)
        with open(f"{group}/pids.current") as file:
            print(file.read().strip())
