"""Ignores exceptions of user code, for example of a logging handler."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpwatch.wire.exceptions.decoder import ENDS_RUN


@contextmanager
def ignore_user_errors() -> Iterator[None]:
    """Even SystemExit, but not those that end the run, such as KeyboardInterrupt."""
    try:
        yield
    except ENDS_RUN:
        raise
    except BaseException:  # noqa: BLE001, S110
        pass
