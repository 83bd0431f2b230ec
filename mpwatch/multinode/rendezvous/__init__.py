"""The rendezvous: the nodes of a job join rounds through torch's own rendezvous.

A round gives this node its group rank and a part of the store (rounds.py). The entry point is client.py:

    RendezvousClient --> open_store.py      serve the store, or connect to it
                     --> rounds.py          join a round: torch's dynamic rendezvous (torch_handler.py), or a static one
    CustomHandlerClient                     the same over a rendezvous handler of the user's own

Clocks that differ between hosts do no harm (clock_skew.py). Torch's shared state is a pickle; a restricted unpickler reads
it (torch_state.py). Each wait for a store that has gone silent is bounded (store.py).

This folder knows nothing about ranks or about the messages between nodes.
"""
