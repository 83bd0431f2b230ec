"""The exceptions that end a node's part in the rendezvous. Imports nothing."""


class StoreLostError(Exception):
    """The store cannot be reached any more, or it holds data that no node writes. The text names the store and the cause."""


class CancelledError(Exception):
    """`RendezvousClient.cancel()` was called, before or during the call that raises this."""


class JobClosedError(Exception):
    """The job is over: its rendezvous has been closed for all nodes."""
