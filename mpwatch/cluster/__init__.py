"""Run one job on several nodes of a cluster, with one call of `run`. Used by the integrations with Ray, Dask and SLURM.

    driver, which calls `run`                                  node: a process of the engine, one for each node of the job
    -------------------------                                  -----------------------------------------------------------
    engine.start(call) ------------- the engine ------------>  run_node --> mpwatch.submit(fn, ..., rendezvous=...) --> ranks
    server (nodes/)  <-------------- TCP ------------------->   node thread
                     <-------------- TCP: output, events,      (node.py)
                                     statuses for the view
                     --------------- TCP: stop ------------->
    future <------------------------ the engine -------------  NodeOutcome: the node's RunResult, or an error

An engine is an object that starts a function on each node of a job: see `Engine`.

Guarantees:

- When `run` returns or raises an exception, no process of the job is left on the cluster.
- If the driver is killed, each node loses its connection to the driver, and stops its ranks within 10 seconds.
- If the engine loses a node, the driver makes the engine start a new one in its place. The coordinator, which runs in the
  driver and so survives the loss of any node, decides whether all ranks are restarted.

The nodes must be able to connect to the driver.
"""

from mpwatch.cluster.engine import Engine, NodeOutcome, ThreadEngine
from mpwatch.cluster.run import JobOptions, check_nodes, run

__all__ = ["Engine", "JobOptions", "NodeOutcome", "ThreadEngine", "check_nodes", "run"]
