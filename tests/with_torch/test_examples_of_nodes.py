"""The examples of several nodes. The script runs as two nodes on this machine, and the files for clusters are well-formed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.ports import free_port
from support.programs import ENV

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = [f"rank {rank} of 4: y = 3.00 x + 2.00" for rank in range(4)]


@pytest.mark.slow
def test_the_script_fits_a_line_on_two_nodes(tmp_path):
    settings = {"MPWATCH_SECRET": "of the test", "KEEP": str(tmp_path), "PYTHONWARNINGS": "default"}
    command = [sys.executable, str(EXAMPLES / "several_nodes.py"), f"127.0.0.1:{free_port()}"]
    nodes = [
        subprocess.Popen(command, env={**ENV, **settings}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sorted(line for out, _ in outputs for line in out.splitlines()) == LINES
    assert (tmp_path / "line.json").exists()


def install_commands(folder, **programs):
    """Write shell scripts into a folder. Return a PATH that has it first."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(("requeued", "run_id"), [({}, "slurm-4711-0"), ({"SLURM_RESTART_COUNT": "2"}, "slurm-4711-2")])
def test_the_batch_file_passes_the_rendezvous_to_each_task(tmp_path, requeued, run_id):
    variables = "$ENDPOINT $RUN_ID $NNODES $NPROCS $KEEP"
    path = install_commands(tmp_path, scontrol='echo "host-a\nhost-b"', srun=f'echo "{variables} ${{#MPWATCH_SECRET}}" "$@"')
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "host-[a-b]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    batch = ["bash", str(EXAMPLES / "slurm.sbatch")]
    done = subprocess.run(batch, env={"PATH": path, **slurm, **requeued}, text=True, capture_output=True, check=True)
    keep = tmp_path / "several-nodes-4711"
    task = f"--kill-on-bad-exit=0 python {tmp_path}/examples/several_nodes.py"
    assert done.stdout.splitlines() == [f"host-a:29711 {run_id} 1-2 2 {keep} 44 {task}"]
    assert keep.is_dir()
    lines = (EXAMPLES / "slurm.sbatch").read_text().splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options[-1] < lines.index("set -euo pipefail")  # SLURM ignores options after the first command


@pytest.mark.parametrize(("status", "is_requeued"), [(0, False), (1, False), (75, True)])
def test_the_batch_file_queues_a_job_again_that_has_stopped(tmp_path, status, is_requeued):
    path = install_commands(tmp_path, scontrol='echo "$1 $2" >&2; echo host-a', srun=f"exit {status}")
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "host-a"}
    env = {"PATH": path, **slurm, "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", str(EXAMPLES / "slurm.sbatch")], env=env, text=True, capture_output=True, check=False)
    assert done.returncode == status
    assert ("requeue 4711" in done.stderr.splitlines()) is is_requeued


def test_the_parts_of_the_manifest_match():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    name = job["metadata"]["name"]
    assert (service["kind"], service["spec"]["clusterIP"], service["spec"]["selector"]) == (
        "Service",
        "None",
        {"job-name": name},
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["ENDPOINT"] == f"{name}-0.{pod['subdomain']}:{container['ports'][0]['containerPort']}"
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == int(env["NNODES"].partition("-")[2])
    assert pod["terminationGracePeriodSeconds"] > 10 + 2  # grace_period, and time for the other nodes to notice
    assert {"ENDPOINT", "RUN_ID", "NNODES", "NPROCS", "KEEP"} < env.keys()
    (secret,) = (variable["valueFrom"] for variable in container["env"] if variable["name"] == "MPWATCH_SECRET")
    assert secret == {"secretKeyRef": {"name": "several-nodes", "key": "secret"}}
