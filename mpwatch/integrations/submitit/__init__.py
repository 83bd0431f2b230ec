"""Run one job on several nodes of a SLURM cluster through submitit. There are two ways.

- `mpwatch.integrations.submitit.run(executor, train, 8, nodes=4)` waits for the values of all ranks (run.py).
  mpwatch/cluster/__init__.py describes how the driver and the nodes work together.
- A program that calls `executor.submit(mpwatch.integrations.submitit.Job(train, 8))` can end while the job runs (job.py).
  Each SLURM task calls the `Job` object. The tasks find each other through a store, which the first task serves.

`run` submits the minimum number of nodes as one SLURM job, with one task on each machine. SLURM starts all tasks of one
SLURM job at the same time. `run` does not use a job array, because the first node of an array could occupy its machine for
hours before the other nodes start. Each further node, and each node that replaces a lost node, is a separate SLURM job.

    driver: SubmititEngine                  folder of the executor                task of SLURM
    ----------------------                  ----------------------                -------------
    start ---- 0.call, 1.call ------------> mpwatch-1234abcd/ ------------------> Task: reads the call of its number
    submit ----------------- sbatch ------------------------------------------->  writes 0.begun, calls it,
    _poll <--- 0.outcome, 1.outcome ------- mpwatch-1234abcd/ <-----------------  writes 0.outcome

The folder of a job, such as mpwatch-1234abcd, contains pickles with the secret of the job. Only the user of the driver can
read and write the folder, because a pickle that another user has changed could run any code.

Preemption: some time before a job loses its machines, SLURM sends the signal of submitit (SIGUSR2) to all processes of the
job. A job loses its machines when SLURM takes them back, or when the time limit of the job is reached. After the signal of
submitit, `mpwatch.should_stop` returns True in all ranks at the same step, so that the ranks can save and return. When the
ranks of a preempted `Job` have returned, submitit queues the `Job` again. When the ranks of a preempted `run` have returned,
`run` submits a new SLURM job. If SLURM sends only SIGTERM, the ranks end before they can save a checkpoint. If
`PreemptParameters=send_user_signal` is set in slurm.conf, SLURM sends the signal of submitit before SIGTERM.
"""

from mpwatch.integrations.submitit.job import Job
from mpwatch.integrations.submitit.run import run

__all__ = ["Job", "run"]
