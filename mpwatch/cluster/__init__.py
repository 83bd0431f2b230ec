"""Run one job on several nodes of a cluster, from one call: what the engines for Ray, Dask and SLURM have in common.

    driver, which calls `run`                                  node: a process of the engine, one for each node of the job
    -------------------------                                  -----------------------------------------------------------
    engine.start(call) ------------- the engine ------------>  run_node --> mpwatch.submit(fn, ..., rendezvous=...) --> ranks
    store of the rendezvous <------- TCP -------------------   the nodes meet there
    link <-------------------------- TCP: output, events,      (node.py)
                                     statuses for the view
         --------------------------- TCP: stop ------------->
    future <------------------------ the engine -------------  NodeOutcome: the node's RunResult, or an error

An engine starts functions on nodes. It has three methods: see `Engine`. `ThreadEngine` is an example of it.

Guarantees:

- When `run` returns or raises, the engine has ended everything that it has started.
- If the driver is killed, each node loses its link, and stops its ranks within 10 seconds.
- A node that the engine loses is a lost node of the job. The driver has the engine start another one in its place. Whether
  the ranks are restarted is for the remaining nodes to decide, as in every job of several nodes. If no node remains, the
  driver decides, by the same rules (restarts.py).

The driver serves the store, so no node is needed more than another. The nodes must be able to connect to the driver.
"""

from mpwatch.cluster.engine import Engine, NodeOutcome, ThreadEngine
from mpwatch.cluster.run import check_nodes, run

__all__ = ["Engine", "NodeOutcome", "ThreadEngine", "check_nodes", "run"]
