"""The exceptions that end the rendezvous of a node. This module imports no other module."""


class StoreLostError(Exception):
    """The store cannot be reached any more, or contains invalid data.

    The error text names the store and the cause.
    """


class CancelledError(Exception):
    """`RendezvousClient.cancel()` was called, so a method of RendezvousClient has ended early."""


class JobClosedError(Exception):
    """The job is over, because its rendezvous was closed for all nodes."""
