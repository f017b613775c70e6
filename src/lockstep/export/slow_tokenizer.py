"""Make the tokenizer.json of a checkpoint that has none.

    python -m lockstep.export.slow_tokenizer FOLDER

In: a folder with `tokenizer.model` (SentencePiece's pairs of pieces, as Llama 2, Mistral and Gemma have them),
`tekken.json` (Mistral's), or files that transformers reads by itself, such as vocab.json with merges.txt. Out:
tokenizer.json beside them, and a tokenizer_config.json where there is none. transformers takes a tokenizer of the first
two only with packages that are not installed here, and a tokenizer.model without settings beside it as one that puts no
space before a text; its classes that read the files need none.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NoReturn

from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer
from transformers.integrations.mistral.tokenizer import MistralConverter
from transformers.utils import sentencepiece_model_pb2_new

from lockstep.artifacts.files import atomic_path, write_bytes
from lockstep.checkpoint.source_files import present, read_source_json
from lockstep.errors import InputError, guard
from lockstep.export.gguf_tokenizer import sentencepiece_bpe, with_special_tokens

MODEL = "tokenizer.model"
TEKKEN = "tekken.json"
SETTINGS = "tokenizer_config.json"
_proto: Any = sentencepiece_model_pb2_new  # whose classes protobuf makes when it is loaded
_Type = _proto.ModelProto.SentencePiece.Type


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
    made = with_special_tokens(tokenizer, names, settings.get("add_bos_token", True))
    write_bytes(out, tokenizer.to_str(pretty=True).encode())
    if not present(folder / SETTINGS):
        write_bytes(folder / SETTINGS, (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode())
    return out


def _sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, str | None]]:
    """Return the tokenizer of a SentencePiece model, and the names of its special tokens."""
    try:
        model = _proto.ModelProto.FromString(path.read_bytes())
    except DecodeError:
        _refuse(path, "a SentencePiece model", "another file")
    pieces = model.pieces
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    if trainer.model_type != _proto.TrainerSpec.ModelType.BPE or not any(piece.type == _Type.BYTE for piece in pieces):
        _refuse(path, "a SentencePiece model of pairs with bytes for what they lack", "another")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        _refuse(path, "a SentencePiece model that takes a text as it is", "one that rewrites it")
    tokens = [piece.piece for piece in pieces]
    tokenizer = sentencepiece_bpe(tokens, [piece.score for piece in pieces], normalizer.add_dummy_prefix)
    special = [piece.piece for piece in pieces if piece.type in (_Type.UNKNOWN, _Type.CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    own = [piece.piece for piece in pieces if piece.type == _Type.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    ids = {"unk_token": trainer.unk_id, "bos_token": trainer.bos_id, "eos_token": trainer.eos_id}
    return tokenizer, {name: tokens[each] if 0 <= each < len(tokens) else None for name, each in ids.items()}


def _tekken(path: Path) -> tuple[Tokenizer, dict[str, str | None]]:
    """Return the tokenizer of a tekken.json: ranks of bytes, behind a number of special tokens."""
    try:
        tokenizer = MistralConverter(str(path)).converted()
    except (ImportError, KeyError, TypeError, ValueError):  # an older file, whose special tokens stand in code
        _refuse(path, "config, and vocab with rank and token_bytes, and special_tokens", "another file")
    known = tokenizer.get_vocab()
    return tokenizer, {name: token if token in known else None for name, token in _TEKKEN_TOKENS.items()}


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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.export.slow_tokenizer", description="Make tokenizer.json."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="of the checkpoint")
    with guard():
        print(make_tokenizer(parser.parse_args().folder))


if __name__ == "__main__":
    main()
