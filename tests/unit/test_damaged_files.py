"""A checkpoint folder in which one file is damaged at random: taken, or one line; never a traceback. No torch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_model import DEMO

from lockstep.checkpoint import resolve, resolve_architecture
from lockstep.config.load import load
from lockstep.errors import InputError

WEIGHTS = (DEMO / "model.safetensors").read_bytes()
HEADER_END = 8 + int.from_bytes(WEIGHTS[:8], "little")
FILES = {
    **{name: (DEMO / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")},
    "generation_config.json": b'{"eos_token_id": [0, 5], "max_length": 20}',
    "special_tokens_map.json": b'{"eos_token": "<eos>"}',
    "added_tokens.json": b'{"<x>": 768}',
    "vocab.json": b'{"a": 1}',
    "merges.txt": b"#version: 0.2\na b\n",
    "chat_template.jinja": b"{{ x }}",
    "model.safetensors": WEIGHTS[8:HEADER_END],
}
WHOLE = (b"", b"null", b"[]", b"{}", b"1", b'"x"', b"true", b"[{}]", b"\xff\xfe", bytes(10))
PIECES = (
    b"null",
    b"[]",
    b"{}",
    b"1e999",
    b"-1",
    b"NaN",
    b'"\\ud800"',
    b",",
    b'"',
    b"[[[[",
    b"99999999999999999999",
    b"\xc3",
)
VALUES = (
    None,
    0,
    -1,
    10**9,
    10**30,
    "x",
    [],
    {},
    [1],
    {"a": 1},
    True,
    0.5,
    float("nan"),
    1e308,
    "\ud800",
    {"__float__": "Infinity"},
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value, of long containers the first sixty."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())[:60]
    for key, item in items:
        yield value, key
        yield from places(item)


def damaged(data: bytes, draw: random.Random) -> bytes:
    kind, at = draw.randrange(6), draw.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return draw.choice(WHOLE)
    if kind == 2:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if kind == 3:
        return data[:at] + data[at + draw.randrange(1, 50) :]
    if kind == 4 or not data.startswith(b"{\n") and not data.startswith(b'{"'):
        return data[:at] + draw.choice(PIECES) + data[at:]
    value = json.loads(data)
    container, key = draw.choice(list(places(value)))
    container[key] = draw.choice(VALUES)
    return json.dumps(value).encode()


def write_damaged(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    chosen = draw.choice([*FILES, "model.safetensors"])
    folder.mkdir()
    for name, data in FILES.items():
        data = damaged(data, draw) if name == chosen else data
        if name == "model.safetensors":
            length = len(data).to_bytes(8, "little") if draw.random() < 0.8 else WEIGHTS[:8]
            data = length + data + WEIGHTS[HEADER_END:]
        (folder / name).write_bytes(data)


def check(folder: Path) -> None:
    config = load({"models": {"m": {"source": str(folder), "golden": {"prompts": [{"text": "a"}]}}}})
    stages = (
        config.check_sources, lambda: resolve(str(folder), folder, folder.parent / "checkpoint.json"),
        lambda: resolve_architecture(str(folder), folder, folder.parent / "architecture.json"),
    )  # fmt: skip
    for stage in stages:
        try:
            stage()
        except InputError as error:
            assert str(error).splitlines() == [str(error)] and "expected " in str(error) and len(str(error)) < 700


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_a_damaged_file_is_one_line_or_no_harm(tmp_path, first):
    for seed in range(first, first + 100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_damaged(folder / "checkpoint", seed)
        check(folder / "checkpoint")
