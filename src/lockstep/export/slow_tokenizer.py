"""Make the tokenizer.json of a checkpoint that has none.

    python -m lockstep.export.slow_tokenizer FOLDER

In: a folder with `tokenizer.model` (a SentencePiece BPE, as of Llama 2, Mistral and Gemma), `tekken.json` (Mistral's),
or files that transformers reads itself, such as vocab.json with merges.txt. Out: tokenizer.json, and a
tokenizer_config.json if there is none. transformers itself reads the first two only with packages that are not
installed here, and without settings it takes a tokenizer.model for one that puts no space before a text.
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

SENTENCEPIECE_FILE = "tokenizer.model"
TEKKEN_FILE = "tekken.json"
SETTINGS_FILE = "tokenizer_config.json"
_proto: Any = sentencepiece_model_pb2_new  # its classes exist only after import, so mypy knows none
_PieceType = _proto.ModelProto.SentencePiece.Type


def make_tokenizer(folder: Path) -> Path:
    """Write the tokenizer.json of `folder`; return its path. Raises InputError where none can be made."""
    out = folder / "tokenizer.json"
    if present(out):
        raise InputError(f"{out}: expected none, found one; use it as it is")
    settings_file = folder / SETTINGS_FILE
    settings = read_source_json(settings_file) if present(settings_file) else {}
    if present(folder / SENTENCEPIECE_FILE):
        tokenizer, special_tokens = _load_sentencepiece(folder / SENTENCEPIECE_FILE)
    elif present(folder / TEKKEN_FILE):
        tokenizer, special_tokens = _load_tekken(folder / TEKKEN_FILE)
    else:
        return _convert_with_transformers(folder, out)
    new_settings = with_special_tokens(tokenizer, special_tokens, settings.get("add_bos_token", True))
    write_bytes(out, tokenizer.to_str(pretty=True).encode())
    if not present(settings_file):
        write_bytes(settings_file, (json.dumps(new_settings, indent=2, ensure_ascii=False) + "\n").encode())
    return out


def _load_sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, str | None]]:
    """Return the tokenizer of a SentencePiece model, and its special tokens by the names of transformers."""
    try:
        model = _proto.ModelProto.FromString(path.read_bytes())
    except DecodeError:
        _refuse(path, "a SentencePiece model", "another file")
    pieces = model.pieces
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    has_bytes = any(piece.type == _PieceType.BYTE for piece in pieces)
    if trainer.model_type != _proto.TrainerSpec.ModelType.BPE or not has_bytes:
        _refuse(path, "a SentencePiece BPE model with tokens for bytes", "another")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        _refuse(path, "a SentencePiece model that takes a text as it is", "one that rewrites it")
    tokens = [piece.piece for piece in pieces]
    tokenizer = sentencepiece_bpe(tokens, [piece.score for piece in pieces], normalizer.add_dummy_prefix)
    special = [piece.piece for piece in pieces if piece.type in (_PieceType.UNKNOWN, _PieceType.CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    user_defined = [piece.piece for piece in pieces if piece.type == _PieceType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in user_defined])
    ids = {"unk_token": trainer.unk_id, "bos_token": trainer.bos_id, "eos_token": trainer.eos_id}
    special_tokens = dict.fromkeys(ids)
    special_tokens |= {name: tokens[id] for name, id in ids.items() if 0 <= id < len(tokens)}
    return tokenizer, special_tokens


def _load_tekken(path: Path) -> tuple[Tokenizer, dict[str, str | None]]:
    """Return the tokenizer of a tekken.json: special tokens, then byte sequences by rank."""
    try:
        tokenizer = MistralConverter(str(path)).converted()
    except (ImportError, KeyError, TypeError, ValueError):  # an older file, whose special tokens are only in code
        _refuse(path, "config, and vocab with rank and token_bytes, and special_tokens", "another file")
    special_tokens: dict[str, str | None] = dict.fromkeys(_TEKKEN_TOKENS)
    special_tokens |= {name: token for name, token in _TEKKEN_TOKENS.items() if token in tokenizer.get_vocab()}
    return tokenizer, special_tokens


_TEKKEN_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def _convert_with_transformers(folder: Path, out: Path) -> Path:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many classes
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{folder}: expected {SENTENCEPIECE_FILE}, {TEKKEN_FILE} or files that transformers makes a tokenizer of, "
            f"found {reason}; download the tokenizer's files"
        ) from None
    with atomic_path(out) as temporary:
        tokenizer.backend_tokenizer.save(str(temporary))
    if not present(folder / SETTINGS_FILE):
        tokenizer.save_pretrained(folder)
    return out


def _refuse(path: Path, expected: str, actual: str) -> NoReturn:
    raise InputError(
        f"{path}: expected {expected}, found {actual}; download a tokenizer.json, which many models have in another "
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
