"""Reports which collectives this rank has called, and where in the code its main thread is. This module runs in a rank.

    watcher --- one byte over a socket --> thread ------.
    the function has raised -------------> main thread -+-> reads torch's flight recorder --- CALLED_COLLECTIVES --> watcher

The thread starts with the first process group. It can answer while the main thread waits in C++ code, but not while another
thread holds the GIL.

A "world" lasts as long as a default group. In the next world, torch uses the names of groups again. So it is noted when a
group is made: earlier records with its name belong to a destroyed group.

A rank can crash in a collective: gloo calls abort() if a peer sends more bytes than expected. So faulthandler writes the
stack of a crash into the same socket, whose buffer is so small that the write blocks until the watcher has the collectives,
and reads (watcher/processes/collective_socket.py), for at most 0.1 s. The rank still dies of the same signal.
"""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from traceback import walk_stack
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpwatch import torch_private
from mpwatch.os_support.clock import wall_time
from mpwatch.results.collective import DEFAULT_GROUP, MAX_TENSORS, Collective, CollectiveState
from mpwatch.results.places import find_user_frame, format_place
from mpwatch.results.rank_collectives import MAX_COLLECTIVES, RankCollectives
from mpwatch.wire.messages import MessageKind
from mpwatch.worker import stack_dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType, ModuleType
    from typing import Any

    from mpwatch.worker.channel import Channel

BATCH_OF_POINT_TO_POINT = "batch_isend_irecv"  # the function of torch.distributed
MAX_FRAMES = 50  # in the stack of an answer, the innermost ones
MAKERS_OF_GROUPS = ("init_process_group", "new_group", "split_group", "shrink_group")  # older versions of torch lack some
COLLECTIVE_FILE = "/torch/distributed/distributed_c10d.py"
ROOT_ARGUMENTS = ("src", "dst")
GROUP_ROOT_ARGUMENTS = ("group_src", "group_dst")  # ranks within the group
# The names of functions that gloo records under another name.
RECORDED_NAMES = {"reduce_scatter_tensor": "all_reduce", "reduce_scatter_single": "all_reduce"}


class _Group(NamedTuple):
    description: str
    ranks: tuple[int, ...]  # torch's global ranks
    made_at: int  # as in the flight recorder, in nanoseconds of CLOCK_REALTIME


_has_started = False
_groups: dict[str, _Group] = {}  # the latest of each name, even destroyed ones, by torch's name
_torch_rank: int | None = None  # in the default process group made last


def answer_when_used(module: ModuleType, channel: Channel) -> None:
    """Wrap torch's functions that create process groups: the thread is started, and the groups are added to `_groups`."""
    for name in MAKERS_OF_GROUPS:
        if hasattr(module, name):
            setattr(module, name, _note_groups(getattr(module, name), channel))


def _note_groups(make_group: Callable[..., Any], channel: Channel) -> Callable[..., Any]:
    @wraps(make_group)
    def make_and_note(*args: Any, **kwargs: Any) -> Any:
        start(channel)
        known: set[Any] = set()
        with suppress(Exception):  # another version of torch may differ; that must not end the user's call
            known.update(torch_private.get_group_names())
        made_at = int(wall_time() * 1e9)
        result = make_group(*args, **kwargs)
        with suppress(Exception):
            _note_new_groups(known, made_at)
        return result

    return make_and_note


def _note_new_groups(known: set[Any], made_at: int) -> None:
    global _torch_rank
    names = torch_private.get_group_names()
    if names and not known:
        _torch_rank = sys.modules["torch.distributed"].get_rank()
    details = torch_private.get_process_groups()
    for name in (names[group] for group in names.keys() - known):
        _groups[name] = _Group(*details[name], made_at)


def _is_of_present_group(entry: Mapping[str, Any]) -> bool:
    """Return False if this entry belongs to an old group, and a newer group now has the old group's name."""
    group = _groups.get(entry["process_group"][0])
    return group is None or bool(entry["time_created_ns"] >= group.made_at)


def start(channel: Channel) -> None:
    """Start the thread that answers the watcher. If that fails, the watcher gets only the rank's stacks."""
    global _has_started
    if _has_started or not torch_private.has_flight_recorder():
        return
    _has_started = True
    with suppress(OSError, RuntimeError):
        ours, theirs = socket.socketpair()
        with theirs:
            channel.send(MessageKind.COLLECTIVES, fd=theirs.fileno())
        threading.Thread(target=_answer_requests, args=(ours, channel), name="mpwatch collectives", daemon=True).start()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # the kernel takes its minimum
        stack_dumps.redirect_crash_stack(ours.dup())


def _answer_requests(requests: socket.socket, channel: Channel) -> None:
    with suppress(OSError):  # the watcher is dead
        while requests.recv(1):
            _send_collectives(channel)


def send_before_failure(channel: Channel) -> None:
    """After the rank has reported its failure, the watcher can stop it at any time."""
    if _has_started:
        _send_collectives(channel)


def _send_collectives(channel: Channel) -> None:
    try:
        answer = describe_rank().to_json().encode()
    except Exception:  # noqa: BLE001  another version of torch may record something else
        answer = b""
    channel.send(MessageKind.CALLED_COLLECTIVES, answer)


def describe_rank() -> RankCollectives:
    """Return the latest collectives, from the oldest to the newest, and the place in the code where the main thread is."""
    frames = [frame for frame, _ in walk_stack(sys._current_frames()[threading.main_thread().ident or 0])]
    try:
        return _describe_rank(frames)
    finally:
        frames.clear()  # if this is the main thread, the list would keep this frame alive, and the variables of user code


def _describe_rank(frames: list[FrameType]) -> RankCollectives:
    now = int(wall_time() * 1e9)
    recorded = sorted(torch_private.read_flight_recorder(), key=lambda entry: entry["time_created_ns"])
    entries = _merge_coalesced(filter(_is_of_present_group, recorded))
    selected = _select_entries(entries)
    found = [_make_collective(entry, now) for entry in selected]
    place = _format_user_place(frames)
    if (index := _find_call_of_main_thread(selected, found, frames)) is not None:
        found[index] = replace(_add_arguments(found[index], frames), place=place)
    return RankCollectives(
        collectives=tuple(found),
        place=place,
        stack=_format_stack(frames),
        has_all=len(selected) == len(entries) and not _has_lost_records(recorded),
        torch_rank=_torch_rank,
        answered_at=now / 1e9,
    )


def _has_lost_records(recorded: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if torch's flight recorder may have overwritten a record of a group in `_groups`."""
    oldest: dict[str, Mapping[str, Any]] = {}
    for entry in recorded:
        oldest.setdefault(_get_backend(entry), entry)
    lost_until = max((entry["time_created_ns"] for entry in oldest.values() if entry["record_id"] > 0), default=0)
    groups = list(_groups.values())  # a copy, since the main thread may make a group meanwhile
    return any(group.made_at < lost_until for group in groups)


def _find_call_of_main_thread(entries: list[dict[str, Any]], calls: list[Collective], frames: list[FrameType]) -> int | None:
    """Return the index of the collective in which the main thread waits. Other threads may have called collectives, too."""
    if not torch_private.is_of_torch(frames[0].f_code):
        return None
    frame = next(filter(_is_of_distributed, frames), None)
    if frame is not None and "group" in frame.f_locals:
        name = torch_private.get_group_name(frame.f_locals["group"])
        own = [index for index, entry in enumerate(entries) if entry["process_group"][0] == name]
    else:
        own = list(range(len(entries)))
    return own[-1] if own and calls[own[-1]].state is CollectiveState.WAITING else None


def _is_of_distributed(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(COLLECTIVE_FILE)


def _merge_coalesced(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last entry of each number: NCCL makes four for a batch of three calls, and updates only the last."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in entries:
        last.pop(_identify_call(entry), None)  # so that the new entry comes last
        last[_identify_call(entry)] = entry
    return list(last.values())


def _identify_call(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return _get_backend(entry), entry["process_group"], entry["is_p2p"], _get_number(entry)


def _get_number(entry: Mapping[str, Any]) -> int:
    number: int = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return number


def _select_entries(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the latest MAX_COLLECTIVES entries, and the latest entry of each process group."""
    last_of_group = {entry["process_group"]: number for number, entry in enumerate(entries)}.values()
    latest = range(max(0, len(entries) - MAX_COLLECTIVES), len(entries))
    return [entries[number] for number in sorted({*last_of_group, *latest})]


def _get_backend(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[0]


def _make_collective(entry: Mapping[str, Any], now: int) -> Collective:
    group, description = entry["process_group"]
    noted = _groups.get(group)
    is_default = "default_pg" in (description, noted and noted.description)
    is_described = description not in ("", "undefined")
    return Collective(
        name=_get_operation(entry),
        sequence=_get_number(entry),
        backend=_get_backend(entry),
        group=DEFAULT_GROUP if is_default else f"{group} ({description})" if is_described else group,
        ranks=noted.ranks if noted else (),
        input_shapes=tuple(map(tuple, entry["input_sizes"][:MAX_TENSORS])),
        output_shapes=tuple(map(tuple, entry["output_sizes"][:MAX_TENSORS])),
        input_dtypes=tuple(map(_name_dtype, entry["input_dtypes"][:MAX_TENSORS])),
        output_dtypes=tuple(map(_name_dtype, entry["output_dtypes"][:MAX_TENSORS])),
        # gloo's entries keep the state "scheduled", and are retired when the call has ended.
        state=CollectiveState.COMPLETED if entry["retired"] or entry["state"] == "completed" else CollectiveState.WAITING,
        seconds=(now - entry["time_created_ns"]) / 1e9,
    )


def _get_operation(entry: Mapping[str, Any]) -> str:
    """Return the name of the entry's operation, for example `recv` if NCCL has recorded `recv 0<-1`."""
    name = str(entry["profiling_name"]).partition(":")[2].partition(" ")[0]
    return BATCH_OF_POINT_TO_POINT if entry["is_p2p"] and name == "coalesced" else name


def _name_dtype(name: str) -> str:
    """Return "float32" for "Float", as the flight recorder calls it."""
    return str(getattr(torch, name.lower(), name.lower())).removeprefix("torch.")


def _format_user_place(frames: list[FrameType]) -> str:
    frame = frames[find_user_frame(frame.f_code.co_filename for frame in frames)]
    return format_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _format_stack(frames: list[FrameType]) -> str:
    lines = [
        f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        for frame in frames[:MAX_FRAMES]
    ]
    return "\n".join(lines)


def _add_arguments(collective: Collective, frames: list[FrameType]) -> Collective:
    """Add what torch's flight recorder does not have, from the frame of the collective."""
    for frame in frames:
        name = frame.f_code.co_name
        if _is_of_distributed(frame) and RECORDED_NAMES.get(name, name) == collective.name:
            arguments = frame.f_locals
            reduce_op = getattr(arguments.get("op"), "name", "")
            return replace(collective, reduce_op=str(reduce_op), root=_find_root(collective, arguments))
    return collective


def _find_root(collective: Collective, arguments: Mapping[str, Any]) -> int | None:
    root = next((arguments[name] for name in ROOT_ARGUMENTS if arguments.get(name) is not None), None)
    if root is None and collective.ranks:
        index = next((arguments[name] for name in GROUP_ROOT_ARGUMENTS if arguments.get(name) is not None), None)
        root = None if index is None else collective.ranks[index]
    return root if isinstance(root, int) else None
