"""Values of other nodes: they come as they were, and nothing that came without the job's secret is ever unpickled."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import saboteurs
from hypothesis import given
from hypothesis import strategies as st

from mpwatch.elastic.talk.gathering import GATHER_LIMIT, PART, pack, parts, unpack
from mpwatch.elastic.talk.seal import ForgedError, sign

KEY = b"secret"
PLACE = "round-7/attempt-1/values/3"
RAN = []


class Runs:
    """Notes that it was unpickled."""

    def __reduce__(self):
        return RAN.append, (1,)


class BreaksHere:
    def __reduce__(self):
        return saboteurs.raises_picky, ()


@given(
    st.dictionaries(
        st.integers(0, 2**40), st.none() | st.integers() | st.text() | st.lists(st.floats(allow_nan=False)), max_size=5
    )
)
def test_values_come_back(values):
    assert unpack(pack(values, KEY, PLACE), KEY, PLACE, values.keys()) == values


def test_arrays_and_functions_come_back():
    values = {8: np.arange(300_000.0), 9: lambda x: x + 1, 10: {"small": np.ones(3), "bytes": bytes(100_000)}}
    back = unpack(b"".join(parts(pack(values, KEY, PLACE))), KEY, PLACE, [8, 9, 10])
    assert np.array_equal(back[8], values[8])
    back[8][0] = 7.0  # it is its own
    assert back[9](1) == 2
    assert back[10]["bytes"] == values[10]["bytes"]


def test_a_class_of_the_program_is_the_same_class_on_all_nodes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from mpwatch.elastic.talk.gathering import pack, unpack\n"
        "class Result:\n    pass\n"
        "if sys.argv[1] == 'pack':\n"
        "    result = Result()\n"
        "    result.found = lambda: 'found'\n"
        "    sys.stdout.buffer.write(pack({1: result}, b'key', 'place'))\n"
        "else:\n"
        "    found = unpack(sys.stdin.buffer.read(), b'key', 'place', [1])[1]\n"
        "    print(type(found) is Result, found.found())\n"
    )
    packed = subprocess.run([sys.executable, str(program), "pack"], stdout=subprocess.PIPE, check=True).stdout
    out = subprocess.run([sys.executable, str(program), "unpack"], input=packed, stdout=subprocess.PIPE, check=True).stdout
    assert out == b"True found\n"


@given(st.data())
def test_nothing_altered_is_unpickled(data):
    packed = bytearray(pack({1: Runs(), 2: "x"}, KEY, PLACE))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    forgeries = [bytes(packed), bytes(packed[: data.draw(st.integers(0, len(packed) - 1))])]
    for forged in forgeries:
        with pytest.raises(ForgedError, match="signature of the values does not match"):
            unpack(forged, KEY, PLACE, [1, 2])
    assert not RAN


def test_nothing_of_another_secret_or_place_is_unpickled():
    packed = pack({1: Runs()}, KEY, PLACE)
    for key, place in ((b"other", PLACE), (KEY, "round-8/attempt-1/values/3")):
        with pytest.raises(ForgedError, match=r"does not match: .*another place, or signed with another secret"):
            unpack(packed, key, place, [1])
    with pytest.raises(ForgedError):
        unpack(pickle.dumps(Runs()), KEY, PLACE, [1])
    assert not RAN


def test_without_a_secret_nothing_is_packed_or_unpacked():
    with pytest.raises(ValueError, match="only under a secret"):
        pack({1: 2}, b"", PLACE)
    with pytest.raises(ValueError, match="only under a secret"):
        unpack(sign(b"", b"values", PLACE.encode(), b"") + b"", b"", PLACE, [])


@pytest.mark.parametrize("ranks", [[], [1], [1, 2, 3], [2, 3]], ids=str)
def test_values_of_other_ranks_are_refused_unopened(ranks):
    with pytest.raises(ForgedError, match=r"values of the ranks \[1, 2\], where those of "):
        unpack(pack({1: Runs(), 2: Runs()}, KEY, PLACE), KEY, PLACE, ranks)
    assert not RAN


@pytest.mark.parametrize("body", [b"", b"\0\0\0\1", b"\0\0\0\0more", b"\0\0\0\1" + bytes(16) + b"more"], ids=range(4))
def test_what_is_signed_and_still_makes_no_sense_is_refused(body):
    with pytest.raises(ForgedError, match="cannot be told apart"):
        unpack(sign(KEY, b"values", PLACE.encode(), body) + body, KEY, PLACE, [0])


def test_too_much_is_refused_with_what_to_do():
    values = {4: bytes(1 << 20), 5: bytearray(GATHER_LIMIT), 6: None}
    with pytest.raises(
        ValueError, match=r"take 17\.1 MiB, that of rank 5 16\.1 MiB of it; gather=True sends at most 16 MiB"
    ):
        pack(values, KEY, PLACE)


def test_almost_too_much_goes_in_parts_that_any_store_takes():
    packed = pack({5: bytes(GATHER_LIMIT - 1000)}, KEY, PLACE)
    cut = parts(packed)
    assert max(map(len, cut)) == PART < 8 << 20
    assert unpack(b"".join(cut), KEY, PLACE, [5]) == {5: bytes(GATHER_LIMIT - 1000)}


def test_who_cannot_be_pickled_is_named():
    with pytest.raises(
        TypeError, match=r"the value of rank 7 cannot be sent to the other nodes .*: TypeError: cannot pickle"
    ) as caught:
        pack({6: 1, 7: {"lock": __import__("threading").Lock()}}, KEY, PLACE)
    assert isinstance(caught.value.__cause__, TypeError)


def test_who_cannot_be_unpickled_is_named():
    packed = pack({6: 1, 7: BreaksHere()}, KEY, PLACE)
    with pytest.raises(saboteurs.PickyError) as caught:
        unpack(packed, KEY, PLACE, [6, 7])
    assert caught.value.__notes__ == ["(raised while the value of rank 7, from another node, was unpickled here)"]
