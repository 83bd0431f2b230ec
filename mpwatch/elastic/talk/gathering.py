"""The values of one node's ranks, for the other nodes: pickles, which are opened only under the job's secret.

    [ signature ][ number of ranks ][ rank, size ][ rank, size ]... [ bundle ][ bundle ]...

To unpickle is to run what somebody wrote. So the signature, over everything and the place in the store that it is for, is
checked before anything else, and without a secret nothing is packed or unpacked at all. Each rank's value is a bundle of its
own (wire/bundle.py), so that what cannot be pickled or unpickled is named by its rank.

Imports wire and seal.py. No I/O but the anonymous files in which large values are pickled.
"""

import hmac
import os
import struct
from collections.abc import Collection, Mapping
from typing import Any

from ...wire import values as wire_values
from ...wire.bundle import Bundle
from ...wire.exceptions import annotate
from .seal import ForgedError, sign, size_text

__all__ = ["GATHER_LIMIT", "PART", "pack", "parts", "unpack"]

GATHER_LIMIT = 16 << 20  # bytes of one node's values
PART = 1 << 19  # bytes of one entry: torch's store hangs up on who sets more than 8 MiB at once, and etcd refuses 1.5 MiB
SIGNATURE = 32  # bytes
NUMBER = struct.Struct(">I")
ENTRY = struct.Struct(">QQ")  # rank, bytes of its bundle


def pack(values: Mapping[int, Any], seal_key: bytes, place: str) -> bytes:
    """The values, pickled and signed.

    Args:
        values: by global rank.
        seal_key: the job's secret.
        place: full name of the entry in the store; never used before for anything else, by any job with this secret.

    Raises ValueError if they take more than GATHER_LIMIT, or there is no secret; and for what cannot be pickled TypeError
    naming the rank, from what pickling raised. OSError: no memory for them.
    """
    _check_key(seal_key)
    bundles: dict[int, Bundle] = {}
    try:
        for rank in sorted(values):
            bundles[rank] = _bundle_of(rank, values[rank])
        _check_sizes({rank: bundle.size for rank, bundle in bundles.items()})
        table = NUMBER.pack(len(bundles)) + b"".join(ENTRY.pack(rank, bundle.size) for rank, bundle in bundles.items())
        body = table + b"".join(map(_bytes_of, bundles.values()))
    finally:
        for bundle in bundles.values():
            bundle.close()
    return _signature(seal_key, place, body) + body


def unpack(data: bytes, seal_key: bytes, place: str, ranks: Collection[int]) -> dict[int, Any]:
    """The values again, by global rank.

    Args:
        data: from the store, its parts put together.
        seal_key: the job's secret.
        place: where it comes from.
        ranks: those whose values they must be.

    Raises ForgedError if they are not; ValueError if there is no secret; and, with a note naming the rank, what unpickling
    raises, which runs what the values' classes define.
    """
    _check_key(seal_key)
    body = memoryview(data)[SIGNATURE:]
    if not hmac.compare_digest(data[:SIGNATURE], _signature(seal_key, place, body)):
        raise ForgedError(
            "the signature of the values does not match: they were altered, cut off, copied from another place, or signed"
            " with another secret than this node's"
        )
    sizes, at = _table_of(body)
    if set(sizes) != set(ranks):
        raise ForgedError(f"values of the ranks {sorted(sizes)}, where those of {sorted(ranks)} should be")
    found = {}
    for rank, size in sizes.items():
        found[rank] = _value_of(rank, body[at : at + size])
        at += size
    return found


def parts(data: bytes) -> list[bytes]:
    """What was packed, cut into entries that any store takes. Put together again with `b"".join`."""
    return [data[at : at + PART] for at in range(0, len(data), PART)]


def _check_key(key: bytes) -> None:
    if not key:  # anybody can sign with it
        raise ValueError("values are sent from node to node only under a secret, and this job has none")


def _signature(key: bytes, place: str, body: bytes | memoryview) -> bytes:
    return sign(key, b"values", place.encode(), body)


def _bundle_of(rank: int, value: Any) -> Bundle:
    try:
        return wire_values.pack_for_peer(value)
    except OSError:  # the bundle's
        raise
    except Exception as error:
        raise TypeError(
            f"the value of rank {rank} cannot be sent to the other nodes (gather=True): {type(error).__name__}: {error}."
            " Return something that can be pickled, or write it to a file and return its path"
        ) from error


def _check_sizes(sizes: dict[int, int]) -> None:
    total = sum(sizes.values())
    if total > GATHER_LIMIT:
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"the values of this node's ranks take {size_text(total)}, that of rank {largest} {size_text(sizes[largest])}"
            f" of it; gather=True sends at most {size_text(GATHER_LIMIT)} from one node. Return less, or write it to files"
            " and return their paths"
        )


def _bytes_of(bundle: Bundle) -> bytes:
    return bundle.body if bundle.file is None else os.pread(bundle.file.fileno(), bundle.size, 0)


def _table_of(body: memoryview) -> tuple[dict[int, int], int]:
    """The size of each rank's bundle, and where they begin. What is signed is ours; but it may be of another version."""
    try:
        (number,) = NUMBER.unpack_from(body)
        end = NUMBER.size + number * ENTRY.size
        sizes = dict(ENTRY.iter_unpack(body[NUMBER.size : end]))
        if end + sum(sizes.values()) != len(body):
            raise ValueError(f"{end + sum(sizes.values())} bytes are said to be there, not {len(body)}")
    except (struct.error, ValueError) as error:
        raise ForgedError(f"the values cannot be told apart: {error}") from None
    return sizes, end


def _value_of(rank: int, bundle: memoryview) -> Any:
    try:
        return wire_values.load(bundle)
    except Exception as error:
        annotate(error, f"(raised while the value of rank {rank}, from another node, was unpickled here)")
        raise
