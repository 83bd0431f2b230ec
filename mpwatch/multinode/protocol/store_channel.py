"""Send and receive the messages of one round. Each message is a signed entry of limited size in the store of the round.

Only the node thread uses a StoreChannel. The store of a round has these keys:

    round               the random name that the leader gives to the round; all other signatures of the round cover it
    inbox, inbox/<n>    the number of messages to the leader so far, and the n-th of these messages
    broadcast/<n>       the n-th message of the leader to all nodes
    assignment/<a>/<g>  the ranks of the node with group rank g in attempt a
    heartbeat/<g>       how many heartbeats the node with group rank g has sent

A StoreChannel uses only the methods `set`, `get`, `add` and `check` of the store, and never waits for an entry. Invalid
entries are logged and ignored. All methods raise StoreLostError if the store cannot be reached.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.messages import (
    MessageToAll,
    MessageToLeader,
    RankAssignment,
    RoundName,
    decode_message,
    encode_message,
)
from mpwatch.multinode.protocol.signed_json import MAX_ENTRY_BYTES, InvalidEntryError, SignedJson
from mpwatch.multinode.rendezvous.store import PrefixedStore
from mpwatch.os_support.clock import monotonic

T = TypeVar("T")
MAX_BROADCAST_BYTES = 4 * MAX_ENTRY_BYTES  # a decision contains failures of many nodes


class StoreChannel:
    """Sends and receives the messages of one node in one round.

    Args:
        store: the store of the round.
        signed_json: encodes and verifies the entries of the job.
        group_rank: the group rank of this node.
        write_timeout: seconds in which a node must write a message after it has increased `inbox`.
        log_warning: logs a warning, and returns at once.
    """

    def __init__(
        self,
        store: PrefixedStore,
        signed_json: SignedJson,
        *,
        group_rank: int,
        write_timeout: float,
        log_warning: Callable[..., object],
    ) -> None:
        self._store, self._signed_json = store, signed_json
        self.group_rank, self._write_timeout = group_rank, write_timeout
        self._log_warning = log_warning
        self._round_name = ""
        self._inbox_count = 0
        self._missing_messages: dict[int, float] = {}  # number of a message that is missing or invalid, and since when
        self._broadcasts_sent = 0
        self._broadcasts_read = 0
        self._logged_keys: set[str] = set()

    def try_open(self) -> bool:
        """Open the channel if the round has a name, and return whether the channel is open.

        The leader gives the round its name. Messages can be sent only when the round has a name, because the name is part of
        the signed data of each message.
        """
        if not self._round_name:
            if self.group_rank == 0:
                self._round_name = uuid4().hex
                self._write("round", "round", to_json(RoundName(self._round_name)))
            elif (found := self._read_entry("round", "round", partial(from_json, RoundName))) is not None:
                self._round_name = found.name
        return bool(self._round_name)

    def send_heartbeat(self) -> None:
        self._store.add(f"heartbeat/{self.group_rank}", 1)

    def read_heartbeats(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return how many heartbeats each node in `nodes` has sent, as a dict with the nodes as keys."""
        return {node: self._store.add(f"heartbeat/{node}", 0) for node in nodes}

    def send_to_leader(self, message: MessageToLeader) -> None:
        """Send a message to the leader. Raises ValueError if the message is invalid."""
        body = encode_message(message)
        decode_message(body)
        number = self._store.add("inbox", 1)
        self._write(f"inbox/{number}", self._signed_name("inbox", number), body)

    def read_inbox(self) -> list[MessageToLeader]:
        """Return the messages that nodes have sent to the leader since this method was last called."""
        count = self._store.add("inbox", 0)
        now = monotonic()
        self._missing_messages |= dict.fromkeys(range(self._inbox_count + 1, count + 1), now)
        self._inbox_count = max(self._inbox_count, count)
        found = []
        for number, missing_since in list(self._missing_messages.items()):
            message = self._read_message(
                f"inbox/{number}", self._signed_name("inbox", number), MessageToLeader, MAX_ENTRY_BYTES
            )
            found += message
            if message or now - missing_since > self._write_timeout:  # after this time the sender counts as lost
                del self._missing_messages[number]
        return found

    def broadcast(self, message: MessageToAll) -> None:
        """Send a message of the leader to all nodes."""
        self._broadcasts_sent += 1
        number = self._broadcasts_sent
        body = encode_message(message)
        self._write(f"broadcast/{number}", self._signed_name("broadcast", number), body, MAX_BROADCAST_BYTES)

    def read_broadcasts(self) -> list[MessageToAll]:
        """Return the messages that the leader has sent to all nodes since this method was last called.

        If an entry is invalid, this method reads the same entry again at the next call. If another program has written an
        invalid entry, the leader's next message overwrites the invalid entry.
        """
        found: list[MessageToAll] = []
        while True:
            number = self._broadcasts_read + 1
            message = self._read_message(
                f"broadcast/{number}", self._signed_name("broadcast", number), MessageToAll, MAX_BROADCAST_BYTES
            )
            if not message:
                return found
            self._broadcasts_read = number
            found += message

    def publish_assignments(self, assignments: Iterable[RankAssignment]) -> None:
        """Write into the store which ranks each node has in the attempt that starts."""
        for assignment in assignments:
            key = f"assignment/{assignment.attempt}/{assignment.group_rank}"
            self._write(key, self._signed_name("assignment", assignment.group_rank), encode_message(assignment))

    def read_assignment(self, attempt: int) -> RankAssignment | None:
        """Return the ranks of this node in this attempt, or None if the leader has not assigned the ranks yet."""
        key = f"assignment/{attempt}/{self.group_rank}"
        found = self._read_message(key, self._signed_name("assignment", self.group_rank), RankAssignment, MAX_ENTRY_BYTES)
        return found[0] if found else None

    def _signed_name(self, kind: str, number: int) -> str:
        """Return the name with which an entry is signed, for example "<name of the round>/inbox/3"."""
        return f"{self._round_name}/{kind}/{number}"

    def _write(self, key: str, signed_name: str, body: dict[str, Any], limit: int = MAX_ENTRY_BYTES) -> None:
        entry = self._signed_json.encode(signed_name, body, limit=limit)
        self._store.set(key, entry)

    def _read_message(self, key: str, signed_name: str, types: Any, limit: int) -> list[Any]:
        """Return a list of one message, or an empty list if the store has no valid message at this key."""

        def decode(body: dict[str, Any]) -> Any:
            message = decode_message(body)
            if not isinstance(message, types):
                raise InvalidEntryError(f"a {type(message).__name__} does not belong there")
            return message

        message = self._read_entry(key, signed_name, decode, limit)
        return [] if message is None else [message]

    def _read_entry(
        self, key: str, signed_name: str, decode: Callable[[dict[str, Any]], T], limit: int = MAX_ENTRY_BYTES
    ) -> T | None:
        """Read and decode an entry. Return None if the entry is missing or invalid. Log each invalid entry only once."""
        if not self._store.check([key]):
            return None
        try:
            return decode(self._signed_json.decode(signed_name, self._store.get(key), limit=limit))
        except InvalidEntryError as error:
            if key not in self._logged_keys:  # the entry is read again, since its writer may be late
                self._logged_keys.add(key)
                self._log_warning("an invalid entry in the store of the rendezvous is ignored: %s: %s", key, error)
            return None
