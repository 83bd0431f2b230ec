"""Send and receive the messages of a round through its store. Entries are signed, limited in size, and decoded by type.

    round             the name that the chair gives to the round: all else is signed for it
    inbox, inbox/<n>  how many messages there are to the chair, and the n-th
    word/<n>          what the chair says to everybody
    place/<a>/<g>     where the ranks of node g are in attempt a
    beat/<g>          how often node g has given a sign of life

The board uses only `set`, `get`, `add` and `check` of a store, and never waits in one. It drops an entry that is not valid,
and logs why. Raises StoreLostError if the store cannot be reached.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.messages import FromMember, RankAssignment, RoundName, Word, from_body, to_body
from mpwatch.multinode.protocol.signed_json import MAX_ENTRY, InvalidEntryError, SignedJson
from mpwatch.multinode.rendezvous.store import PrefixedStore

T = TypeVar("T")
log = logging.getLogger("mpwatch")
WORD_LIMIT = 4 * MAX_ENTRY  # a verdict tells of the failures of many nodes


class StoreChannel:
    """Of one round, as one node sees it.

    Args:
        store: of the round.
        seal: of the job.
        group_rank: of this node.
        patience: seconds that somebody may take to write what he has announced.
    """

    def __init__(self, store: PrefixedStore, seal: SignedJson, *, group_rank: int, patience: float) -> None:
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
                self._write("round", "round", to_json(RoundName(self._name)))
            elif (found := self._entry("round", "round", partial(from_json, RoundName))) is not None:
                self._name = found.name
        return bool(self._name)

    def beat(self) -> None:
        """A sign of life."""
        self._store.add(f"beat/{self.group_rank}", 1)

    def beats(self, nodes: Iterable[int]) -> dict[int, int]:
        """How often these nodes have given one."""
        return {node: self._store.add(f"beat/{node}", 0) for node in nodes}

    def post(self, message: FromMember) -> None:
        """Send a message to the chair. Raises ValueError if the chair could not read the message, and would wait for it."""
        body = to_body(message)
        from_body(body)
        number = self._store.add("inbox", 1)
        self._write(f"inbox/{number}", self._place("inbox", number), body)

    def inbox(self) -> list[FromMember]:
        """What has come for the chair since the last time."""
        count = self._store.add("inbox", 0)
        now = time.monotonic()
        self._holes |= dict.fromkeys(range(self._heard + 1, count + 1), now)
        self._heard = max(self._heard, count)
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
        """Return what the chair has said since the last call. The chair overwrites invalid entries in its turn."""
        found: list[Word] = []
        while word := self._message(f"word/{self._told + 1}", self._place("word", self._told + 1), Word, WORD_LIMIT):
            self._told += 1
            found += word
        return found

    def put(self, places: Iterable[RankAssignment]) -> None:
        """For each node its own, to be found when the attempt starts."""
        for place in places:
            self._write(
                self._key_of(place.attempt, place.group_rank), self._place("place", place.group_rank), to_body(place)
            )

    def place(self, attempt: int) -> RankAssignment | None:
        """Return the place of this node. Return None if it is not there."""
        at = self._key_of(attempt, self.group_rank)
        found = self._message(at, self._place("place", self.group_rank), RankAssignment, MAX_ENTRY)
        return found[0] if found else None

    def _key_of(self, attempt: int, group_rank: int) -> str:
        return f"place/{attempt}/{group_rank}"

    def _place(self, kind: str, number: int) -> str:
        return f"{self._name}/{kind}/{number}"

    def _write(self, key: str, place: str, body: dict[str, Any], limit: int = MAX_ENTRY) -> None:
        entry = self._seal.close(place, body, limit=limit)
        self._store.set(key, entry)

    def _message(self, key: str, place: str, kinds: Any, limit: int) -> list[Any]:
        def decode(body: dict[str, Any]) -> Any:
            message = from_body(body)
            if not isinstance(message, kinds):
                raise InvalidEntryError(f"a {type(message).__name__} does not belong there")
            return message

        message = self._entry(key, place, decode, limit)
        return [] if message is None else [message]

    def _entry(self, key: str, place: str, decode: Callable[[dict[str, Any]], T], limit: int = MAX_ENTRY) -> T | None:
        """Read and decode an entry. Return None if it is not there, or is not valid, which is logged once."""
        if not self._store.check([key]):
            return None
        try:
            return decode(self._seal.open(place, self._store.get(key), limit=limit))
        except InvalidEntryError as error:
            if key not in self._dropped:  # the entry is read again, since its writer may come late
                self._dropped.add(key)
                log.warning("an entry of the rendezvous is dropped: %s: %s", key, error)
            return None
