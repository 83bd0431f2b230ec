"""Several nodes: the same call on each node forms one job. This package imports torch.

Nodes join by torch's own rendezvous (rendezvous/). It numbers them, and gives them a store for the round. The node of group
rank 0 is the leader. All messages of a round go through the store (protocol/), and to or from the leader:

    node ---- inbox: numbered messages -----------> leader     "here I am", "a rank fails here", "my ranks have ended"
    node <--- broadcasts: numbered ---------------- leader     "start", "stop", "this is decided"
    node ---- heartbeats -------------------------> leader     counters; the leader's own counter is read by all nodes

The messages of an event grow linearly with the nodes. The order of the inbox is the order of events on different nodes.
Clocks of different hosts are never compared. A node compares a heartbeat counter only with its last value, by its own clock.

    caller's thread    run_controller.py   makes the environments of the ranks, reports attempts, makes the result
    node thread        node_thread.py      checks that the nodes have the same options (job_config_check.py), joins rounds,
                                           and runs each of them (round_runner.py) with pure state machines:
                                           node_machine.py, and on one node leader.py, which decides by job_decision.py
    watcher thread     watcher/            as on one node; local_ranks.py sends it commands: start, stop, renew the lease

A round is one membership. It may have several attempts. The next round begins when nodes are lost or new nodes join.

`Agent` (agent.py) is for users who extend an agent or have a RendezvousHandler of their own (rendezvous/custom_handler.py).
Importing it imports torch, so it is imported on first use.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpwatch.multinode.agent import Agent, WorkerGroupInfo

__all__ = ["Agent", "WorkerGroupInfo"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(".agent", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
