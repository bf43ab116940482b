"""Plain data are read as pickle reads them, in bounded memory, and nothing that a pickle names is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.read.memory import pickled_data
from instrument.read.memory.pickled_data import DataReader, PickleError

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False),
    st.text(), st.text(min_size=250, max_size=300),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner, max_size=4).map(tuple), st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)


def read(data: bytes) -> Any:
    return DataReader(io.BytesIO(data), len(data), lambda item: None).read()


def plain(value: Any) -> Any:
    """Return ``value`` with tuples in place of lists, as lists of known objects are read as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


@given(values, st.integers(2, 5), st.sampled_from([1, 13, 1 << 22]))
def test_any_plain_data(value: Any, protocol: int, block: int) -> None:
    """Texts, numbers, lists, tuples and dictionaries, wherever a block of the file ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled_data, "_BLOCK", block)
        assert plain(read(pickle.dumps(value, protocol))) == plain(value)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_bytes(protocol: int) -> None:
    """Short and long ones; protocol 2 has no bytes."""
    value = [b"", b"x" * 5, b"y" * 70_000]
    assert value == read(pickle.dumps(value, protocol))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 3, 300, 999, 1000, 1001, 2500])
def test_lists_of_known_objects(protocol: int, count: int) -> None:
    """Equal lists of the same objects are one object; long lists come in several parts."""
    frames = [{"line": number} for number in range(count)]
    data = pickle.dumps([frames, list(frames), list(frames), frames[:1]], protocol)
    first, second, third, short = read(data)
    assert plain(frames) == plain(first) == plain(second) == plain(third)
    assert plain(short) == plain(frames[:1])
    assert (second is third) == (1 < count < 1000)


class _Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_is_run(tmp_path: Path, protocol: int) -> None:
    """A pickle of an object is refused before it does anything."""
    for hostile in (_Runs(tmp_path / "ran"), {"segments": [_Runs(tmp_path / "ran")]}, os.system, {1, 2}, 1j):
        with pytest.raises(PickleError):
            read(pickle.dumps(hostile, protocol))
    assert not (tmp_path / "ran").exists()


HOSTILE = {
    "global": b"\x80\x02cos\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02Pid\n.",
    "object of a class": b"\x80\x02(ios\nsystem\n.",
    "build": b"\x80\x02}}b.",
    "a memo of 64 GB": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a text of 2^63 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**63 - 1) + b"a.",
    "bytes of 2^40 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"a.",
    "an integer of 2^31 bytes": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "lists": b"\x80\x02(" + b"]" * 200_000 + b"l.",
    "dictionaries": b"\x80\x02(" + b"}" * 200_000 + b"t.",
    "tuples": b"\x80\x02(" + b"K\x00\x85" * 400_000 + b"t.",
    "marks": b"\x80\x02" + b"(" * 200_000 + b".",
    "nested tuples": b"\x80\x02K\x00" + b"\x85" * 200_000 + b".",
    "keys of one hash": pickle.dumps(dict.fromkeys(range(0, 9 * (2**61 - 1), 2**61 - 1)), 4),
    "an unhashable key": b"\x80\x02}]K\x01s.",
    "no mark": b"\x80\x02]e.",
    "an empty stack": b"\x80\x02.",
    "two values": b"\x80\x02K\x01K\x02.",
    "a list in itself": b"\x80\x02]\x94(h\x00e.",
    "items of a number": b"\x80\x02K\x01(K\x02K\x03u.",
    "a key without a value": b"\x80\x02}(K\x02u.",
    "no such memo": b"\x80\x02h\x05.",
    "no text": b"\x80\x04\x8c\x01\xff.",
    "no end": b"\x80\x02K\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles(tmp_path: Path, name: str) -> None:
    """Each is refused in a sentence, at once, also from a file."""
    path = tmp_path / "hostile.pickle"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(PickleError, match="it "), path.open("rb") as file:
        DataReader(file, len(HOSTILE[name]), lambda item: None).read()


def test_every_cut() -> None:
    """A file that ends too early is damaged, wherever it ends."""
    data = pickle.dumps({"a": [1, 2.5, "text", 2**40, None, ("x", b"bytes")], "b": "t" * 300}, 4)
    for size in range(len(data)):
        with pytest.raises(PickleError):
            read(data[:size])
