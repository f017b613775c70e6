"""Headers of safetensors files: read as the library reads them, and every damage is one line that names the file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from checkpoints import error_of, safetensors_bytes, tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save, save_file

from lockstep.artifacts.places import TensorPlace
from lockstep.checkpoint.safetensors_header import read_header
from lockstep.errors import InputError

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
DATA = bytes(24)


def places(tensor_places: dict[str, TensorPlace]) -> list:
    return [asdict(place) for place in tensor_places.values()]


def poke(file: Path, position: int, byte: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(position)
        opened.write(bytes([byte]))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


def line_of(file, data: bytes) -> str:
    file.write_bytes(data)
    line = error_of(read_header, file)
    assert line.startswith(f"{file}: expected ")
    return line.removeprefix(f"{file}: ")


def test_every_tensor_lies_where_the_library_finds_it(file):
    values = {
        **tensors("F32"),
        "flags": np.array([True, False, True]),
        "ids": np.arange(5),
        "bytes": np.arange(3, dtype=np.uint8),
    }
    save_file(values, file, {"format": "pt"})
    records = read_header(file)
    data = file.read_bytes()
    loaded = load_file(file)
    assert records.keys() == loaded.keys()
    for name, record in records.items():
        assert record.shape == loaded[name].shape
        assert data[record.offset : record.offset + record.length] == loaded[name].tobytes()


def test_a_file_without_tensors_or_metadata_is_whole(file):
    file.write_bytes(safetensors_bytes({}))
    assert read_header(file) == {}
    file.write_bytes(safetensors_bytes(b'{"__metadata__": {"a": "b"}}    '))
    assert read_header(file) == {}


@pytest.mark.parametrize(("data", "expected"), [
    (b"", "expected a header length in the first 8 bytes, found a file of 0 bytes"),
    (b"\xff" * 30,
        "expected a header of 2 to 22 bytes, found a header length of 18446744073709551615 in a file of 30 bytes"),
    (safetensors_bytes({"a": ENTRY})[:40],
        "expected a header of 2 to 32 bytes, found a header length of 65 in a file of 40 bytes"),
    (safetensors_bytes(b"[1, 2]"), "expected a header that opens with '{', found b'['"),
    (safetensors_bytes(b'{"a": }'), "expected a JSON header, found Expecting value: line 1 column 7 (char 6)"),
    (safetensors_bytes(b'{"a\xff": 1}'), "expected a header in UTF-8, found invalid start byte"),
    (safetensors_bytes(b'{"\\ud800": {}}'), "expected a header in UTF-8, found surrogates not allowed"),
    (safetensors_bytes(b'{"a":' * 5000 + b"1" + b"}" * 5000),
        "expected a JSON header, found maximum recursion depth exceeded"),
    (safetensors_bytes(b'{"a": {}, "a": {}}'), "expected each name once in the header, found 'a' twice"),
    (safetensors_bytes({"__metadata__": {"a": 1}}), "expected strings in the header's __metadata__, found {'a': 1}"),
    (safetensors_bytes({"a": 7}), "expected dtype, shape and data_offsets for tensor 'a', found 7"),
    (safetensors_bytes({"a": {**ENTRY, "dtype": "F31"}}, DATA),
        "expected a dtype of the safetensors format for tensor 'a', found 'F31'"),
    (safetensors_bytes({"a": {**ENTRY, "shape": [2, -3]}}, DATA),
        "expected a list of sizes as the shape of tensor 'a', found [2, -3]"),
    (safetensors_bytes({"a": {**ENTRY, "data_offsets": [24, 0]}}, DATA),
        "expected a begin and an end as data_offsets of tensor 'a', found [24, 0]"),
    (safetensors_bytes({"a": {**ENTRY, "shape": [2, 2]}}, DATA),
        "expected 16 bytes for tensor 'a' (F32 [2, 2]), found 24 bytes in data_offsets [0, 24]"),
    (safetensors_bytes({"a": {**ENTRY, "shape": [2**62] * 300}}, DATA),
        "expected fewer elements for tensor 'a' (F32 [4611686018427387904, 4611686018427387904, "),
    (safetensors_bytes({"a": {**ENTRY, "data_offsets": [4, 28]}}, DATA + bytes(4)),
        "expected tensor 'a' at byte 73, found a hole: it begins at byte 77"),
    (safetensors_bytes({"a": ENTRY, "b": {**ENTRY, "data_offsets": [20, 44]}}, DATA + bytes(20)),
        "expected tensor 'b' at byte 163, found an overlap: it begins at byte 159"),
    (safetensors_bytes({"a": ENTRY}, DATA[:-1]), "expected a file of 97 bytes, as its header says, found 96 bytes"),
    (safetensors_bytes({"a": ENTRY}, DATA + b"\0"), "expected a file of 97 bytes, as its header says, found 98 bytes"),
])  # fmt: skip
def test_a_damage_is_named(file, data, expected):
    line = line_of(file, data)
    assert line.startswith(expected)
    assert line.endswith("; the file is damaged or incomplete, download it again")
    assert len(line) < 400


def test_a_git_lfs_pointer_is_told_from_a_damaged_file(file):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    assert line_of(file, pointer) == (
        "expected a safetensors file, found a Git LFS pointer; run `git lfs pull` in its folder"
    )


def test_any_flipped_bit_of_a_header_is_an_error_or_changes_no_place(file):
    """The one thing that a header cannot tell is another spelling of a name: then all the rest is as before."""
    # [0, 9] is as empty as [0, 8]
    full = save({name: value for name, value in tensors().items() if value.size}, {"format": "pt"})
    file.write_bytes(full)
    records = read_header(file)
    header_end = min(record.offset for record in records.values())
    accepted = 0
    for bit in range(header_end * 8):
        poke(file, bit // 8, full[bit // 8] ^ 1 << bit % 8)
        try:
            actual = read_header(file)
        except InputError as error:
            assert str(error).startswith(f"{file}: expected ")
            continue
        finally:
            poke(file, bit // 8, full[bit // 8])
        accepted += 1
        assert places(actual) == places(records), f"bit {bit}"
        assert len(actual.keys() - records.keys()) <= 1, f"bit {bit}"
    assert 0 < accepted < header_end * 8 / 2


def test_a_file_cut_anywhere_is_an_error(file):
    full = save(tensors())
    file.write_bytes(full)
    for size in reversed(range(len(full))):
        os.truncate(file, size)
        error_of(read_header, file)


SIZES = st.one_of(st.integers(-1, 40), st.booleans(), st.none(), st.floats(), st.just(2**64), st.text(max_size=2))
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BOOL", "U8", "F4", "X", 3]),
        "shape": st.one_of(SIZES, st.lists(SIZES, max_size=3)),
        "data_offsets": st.one_of(SIZES, st.lists(SIZES, max_size=3)),
    },
    optional={"more": SIZES},
)
HEADERS = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(st.text(max_size=3), st.one_of(ENTRIES, SIZES), max_size=3).map(
        lambda value: json.dumps(value).encode()
    ),
)


@given(header=HEADERS, data=st.binary(max_size=30))
def test_whatever_a_file_holds_it_is_read_as_the_library_reads_it_or_an_error(tmp_path_factory, header, data):
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(safetensors_bytes(header, data))
    try:
        records = read_header(file)
    except InputError:
        return
    with safe_open(file, "np") as library:  # would raise SafetensorError: no case of this is known
        assert set(library.keys()) == records.keys()


@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4))
def test_what_the_library_refuses_is_refused(tmp_path_factory, flips):
    file = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    damaged = bytearray(save(tensors(), {"format": "pt"}))
    for position, mask in flips:
        damaged[position % len(damaged)] ^= mask
    file.write_bytes(damaged)
    try:
        with safe_open(file, "np"):
            return
    except SafetensorError:
        error_of(read_header, file)
