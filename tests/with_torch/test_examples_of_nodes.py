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


@pytest.mark.slow
def test_the_script_fits_a_line_on_two_nodes(tmp_path):
    settings = {"MPWATCH_SECRET": "of the test", "KEEP": str(tmp_path), "PYTHONWARNINGS": "default"}
    command = [sys.executable, str(EXAMPLES / "several_nodes.py"), f"127.0.0.1:{free_port()}"]
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    nodes = [subprocess.Popen(command, env={**ENV, **settings}, **pipes) for _ in range(2)]
    outputs = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    lines = [f"rank {rank} of 4: y = 3.00 x + 2.00" for rank in range(4)]
    assert sorted(line for out, _ in outputs for line in out.splitlines()) == lines
    assert (tmp_path / "line.json").exists()


def run_batch_file(folder, **variables):
    """Run it with commands that print what they are asked for. `srun` also prints its environment, and ends with $STATUS."""
    shown = "$ENDPOINT $RUN_ID $NNODES $NPROCS $KEEP ${#MPWATCH_SECRET}"
    commands = {"scontrol": 'echo "$1 $2" >&2; echo "host-a\nhost-b"', "srun": f'echo "{shown}" "$@"; exit $STATUS'}
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "host-[a-b]",
        "SLURM_CPUS_PER_TASK": "8",
    }
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), **slurm, **variables}
    batch = ["bash", str(EXAMPLES / "slurm.sbatch")]
    return subprocess.run(batch, env=env, text=True, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("status", "requeued", "run_id"),
    [("0", {}, "slurm-4711-0"), ("1", {}, "slurm-4711-0"), ("75", {"SLURM_RESTART_COUNT": "2"}, "slurm-4711-2")],
)
def test_the_batch_file_starts_a_task_on_each_node_and_queues_a_stopped_job_again(tmp_path, status, requeued, run_id):
    done = run_batch_file(tmp_path, STATUS=status, **requeued)
    assert done.returncode == int(status)
    keep = tmp_path / "several-nodes-4711"
    task = f"--kill-on-bad-exit=0 --cpus-per-task=8 python {tmp_path}/examples/several_nodes.py"
    assert done.stdout.splitlines()[0] == f"host-a:29711 {run_id} 1-2 2 {keep} 44 {task}"
    assert keep.is_dir()
    assert ("requeue 4711" in done.stderr.splitlines()) is (status == "75")


def test_the_parts_of_the_manifest_match():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["ENDPOINT"] == f"{name}-0.{pod['subdomain']}:{container['ports'][0]['containerPort']}"
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == int(env["NNODES"].partition("-")[2])
    assert pod["terminationGracePeriodSeconds"] > 10 + 2  # grace_period, and time for the other nodes to notice
    assert {"ENDPOINT", "RUN_ID", "NNODES", "NPROCS", "KEEP"} < env.keys()
    (secret,) = (variable["valueFrom"] for variable in container["env"] if variable["name"] == "MPWATCH_SECRET")
    assert secret == {"secretKeyRef": {"name": "several-nodes", "key": "secret"}}
