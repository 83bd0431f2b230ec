"""Run one job on several nodes of a SLURM cluster through submitit. There are two ways.

- `mpwatch.integrations.submitit.run(executor, train, 8, nodes=4)` waits for the values of all ranks (run.py).
  mpwatch/cluster/__init__.py describes how the driver and the nodes work together. engine.py starts the nodes.
- After `executor.submit(mpwatch.integrations.submitit.Job(train, 8))` the calling program may end (job.py). Each task calls
  the `Job`. The tasks meet in a store that the first task serves.

The least number of nodes is one SLURM job, with one task on each machine. So SLURM starts either all of these nodes or none.
With a job array, some nodes could hold their machines and wait for hours for the other nodes. Each further node, and each
node that replaces a lost node, is a SLURM job of its own. So these nodes come and go one by one.

    driver: SubmititEngine                  folder of the executor                task of SLURM
    ----------------------                  ----------------------                -------------
    start ---- 0.call, 1.call ------------> mpwatch-1234abcd/ ------------------> Task: reads the call of its number
    submit ----------------- sbatch ------------------------------------------->  writes 0.begun, calls it,
    _poll <--- 0.outcome, 1.outcome ------- mpwatch-1234abcd/ <-----------------  writes 0.outcome

The calls contain the secret of the job, and a pickle can run any code. So only the user can read and write that folder.

Preemption: some time before SLURM takes the machines back, or before the time limit, it sends the signal of submitit
(SIGUSR2) to all processes of the job. `mpwatch.should_stop` then becomes True in all ranks at the same step, and the ranks
save and return. After that, submitit queues a `Job` again, and `run` itself submits its job again. If SLURM takes machines
back with SIGTERM alone, SIGTERM ends the ranks. To prevent this, set `PreemptParameters=send_user_signal`.
"""

from mpwatch.integrations.submitit.job import Job
from mpwatch.integrations.submitit.run import run

__all__ = ["Job", "run"]
