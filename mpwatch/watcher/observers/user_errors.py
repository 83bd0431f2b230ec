"""Which exceptions of observers, views and logging handlers end the run. All others are logged or ignored."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpwatch.wire.exceptions.decoder import ENDS_RUN


@contextmanager
def ignore_user_errors() -> Iterator[None]:
    """Ignore what is raised in the `with` block, even SystemExit, except what ends the run."""
    try:
        yield
    except ENDS_RUN:
        raise
    except BaseException:  # noqa: BLE001, S110
        pass
