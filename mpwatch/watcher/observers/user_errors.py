"""Decides which exceptions of observers, views and logging handlers end the run. All other exceptions are ignored."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpwatch.wire.exceptions.decoder import ENDS_RUN


@contextmanager
def ignore_user_errors() -> Iterator[None]:
    """Ignore all exceptions in the `with` block, even SystemExit, except those that end the run."""
    try:
        yield
    except ENDS_RUN:
        raise
    except BaseException:  # noqa: BLE001, S110
        pass
