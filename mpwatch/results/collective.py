"""`Collective`: one call of a collective by one rank, and the texts that name this call. Frozen data, without I/O."""

import re
from dataclasses import dataclass, field
from enum import Enum

from mpwatch.results.texts import clean_line

MAX_TENSORS = 64  # of a call that are known
HASHED_NAME = re.compile("[0-9a-f]{40}")  # torch's name of a group that was made with use_local_synchronization
SHORT_NAME = 8  # digits
DEFAULT_GROUP = "default"  # the name of torch's default process group in all texts


class CollectiveState(Enum):
    """Whether a rank still waits in a call of a collective.

    Attributes:
        WAITING: the call has begun, and has not ended. A call that has failed stays in this state.
        COMPLETED: the call has ended.
    """

    WAITING = "WAITING"
    COMPLETED = "COMPLETED"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One rank's call of a torch.distributed collective, as torch's flight recorder has recorded this call.

    Attributes:
        name: the operation, such as "all_reduce".
        sequence: number of the call among the collectives of its process group, from 1. It is the same on all ranks of the
            group.
        backend: the backend of this call, such as "gloo". A process group may have several backends. Each backend numbers
            its own calls.
        group: name of the process group: "default", the description that the user gave it, or the number that torch gave it.
        ranks: torch's global ranks of the group, in order. The tuple is empty if they are not known, for example because the
            user has made the group without `init_process_group` or `new_group`.
        input_shapes: the shapes of the tensors that the call reads. This field and the next three fields have only the first
            64 tensors.
        output_shapes: the shapes of the tensors that the call writes to.
        input_dtypes: the types of the tensors that the call reads, as torch's names without "torch.", such as "float32".
        output_dtypes: the types of the tensors that the call writes to, such as "float32".
        state: whether the rank waits in this call.
        place: the line of the user's code that waits for this call, such as "train.py:31 in step". It is empty if no line
            waits, or if the line is not known.
        reduce_op: the reduction, such as "SUM". It is known only while the rank waits in a function of torch.distributed.
        root: the global rank of `src` or `dst`. It is known only while the rank waits in a function of torch.distributed.
        seconds: the seconds between the call and the time at which mpwatch asked the rank.
    """

    name: str
    sequence: int
    backend: str = ""
    group: str
    ranks: tuple[int, ...]
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    state: CollectiveState
    place: str = ""
    reduce_op: str = ""
    root: int | None = None
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        place = f" at {self.place}" if self.place else ""
        return f"{self.title} ({', '.join(filter(None, (self.tensors, self.group_title)))}){place}"

    @property
    def title(self) -> str:
        """The operation of the call and the number of the call, such as `all_reduce #3`."""
        return f"{self.name} #{self.sequence}"

    @property
    def group_title(self) -> str:
        """The process group in words, such as `default group` or `group 1`.

        A group name of 40 hexadecimal digits is cut after 8 digits.
        """
        if self.group == DEFAULT_GROUP:
            return f"{DEFAULT_GROUP} group"
        return f"group {self.group[:SHORT_NAME] if HASHED_NAME.fullmatch(self.group) else clean_line(self.group)}"

    @property
    def tensors(self) -> str:
        """The types and shapes of the call's tensors, such as `float32[16]`.

        The text is empty if the call has no tensors.
        """
        return format_tensors(self.input_dtypes, self.input_shapes) or format_tensors(self.output_dtypes, self.output_shapes)


def format_tensors(dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> str:
    """Return a text such as `float32[16, 4]` or `3 x float32[16]`."""
    if not shapes:
        return ""
    dtype = dtypes[0] if dtypes else "tensor"
    texts = [f"{dtype}{list(shape)}" for shape in shapes]
    if len(texts) >= MAX_TENSORS:
        return f"{texts[0]} and many more"
    if len(set(texts)) == 1:
        return texts[0] if len(texts) == 1 else f"{len(texts)} x {texts[0]}"
    return f"{texts[0]} and {len(texts) - 1} more"
