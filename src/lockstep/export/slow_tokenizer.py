"""Make the tokenizer.json of a checkpoint that has none.

    python -m lockstep.export.slow_tokenizer FOLDER

In: a folder with `tokenizer.model` (SentencePiece's pairs of pieces, as Llama 2, Mistral and Gemma have them),
`tekken.json` (Mistral's), or files that transformers reads by itself, such as vocab.json with merges.txt. Out:
tokenizer.json beside them, and a tokenizer_config.json where there is none. transformers reads the first two only with
packages that are not installed here, and a tokenizer.model without settings beside it as one that puts no space before
a text.
"""

from __future__ import annotations

import argparse
import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import generate_merges

from lockstep.artifacts.files import atomic_path, write_bytes
from lockstep.checkpoint.source_files import present, read_source_json
from lockstep.errors import InputError, guard
from lockstep.export.gguf_tokenizer import sentencepiece_bpe

MODEL, TEKKEN, SETTINGS = "tokenizer.model", "tekken.json", "tokenizer_config.json"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of a piece (sentencepiece_model.proto)
_BPE = 2
# Of tekken files that do not name their first tokens.
_TEKKEN_NAMES = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()


def make_tokenizer(folder: Path) -> Path:
    """Write the tokenizer.json of `folder`; return its path. Raises InputError where none can be made."""
    out = folder / "tokenizer.json"
    if present(out):
        raise InputError(f"{out}: expected none, found one; use it as it is")
    settings = read_source_json(folder / SETTINGS) if present(folder / SETTINGS) else {}
    if present(folder / MODEL):
        tokenizer, names = _sentencepiece(folder / MODEL)
    elif present(folder / TEKKEN):
        tokenizer, names = _tekken(folder / TEKKEN)
    else:
        return _by_transformers(folder, out)
    bos = names["bos_token"]
    if bos is not None and settings.get("add_bos_token", True):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    write_bytes(out, tokenizer.to_str(pretty=True).encode())
    if not present(folder / SETTINGS):
        known = {name: token for name, token in names.items() if token is not None}
        made = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **known}
        write_bytes(folder / SETTINGS, (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode())
    return out


def _sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, str | None]]:
    """Return the tokenizer of a SentencePiece model, and the names of its special tokens."""
    try:
        fields = list(_fields(path.read_bytes()))
        entries = [dict(_fields(value)) for number, value in fields if number == 1]
        pieces = [(entry[1].decode(), _float(entry.get(2)), entry.get(3, 1)) for entry in entries]
        trainer, normalizer = (dict(_fields(dict(fields).get(number, b""))) for number in (2, 3))
        if not pieces or trainer.get(3, 1) != _BPE or not any(kind == _BYTE for *_, kind in pieces):
            _refuse(path, "a SentencePiece model of pairs with bytes for what they lack", "another")
        if normalizer.get(2) or normalizer.get(4, 1):
            _refuse(path, "a SentencePiece model that takes a text as it is", "one that rewrites it")
    except (KeyError, IndexError, UnicodeDecodeError, AttributeError, TypeError, struct.error):
        _refuse(path, "a SentencePiece model", "another file")
    tokens = [piece for piece, *_ in pieces]
    scores = [score for _, score, _ in pieces]
    tokenizer = sentencepiece_bpe(tokens, scores, bool(normalizer.get(3, 1)))
    special = [piece for piece, _, kind in pieces if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    own = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    ids = {"unk_token": trainer.get(40, 0), "bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2)}
    return tokenizer, {name: tokens[each] if each < len(tokens) else None for name, each in ids.items()}


def _tekken(path: Path) -> tuple[Tokenizer, dict[str, str | None]]:
    """Return the tokenizer of a tekken.json: ranks of bytes, behind a number of special tokens."""
    value = read_source_json(path)
    try:
        settings = value["config"]
        first, size = settings["default_num_special_tokens"], settings["default_vocab_size"]
        named = {each["rank"]: each["token_str"] for each in value.get("special_tokens") or ()}
        named = named or dict(enumerate(_TEKKEN_NAMES))
        special = [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(first)]
        characters = _byte_characters()
        ranked = sorted(value["vocab"], key=lambda each: each["rank"])[: size - first]
        texts = ["".join(characters[byte] for byte in base64.b64decode(each["token_bytes"])) for each in ranked]
        split = pre_tokenizers.Split(Regex(settings["pattern"]), "isolated")
    except (KeyError, TypeError, ValueError):
        _refuse(path, "config, and vocab with rank and token_bytes", "another file")
    words = {text: rank for rank, text in enumerate(texts)}
    vocabulary = {
        **{text: first + rank for text, rank in words.items()},
        **{text: at for at, text in enumerate(special)},
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, generate_merges(words), ignore_merges=True))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return tokenizer, {name: token if token in special else None for name, token in _TEKKEN_TOKENS.items()}


_TEKKEN_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def _by_transformers(folder: Path, out: Path) -> Path:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of whatever class it takes
        found = " ".join(str(error).split())[:300]
        raise InputError(
            f"{folder}: expected {MODEL}, {TEKKEN} or files that transformers makes a tokenizer of, found {found}; "
            f"download the tokenizer's files"
        ) from None
    with atomic_path(out) as temporary:
        tokenizer.backend_tokenizer.save(str(temporary))
    if not present(folder / SETTINGS):
        tokenizer.save_pretrained(folder)
    return out


def _refuse(path: Path, expected: str, found: str) -> NoReturn:
    raise InputError(
        f"{path}: expected {expected}, found {found}; download a tokenizer.json, which many models have in another "
        f"repository"
    )


def _float(data: bytes | None) -> float:
    return struct.unpack("<f", data)[0] if data else 0.0


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of a protocol buffer's fields. Raises IndexError and KeyError for none."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while data[at] >= 0x80:
            value, shift, at = value | (data[at] & 0x7F) << shift, shift + 7, at + 1
        at += 1
        return value | data[at - 1] << shift

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        length = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        at += length
        if at > len(data):
            raise IndexError
        yield key >> 3, data[at - length : at]


def _byte_characters() -> list[str]:
    """Return the character by which a byte-level vocabulary writes each byte."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.export.slow_tokenizer", description="Make tokenizer.json."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="of the checkpoint")
    with guard():
        print(make_tokenizer(parser.parse_args().folder))


if __name__ == "__main__":
    main()
