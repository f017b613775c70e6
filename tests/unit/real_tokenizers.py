"""Tokenizers of published models, as the tokenizer.json that a checkpoint has.

Their files are in the wheel of `mistral-common` (envs/tokenizers.txt): nothing of them is in this repository.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared import Shared

SENTENCEPIECE = "sentencepiece"
TEKKEN = "tekken"
NAMES = (SENTENCEPIECE, TEKKEN)
_FILES = {SENTENCEPIECE: "tokenizer.model.v1", TEKKEN: "tekken_240911.json"}
# types of a piece, of sentencepiece_model.proto
_UNKNOWN = 2
_CONTROL = 3


def tokenizer_json(shared: Shared, name: str) -> Path:
    """Return the tokenizer.json of one of NAMES.

    "sentencepiece": 32,000 pieces with a fallback to bytes, of Mistral 7B and like Llama 2's. "tekken": 131,072 tokens
    of bytes, of Mistral Nemo and like Llama 3's.
    """

    def make(folder: Path) -> None:
        convert = sentencepiece if name == SENTENCEPIECE else tekken
        convert(model_file(name)).save(str(folder / "tokenizer.json"))

    model_file(name)  # skips the test where there is none
    return shared.folder(f"tokenizer-{name}", make) / "tokenizer.json"


def model_file(name: str) -> Path:
    """Return the tokenizer.model or tekken.json of one of NAMES."""
    package = importlib.util.find_spec("mistral_common")
    if package is None:
        pytest.skip("needs mistral-common, of envs/tokenizers.txt")
    assert package.origin is not None
    return Path(package.origin).parent / "data" / _FILES[name]


def sentencepiece(source: Path) -> Tokenizer:
    """Return the tokenizer of a SentencePiece model, as transformers converts Llama's."""
    pieces = list(_pieces(source.read_bytes()))
    vocabulary = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, _ in pieces}
    merges = _merges(vocabulary, {piece: -score for piece, score in scores.items()})
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [piece for piece, _, kind in pieces if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return tokenizer


def tekken(source: Path) -> Tokenizer:
    value = json.loads(source.read_bytes())
    first = value["config"]["default_num_special_tokens"]
    size = value["config"]["default_vocab_size"]
    characters = _byte_characters()
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in value["vocab"][: size - first]]
    texts = ["".join(map(characters.__getitem__, token)) for token in tokens]
    vocabulary = {text: first + rank for rank, text in enumerate(texts)}
    merges = _merges(vocabulary, {text: rank for rank, text in enumerate(texts)})
    special = {entry["rank"]: entry["token_str"] for entry in value.get("special_tokens") or ()}
    names = [special.get(rank, f"<SPECIAL_{rank}>") for rank in range(first)]
    vocabulary |= {name: rank for rank, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(value["config"]["pattern"]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(f"{names[1]} $A", special_tokens=[(names[1], 1)])
    return tokenizer


def _merges(vocabulary: dict[str, int], order: dict[str, float]) -> list[tuple[str, str]]:
    """Return all merges of two pieces to a third, in the order of that one."""
    results: list[tuple[float, int, int, str, str]] = []
    for piece, rank in order.items():
        for at in range(1, len(piece)):
            prefix = piece[:at]
            right = piece[at:]
            if prefix in vocabulary and right in vocabulary:
                results.append((rank, vocabulary[prefix], vocabulary[right], prefix, right))
    return [(prefix, right) for *_, prefix, right in sorted(results)]


def _pieces(data: bytes) -> Iterator[tuple[str, float, int]]:
    """Yield text, score and type of the pieces of a SentencePiece model, a protocol buffer."""
    import struct

    for number, value in _fields(data):
        if number == 1:
            fields: dict[int, Any] = dict(_fields(value))
            yield fields[1].decode(), struct.unpack("<f", fields.get(2, bytes(4)))[0], fields.get(3, 1)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the fields of a message; bytes, or the number of a varint."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at = at + 1
            value = value | (byte & 0x7F) << shift
            shift = shift + 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        length = {1: 8, 5: 4}[kind] if kind != 2 else varint()
        yield key >> 3, data[at : at + length]
        at += length


def _byte_characters() -> list[str]:
    """Return the character that a byte-level vocabulary writes for each byte, as GPT-2 has them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare_codes = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(spare_codes)) for byte in range(256)]
