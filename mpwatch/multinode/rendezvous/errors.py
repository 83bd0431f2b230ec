"""The exceptions that end the rendezvous of a node."""


class StoreLostError(Exception):
    """Raised if this node cannot reach the store, or if the store contains invalid data.

    The error text names the store and the cause.
    """


class CancelledError(Exception):
    """Raised by methods of RendezvousClient after `RendezvousClient.cancel()` was called."""


class JobClosedError(Exception):
    """Raised if this node tries to join a job that is over."""
