"""Run one job on several nodes of a cluster, from one call. The engines for Ray, Dask and SLURM share this code.

    driver, which calls `run`                                  node: a process of the engine, one for each node of the job
    -------------------------                                  -----------------------------------------------------------
    engine.start(call) ------------- the engine ------------>  run_node --> mpwatch.submit(fn, ..., rendezvous=...) --> ranks
    store of the rendezvous <------- TCP -------------------   the nodes meet there
    link <-------------------------- TCP: output, events,      (node.py)
                                     statuses for the view
         --------------------------- TCP: stop ------------->
    future <------------------------ the engine -------------  NodeOutcome: the node's RunResult, or an error

An engine starts a function on each node, and has three methods: see `Engine`. `ThreadEngine` is an example of an engine.

Guarantees:

- When `run` returns or raises, the engine has ended everything that it has started.
- If the driver is killed, each node loses its connection to the driver, and stops its ranks within 10 seconds.
- If the engine loses a node, the driver makes the engine start a new node in its place. The remaining nodes decide whether
  the ranks are restarted, as in every job of several nodes. If no node remains, the driver makes this decision by the same
  rules (restarts.py).

The driver serves the store of the rendezvous, so the job survives the loss of any node. The nodes must be able to connect to
the driver.
"""

from mpwatch.cluster.engine import Engine, NodeOutcome, ThreadEngine
from mpwatch.cluster.run import check_nodes, run

__all__ = ["Engine", "NodeOutcome", "ThreadEngine", "check_nodes", "run"]
