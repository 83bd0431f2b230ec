"""Run one job on several nodes of a SLURM cluster through submitit, from one call, or from a program that does not wait.

- `mpwatch.integrations.submitit.run(executor, train, 8, nodes=4)` waits for the values of all ranks (run.py). The package
  mpwatch/cluster says how the driver and the nodes work together. engine.py starts the nodes.
- `executor.submit(mpwatch.integrations.submitit.Job(train, 8))` needs no program that waits (job.py). `Job` is the function
  of each task, and the tasks meet in a store that the first one serves.

A job of `nodes` tasks is one job of SLURM with that many tasks, one a machine. So SLURM starts all of them at once or none:
with a job array, some nodes could hold their machines and wait for hours for the others. Nodes beyond the least number, and
nodes that take the place of lost ones, are jobs of one task each, so they come and go one by one.

    driver: SubmititEngine                  folder of the executor                task of SLURM
    ----------------------                  ----------------------                -------------
    start ---- 0.call, 1.call ------------> mpwatch-1234abcd/ ------------------> Task: reads the call of its number
    submit ----------------- sbatch ------------------------------------------->  writes 0.begun, calls it,
    _poll <--- 0.outcome, 1.outcome ------- mpwatch-1234abcd/ <-----------------  writes 0.outcome

The calls contain the secret of the job, and a pickle can run any code. So only the user can read and write that folder.

Preemption: some time before SLURM takes the machines back, or before the time limit, it sends the signal of submitit
(SIGUSR2) to all processes of the job. `mpwatch.should_stop` then becomes True in all ranks at the same step, and the ranks
save and return. After that a `Job` leaves the rest to submitit, which queues it again. `run` submits the job again itself.
If SLURM takes machines back with SIGTERM alone, the ranks die of it: set `PreemptParameters=send_user_signal`.
"""

from mpwatch.integrations.submitit.job import Job
from mpwatch.integrations.submitit.run import run

__all__ = ["Job", "run"]
