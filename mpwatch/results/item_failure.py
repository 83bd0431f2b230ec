"""`ItemFailure` is what `mpwatch.map` knows about a failed item. Plain data."""

from dataclasses import dataclass

from mpwatch.results.failure import ProcessFailure, format_failure


@dataclass(frozen=True, kw_only=True)
class ItemFailure:
    """A failed item of `mpwatch.map`.

    Attributes:
        index: position of the item among all items, from 0.
        item: the `repr` of the item, at most 200 characters.
        failure: what happened to the rank that had the item, such as its exception or the death of its process. See
            ProcessFailure.
        attempts: how many times the function was called with the item. It is at least 1.
        reason: why the item was not tried again. It is empty if the caller did not allow restarts.
    """

    index: int
    item: str
    failure: ProcessFailure
    attempts: int = 1
    reason: str = ""

    @property
    def exception(self) -> BaseException | None:
        """The exception that the user's function raised for this item.

        If the function raised no exception, for example because the rank was killed, the property is None. The property is
        also None if the rank could not send the exception to the watcher.
        """
        return self.failure.exception

    def __str__(self) -> str:
        """Return a line such as `item number 17 ('a.txt') failed: rank 2: ValueError: ... (2 attempts)`."""
        attempts = f" ({self.attempts} attempts)" if self.attempts > 1 else ""
        reason = f"; {self.reason}" if self.reason else ""
        return f"{name_item(self.index, self.item)} failed: {format_failure(self.failure)}{attempts}{reason}"


def name_item(index: int, item: str) -> str:
    return f"item number {index} ({item})"
