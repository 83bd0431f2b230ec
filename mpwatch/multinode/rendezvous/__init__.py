"""The nodes of a job find one another through torch's rendezvous.

A round is a period in which the nodes of the job do not change. In each round, each node has a group rank. Each round has
its own part of the store (rounds.py). The entry point is client.py:

    RendezvousClient --> open_store.py      serve the store, or connect to it
                     --> rounds.py          join a round: torch's dynamic rendezvous (torch_handler.py), or a static one

The rendezvous also works if the clocks of hosts differ (clock_skew.py). A restricted unpickler reads the shared state of
torch's rendezvous (torch_state.py). If the store does not answer, the connection to the store ends after a time limit
(store.py).

The code in this folder handles only nodes, not ranks.
"""
