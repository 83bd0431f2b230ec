"""A stand-in for SLURM on one machine: sbatch, srun, sacct, scancel and scontrol, as far as submitit and mpwatch use them.

`install(folder)` makes the commands. A job is a folder with the file `state`. Each task is a session of processes, so a signal
to the job reaches all processes of its tasks, as with SLURM. A job waits until as many nodes are free as the file `nodes` says.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
ENDED = ("COMPLETED", "FAILED", "CANCELLED")
KILL_WAIT = 2.0  # seconds between SIGTERM and SIGKILL
PERIOD = 0.05


def install(folder, nodes):
    """Make the commands in `folder/bin`, and return that folder."""
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    for name in COMMANDS:
        command = binaries / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{folder}" {name} "$@"\n')
        command.chmod(0o755)
    (folder / "jobs").mkdir()
    set_nodes(folder, nodes)
    return binaries


def set_nodes(folder, nodes):
    write(folder / "nodes", str(nodes))


def write(path, text):
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text)
    new.replace(path)


def read(path, default=""):
    return path.read_text() if path.exists() else default


@contextmanager
def locked(folder):
    with (folder / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def list_states(folder):
    """Return the state of each job by its number."""
    return {job.name: read(job / "state") for job in (folder / "jobs").iterdir()}


def list_processes(job):
    """Return the pids of all processes of all tasks of a job."""
    sessions = read(job / "sessions").split()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if find_session(pid) in sessions]


def find_session(pid):
    """Return the session of a process; None if it has ended."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else fields[2]


def send(pids, signum):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def mark(job, state):
    """Give the job this state. Return False if it has ended before."""
    with locked(job.parent.parent):
        if read(job / "state") in ENDED:
            return False
        write(job / "state", state)
        return True


def kill(find_pids):
    """End processes. `find_pids` returns those that are left."""
    send(find_pids(), signal.SIGTERM)
    deadline = time.monotonic() + KILL_WAIT
    while find_pids() and time.monotonic() < deadline:
        time.sleep(PERIOD)
    send(find_pids(), signal.SIGKILL)


def read_directives(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


def sbatch(folder, path):
    script = Path(path).read_text()
    with locked(folder):
        number = len(list_states(folder)) + 101
        job = folder / "jobs" / str(number)
        job.mkdir()
        write(job / "state", "PENDING")
    write(job / "script", script)
    nodes = int(read_directives(script).get("nodes", "1"))
    subprocess.Popen(
        [sys.executable, __file__, str(folder), "controller", job.name, str(nodes)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=os.getcwd(),
    )
    print(f"Submitted batch job {number}")


def controller(folder, name, nodes):
    """Wait for free nodes, run the batch script, and run it again while it is requeued."""
    job = folder / "jobs" / name
    restarts = 0
    while True:
        while not take_nodes(folder, job, int(nodes)):
            if read(job / "state") in ENDED:
                return
            time.sleep(PERIOD)
        tasks = int(nodes) * int(read_directives(read(job / "script")).get("ntasks-per-node", "1"))
        env = {
            **os.environ,
            "SLURM_JOB_ID": name,
            "SLURM_JOB_NUM_NODES": nodes,
            "SLURM_NTASKS": str(tasks),
            "SLURM_JOB_NODELIST": "127.0.0.1",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        done = subprocess.run(["bash", str(job / "script")], env=env, check=False)
        with locked(folder):
            (job / "taken").unlink()
            write(job / "sessions", "")
            if read(job / "state") == "RUNNING":
                write(job / "state", "FAILED" if done.returncode else "COMPLETED")
            if read(job / "state") in ENDED:
                return
        restarts += 1


def take_nodes(folder, job, nodes):
    with locked(folder):
        used = sum(int(read(other / "taken", "0")) for other in (folder / "jobs").iterdir())
        if read(job / "state") not in ("PENDING", "REQUEUED") or used + nodes > int(read(folder / "nodes")):
            return False
        write(job / "taken", str(nodes))
        write(job / "state", "RUNNING")
        return True


def srun(folder, *arguments):
    job = folder / "jobs" / os.environ["SLURM_JOB_ID"]
    rest = list(arguments)
    options = {}
    while rest[0].startswith("--"):
        name, separator, value = rest.pop(0)[2:].partition("=")
        options[name] = value if separator or name == "unbuffered" else rest.pop(0)
    tasks = []
    with locked(folder):
        for number in range(int(os.environ["SLURM_NTASKS"])):
            out, err = (
                open(options[name].replace("%j", job.name).replace("%t", str(number)), "ab") for name in ("output", "error")
            )
            env = {**os.environ, "SLURM_PROCID": str(number), "SLURM_NODEID": str(number), "SLURM_LOCALID": "0"}
            tasks.append(subprocess.Popen(rest, env=env, stdout=out, stderr=err, start_new_session=True))
        write(job / "sessions", "\n".join(str(task.pid) for task in tasks))
    codes = [task.wait() for task in tasks]
    if any(codes):
        send(list_processes(job), signal.SIGKILL)
    sys.exit(max(abs(code) for code in codes))


def sacct(folder, *arguments):
    print("JobID|State|NodeList")
    states = list_states(folder)
    for name in arguments:
        if name in states:
            print(f"{name}|{states[name]}|127.0.0.1")


def scancel(folder, name, *options):
    job = folder / "jobs" / name
    if options:
        send(list_processes(job), signal.Signals[f"SIG{options[1].removeprefix('SIG')}"])
    elif mark(job, "CANCELLED"):
        kill(lambda: list_processes(job))


def scontrol(folder, verb, name):
    assert verb == "requeue"
    job = folder / "jobs" / name
    if "no-requeue" in read_directives(read(job / "script")):
        sys.exit("Requested operation is presently disabled")
    pids = [str(pid) for pid in list_processes(job)]  # of this start; the next one may begin at once
    if mark(job, "REQUEUED"):
        subprocess.Popen(
            [sys.executable, __file__, str(folder), "kill", *pids], start_new_session=True, stdout=subprocess.DEVNULL
        )


if __name__ == "__main__":
    folder, command, *arguments = Path(sys.argv[1]), *sys.argv[2:]
    if command == "kill":
        kill(lambda: [int(pid) for pid in arguments if find_session(pid)])
    else:
        globals()[command](folder, *arguments)
