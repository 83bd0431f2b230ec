"""How nodes meet: torch's own rendezvous (engine.py), in a form that no wall clock, stranger's pickle or silent store can
harm. Out comes a round: who this node is in it, and its part of the store.

Knows nothing of ranks, nor of what nodes say to one another.
"""
