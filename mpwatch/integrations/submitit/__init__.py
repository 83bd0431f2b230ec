"""Run one job on several nodes of a SLURM cluster through submitit. There are two ways.

- `mpwatch.integrations.submitit.run(executor, train, 8, nodes=4)` waits for the values of all ranks (run.py).
  mpwatch/cluster/__init__.py describes how the driver and the nodes work together. engine.py starts the nodes.
- After `executor.submit(mpwatch.integrations.submitit.Job(train, 8))` the calling program can end (job.py). Each task of
  SLURM calls the `Job`. The tasks meet in a store that the first task serves.

`run` submits the minimum number of nodes as one SLURM job, with one task on each machine. So SLURM starts either all of
these nodes or none. With a job array, some nodes could hold their machines and wait for hours for the other nodes. Each
further node, and each node that replaces a lost node, is a SLURM job of its own, so such nodes can start and end one by one.

    driver: SubmititEngine                  folder of the executor                task of SLURM
    ----------------------                  ----------------------                -------------
    start ---- 0.call, 1.call ------------> mpwatch-1234abcd/ ------------------> Task: reads the call of its number
    submit ----------------- sbatch ------------------------------------------->  writes 0.begun, calls it,
    _poll <--- 0.outcome, 1.outcome ------- mpwatch-1234abcd/ <-----------------  writes 0.outcome

The calls in the folder contain the secret of the job, and a pickle can run any code. So only the user can read and write the
folder with the calls.

Preemption: SLURM sends the signal of submitit (SIGUSR2) to all processes of the job. SLURM does this some time before it
takes the machines back, or before the time limit. Then `mpwatch.should_stop` becomes True in all ranks at the same step, and
the ranks save and return. After that, the work is submitted again: submitit does this for a `Job`, and `run` does it for its
own job. If SLURM takes machines back with SIGTERM alone, SIGTERM ends the ranks. With `PreemptParameters=send_user_signal`,
SLURM sends the signal of submitit first.
"""

from mpwatch.integrations.submitit.job import Job
from mpwatch.integrations.submitit.run import run

__all__ = ["Job", "run"]
