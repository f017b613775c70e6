"""Reading files that a person wrote: the traps of YAML, each as a file on disk, each one line with the line number."""

from __future__ import annotations

import pytest
from checkpoints import error_of
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.documents import read_document
from lockstep.config.load import load
from lockstep.config.schema import Config
from lockstep.errors import InputError

PITFALLS = {
    "key twice": (
        b"a:\n  x: 1\n  y: 2\n  x: 3\n", ":4: expected YAML; found the key 'x' twice in one mapping, first in line 2",
    ),
    "equal keys written differently": (
        b"16: a\n0x10: b\n", ":2: expected YAML; found the key '16' twice in one mapping, first in line 1",
    ),
    "list as a key": (b"? [a]\n: 1\n", ":1: expected YAML; found a list or mapping as a key"),
    "tab": (b"a:\n\tb: 1\n", ":2: expected YAML; found a tab: indent with spaces"),
    "indentation": (
        b"a:\n   b: 1\n  c: 2\n", ":3: expected YAML; found a line that is indented differently from those around it",
    ),
    "list not closed": (b"a: [1, 2\nb: 3\n", ":2: expected YAML; found a list without its ]"),
    "no colon": (b"a: 1\nb\nc: 2\n", ":3: expected YAML; found a key without its ':'"),
    "quote not closed": (b"a: 'text\n", ":2: expected YAML; found unexpected end of stream"),
    "colon in text": (
        b"text: The sea: cold\n",
        ":1: expected YAML; found a ': ' too many, or a line indented too far; put text with ': ' in quotes",
    ),
    "two documents": (b"a: 1\n---\nb: 2\n", ":2: expected YAML; found a second document (---): keep one"),
    "alias of nothing": (b"a: *b\n", ":1: expected YAML; found undefined alias 'b'"),
    "impossible date": (
        b"a: 1\nb: 2024-13-45\n", ":2: expected YAML; found '2024-13-45', which is no timestamp; put text in quotes",
    ),
    "number of 5000 digits": (
        b"a: " + b"9" * 5000, f":1: expected YAML; found '{'9' * 40}', which is no int; put text in quotes",
    ),
    "python object": (
        b"a: !!python/name:os.system x\n", ":1: expected YAML; found a tag (!), which a config has none of",
    ),
    "not UTF-8": (b"a: 1\nb: \xff\n", ":2: expected UTF-8 text; found byte 0xff"),
    "binary": (b"a: 1\n\x00\x01", ":2: expected YAML; found character U+0000, which YAML does not allow"),
    "too deep": (b"[" * 5000, ": expected a config; found lists or mappings nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "expected"), PITFALLS.values(), ids=PITFALLS)
def test_a_pitfall_of_yaml_gives_one_line_with_its_place(tmp_path, data, expected):
    path = tmp_path / "config.yaml"
    path.write_bytes(data)
    assert error_of(load, path) == f"{path}{expected}"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a": 1,\n "b": }', ":2: expected JSON; found a mistake: Expecting value"),
        (b'{"a": {"b": 1, "b": 2}}', ": expected each key once; found 'b' twice in one object"),
        (b"a: 1", ":1: expected JSON; found a mistake: Expecting value"),
        (b"[" * 200_000, ": expected a config; found lists or mappings nested too deeply"),
    ],
)
def test_a_mistake_in_json_gives_one_line(tmp_path, data, expected):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    assert error_of(read_document, path) == f"{path}{expected}"


def test_many_keys_in_json_take_no_longer_than_many_keys(tmp_path):
    """Each is compared with no other: 10^10 comparisons would take an hour."""
    path = tmp_path / "config.json"
    keys = [f'"{number}": 0' for number in range(100_000)]
    path.write_text("{" + ", ".join(keys) + "}")
    assert len(read_document(path)) == 100_000
    path.write_text("{" + ", ".join([*keys, keys[-1]]) + "}")
    with pytest.raises(InputError, match="expected each key once; found '99999' twice in one object"):
        read_document(path)


def test_plain_numbers_are_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("[0, 10, -1, 0.5, 1.0e-4, 1_000, 0x10]\n")
    assert read_document(path) == [0, 10, -1, 0.5, 1e-4, 1000, 16]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(
        InputError, match="absent.yaml: expected a readable config file; found none; `lockstep init SOURCE`"
    ):
        load(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="found a folder; name the file in it"):
        load(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(InputError, match=f"found a checkpoint; `lockstep init {tmp_path}` writes its config"):
        load(tmp_path)


def test_anchors_and_merge_keys_work(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n")
    value = read_document(path)
    assert value["b"] == {"x": 1, "y": 3} and value["c"] == [value["a"]] * 2


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_document(path) == {"a": 1}


def test_aliases_that_repeat_or_hold_themselves_stay_one_short_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("models: &m {m: *m}\n")
    with pytest.raises(InputError, match=r"models\.m\.m: unknown key"):
        load(path)
    layers = "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(30))
    path.write_text(f"a0: &a0 lol\n{layers}")
    with pytest.raises(
        InputError,
        match=r"^\S+: a0: unknown key, allowed: models, limits, tolerances, "
        r"compare_seconds, compare_seed, cache, skip_missing_backends, skip_missing_precisions, require_run, "
        r"check_server, backends, devices, endpoints \(and 31 more\)$",
    ):
        load(path)


def test_a_number_too_long_to_print_is_described(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"models: {{m: 1}}\nlimits: 0x{'f' * 9000}\n")
    with pytest.raises(InputError, match=r"models\.m: expected a mapping of .*; found 1 \(and 1 more\)$"):
        load(path)
    path.write_text(f"models: 0x{'f' * 9000}\n")
    with pytest.raises(InputError, match="models: expected a mapping; found a very large integer$"):
        load(path)
    with pytest.raises(InputError, match="^config: models[.].*: expected text; found a very large integer"):
        load({"models": {16**6000: {}}})


@given(st.binary(max_size=60))
def test_any_bytes_give_a_config_or_one_line(tmp_path_factory, data):
    for name in ("any.yaml", "any.json"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        try:
            assert isinstance(load(path), Config)
        except InputError as error:
            assert "\n" not in str(error)
