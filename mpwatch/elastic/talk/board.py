"""What the nodes of a round write for one another into its store, and find there: signed, bounded, checked on arrival.

    round             the name that the chair gives to the round: all else is signed for it
    inbox, inbox/<n>  how many messages there are to the chair, and the n-th
    word/<n>          what the chair says to everybody
    place/<a>/<g>     where the ranks of node g are in attempt a
    beat/<g>          how often node g has given a sign of life

Uses nothing of a store but `set`, `get`, `add` and `check`, and never waits in one. An entry that is not what it says is
dropped, and the log says why. Raises StoreLostError if the store cannot be reached.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from ..meeting.errors import StoreLostError
from ..meeting.store import PartOfStore
from .messages import FromMember, Place, Word, from_body, to_body
from .seal import MAX_ENTRY, ForgedError, Seal

__all__ = ["Board"]

log = logging.getLogger("mpwatch")
MOST_HOLES = 1000
MOST_BEHIND = 1_000_000  # messages: more than all nodes of any job would write
MOST_NAMED = 20  # entries that were dropped
WORD_LIMIT = 4 * MAX_ENTRY  # a verdict tells of the failures of many nodes


class Board:
    """Of one round, as one node sees it.

    Args:
        store: of the round.
        seal: of the job.
        group_rank: of this node.
        patience: seconds that somebody may take to write what he has announced.
    """

    def __init__(self, store: PartOfStore, seal: Seal, *, group_rank: int, patience: float) -> None:
        self._store, self._seal = store, seal
        self.group_rank, self._patience = group_rank, patience
        self._name = ""  # of the round
        self._heard = 0  # messages in the inbox
        self._said = 0  # words, by us
        self._told = 0  # words that we have read
        self._dropped: set[str] = set()
        self._holes: dict[int, float] = {}  # announced messages that are not there yet, or are none, and since when

    def is_open(self) -> bool:
        """Whether the chair is there, so that it can be written to."""
        if not self._name:
            if self.group_rank == 0:
                self._name = uuid4().hex
                self._write("round", "round", {"name": self._name})
            elif (body := self._read("round", "round")) is not None and isinstance(body.get("name"), str):
                self._name = body["name"]
        return bool(self._name)

    def beat(self) -> None:
        """A sign of life."""
        self._store.add(f"beat/{self.group_rank}", 1)

    def beats(self, nodes: Iterable[int]) -> dict[int, int]:
        """How often these nodes have given one."""
        return {node: self._store.add(f"beat/{node}", 0) for node in nodes}

    def post(self, message: FromMember) -> None:
        """To the chair. Raises ForgedError for what it could not read: it would wait for that for ever."""
        body = to_body(message)
        from_body(body)
        number = self._store.add("inbox", 1)
        self._write(f"inbox/{number}", self._place("inbox", number), body)

    def inbox(self) -> list[FromMember]:
        """What has come for the chair since the last time."""
        count = self._store.add("inbox", 0)
        if count - self._heard > MOST_BEHIND:
            raise StoreLostError(f"somebody else writes into the store: it announces {count} messages of the nodes")
        now = time.monotonic()
        new = range(self._heard + 1, min(count, self._heard + MOST_HOLES - len(self._holes)) + 1)
        self._heard = max([self._heard, *new])
        self._holes |= dict.fromkeys(new, now)
        found = []
        for number in list(self._holes):
            message = self._message(f"inbox/{number}", self._place("inbox", number), FromMember, MAX_ENTRY)
            found += message
            if message or now - self._holes[number] > self._patience:  # who has announced it is gone
                del self._holes[number]
        return found

    def say(self, word: Word) -> None:
        """To everybody."""
        self._said += 1
        self._write(f"word/{self._said}", self._place("word", self._said), to_body(word), WORD_LIMIT)

    def words(self) -> list[Word]:
        """What the chair has said since the last time. What others have put there the chair writes over in its time."""
        found: list[Word] = []
        while word := self._message(f"word/{self._told + 1}", self._place("word", self._told + 1), Word, WORD_LIMIT):
            self._told += 1
            found += word
        return found

    def put(self, places: Iterable[Place]) -> None:
        """For each node its own, to be found when the attempt starts."""
        for place in places:
            self._write(
                self._key_of(place.attempt, place.group_rank), self._place("place", place.group_rank), to_body(place)
            )

    def place(self, attempt: int, node: int | None = None) -> Place | None:
        """That of this node, or of another; None if it is not there."""
        node = self.group_rank if node is None else node
        found = self._message(self._key_of(attempt, node), self._place("place", node), Place, MAX_ENTRY)
        return found[0] if found else None

    def _key_of(self, attempt: int, group_rank: int) -> str:
        return f"place/{attempt}/{group_rank}"

    def _place(self, kind: str, number: int) -> str:
        return f"{self._name}/{kind}/{number}"

    def _is_there(self, key: str) -> bool:
        return self._store.check([key])

    def _write(self, key: str, place: str, body: dict[str, Any], limit: int = MAX_ENTRY) -> None:
        entry = self._seal.close(place, body, limit=limit)
        self._store.set(key, entry)

    def _message(self, key: str, place: str, kinds: Any, limit: int) -> list[Any]:
        body = self._read(key, place, limit)
        if body is None:
            return []
        try:
            message = from_body(body)
            if isinstance(message, kinds):
                return [message]
            raise ForgedError(f"a {type(message).__name__} has no business there")
        except ForgedError as error:
            self._drop(key, error)
            return []

    def _read(self, key: str, place: str, limit: int = MAX_ENTRY) -> dict[str, Any] | None:
        if not self._is_there(key):
            return None
        data = self._store.get(key)
        try:
            return self._seal.open(place, data, limit=limit)
        except ForgedError as error:
            self._drop(key, error)
            return None

    def _drop(self, key: str, error: ForgedError) -> None:
        if key in self._dropped or len(self._dropped) >= MOST_NAMED:  # it is looked for again
            return
        self._dropped.add(key)
        rest = "; more of them will not be named" if len(self._dropped) == MOST_NAMED else ""
        log.warning("an entry of the rendezvous is dropped: %s: %s%s", key, error, rest)
