"""What tests do with runs: let them fail, and act at an event."""

import pytest

import mpwatch


def failed(*args, **options):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(*args, **options)
    return caught.value


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def at(kind, do, count=1, **fields):
    """Return an observer that calls `do` when it has seen so many events of this kind that have these fields."""
    seen = []

    def observe(event):
        if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
            seen.append(event)
            if len(seen) == count:
                do()

    return observe
