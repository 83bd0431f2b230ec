"""Runs on several nodes. Nodes with the same run_id and the same store form one job.

Nodes join a torch rendezvous (rendezvous/). The rendezvous gives each node a number (its group rank), and gives all nodes a
shared store for the round. The node with group rank 0 is the leader. All messages of a round go through the store
(protocol/), to or from the leader:

    node ---- inbox: numbered messages -----------> leader     "here I am", "a rank fails here", "my ranks have ended"
    node <--- broadcasts: numbered ---------------- leader     "start", "stop", "this is decided"
    node ---- heartbeats -------------------------> leader     counters; all nodes read the leader's own counter

mpwatch never compares clocks of different hosts. If events happen on different nodes, mpwatch assumes that they happened in
the order in which their messages reached the leader's inbox. A node counts as lost if its heartbeat counter does not change
for `node_timeout`. Every node that reads the counter uses its own clock to measure how long the counter has not changed.

    caller's thread    run_controller.py   makes the environments of the ranks, reports attempts, makes the result
    node thread        node_thread.py      checks that the nodes have the same options (job_config_check.py), joins rounds,
                                           and runs each round (round_runner.py) with pure state machines:
                                           node_machine.py, and on one node leader.py, which uses job_decision.py
    watcher thread     watcher/            as on one node; local_ranks.py sends it commands: start, stop, renew the lease

A round is a period in which the job has the same nodes. A round may have several attempts, because the ranks can be
restarted within a round. The next round begins when nodes are lost or new nodes join.
"""
