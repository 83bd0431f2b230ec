"""Ignores exceptions that are raised by user code, for example by a logging handler."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpwatch.wire.exceptions.decoder import ENDS_RUN


@contextmanager
def ignore_user_errors() -> Iterator[None]:
    """Ignore the exceptions that the `with` block raises, even SystemExit.

    Do not ignore the exceptions in ENDS_RUN, such as KeyboardInterrupt.
    """
    try:
        yield
    except ENDS_RUN:
        raise
    except BaseException:  # noqa: BLE001, S110
        pass
