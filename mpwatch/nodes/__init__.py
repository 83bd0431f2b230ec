"""Runs on several nodes. Each node calls `mpwatch.run` with the same Rendezvous, and connects to one **coordinator**.

    node: caller's thread, watcher thread       node thread            the node thread of one node, or a thread of a driver
    -------------------------------------       -----------            ----------------------------------------------------
    run_controller.py, watcher/ <-------------> node_machine.py <--TCP--> coordinator.py: who takes part, start, stop,
    diagnosis, events, environments,                                      what comes next (job_decision.py, job_verdict.py)
    ranks of this node

Nodes are pushed to, and send: NodeInfo, how an attempt goes, AttemptReport, NodeLeaving. The coordinator sends:
StartAttempt, StopAttempt, AttemptDecision. Two clocks watch: whoever hears nothing for `node_timeout` gives the other end
up; and the ranks of a node that hears nothing from the coordinator stop earlier, when their lease expires.

No clocks of different hosts are compared. What happens on different nodes has happened in the order in which the coordinator
has heard of it. Without the coordinator nobody goes on: the node that runs it is chosen by the endpoint.
"""
