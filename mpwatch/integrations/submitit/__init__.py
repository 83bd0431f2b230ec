"""Run one job on several nodes of a SLURM cluster through submitit. There are two ways.

- `mpwatch.integrations.submitit.run(executor, train, 8, nodes=4)` waits for the values of all ranks (run.py).
  mpwatch/cluster/__init__.py describes how the driver and the nodes work together.
- A program that calls `executor.submit(mpwatch.integrations.submitit.Job(train, 8))` can end while the job runs (job.py).
  Each SLURM task calls the `Job` object. The first task runs the coordinator of the job.

`run` submits the minimum number of nodes as one SLURM job, one task on each machine, since SLURM starts the tasks of one
job at the same time. Each further node, and each that replaces a lost one, is a SLURM job of its own.

    driver: SubmititEngine                  folder of the executor                task of SLURM
    ----------------------                  ----------------------                -------------
    start ---- 0.call, 1.call ------------> mpwatch-1234abcd/ ------------------> Task: reads the call of its number
    submit ----------------- sbatch ------------------------------------------->  writes 0.begun, calls it,
    _poll <--- 0.outcome, 1.outcome ------- mpwatch-1234abcd/ <-----------------  writes 0.outcome

The folder, such as mpwatch-1234abcd, contains pickles with the secret of the job, so only this user can read and write it.

Preemption: before SLURM takes the machines back, or at the time limit, it sends the signal of submitit (SIGUSR2) to all
processes of the job. Then `mpwatch.should_stop` is True in all ranks at the same step, and when they have returned, the job
is submitted again: a `Job` by submitit, another one by `run`. If SLURM sends only SIGTERM, the ranks end before they can
save, unless slurm.conf has `PreemptParameters=send_user_signal`.
"""

from mpwatch.integrations.submitit.job import Job
from mpwatch.integrations.submitit.run import run

__all__ = ["Job", "run"]
