"""How a node's part in a rendezvous may end otherwise than by going on. Data; imports nothing."""


class StoreLostError(Exception):
    """The store in which the nodes meet cannot be reached any more, or holds what no node writes. Says what and where."""


class CancelledError(Exception):
    """`Engine.cancel()` was called while it was waiting, or before."""


class JobClosedError(Exception):
    """The job is over: its rendezvous has been closed for everybody."""
