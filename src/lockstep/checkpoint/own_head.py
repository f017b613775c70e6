"""Check heads that the config ties to the embedding.

In: the config, names and places of a checkpoint's tensors. A tied head with other numbers than the embedding is
rejected; one without an embedding is used as the embedding. transformers reads such a head from the file, whatever the
config says; graphs depend on the config alone, and read the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.places import TensorPlace
from lockstep.checkpoint.fit import EMBEDDING, HEAD, OTHER_INPUTS
from lockstep.checkpoint.source_files import shorten
from lockstep.checkpoint.tensors import CheckpointTensors
from lockstep.checkpoint.tokenizer_file import ties_head
from lockstep.config import model_config
from lockstep.errors import InputError

_PIECE = 16 << 20  # bytes that are compared at a time
# Names of the embedding, by those of the list of layers and of the head.
_EMBEDDING_NAMES = {("layers", "lm_head"): "embed_tokens", ("h", "lm_head"): "wte", ("layers", "embed_out"): "embed_in"}
_LAYER = re.compile(r"((?:.*\.)?)(layers|h)\.\d+\.")


def embedding_of_head(folder: Path, config: Mapping[str, Any], checkpoint: CheckpointTensors) -> CheckpointTensors:
    """Return a checkpoint's tensors; a tied head without the embedding gets the embedding's name."""
    # The embedding's name is derived from those of the layers and of the head, as the model's class would spell it.
    names = [name for name in checkpoint.tensors if not OTHER_INPUTS.search(name)]
    heads = list(filter(None, map(HEAD.fullmatch, names)))
    layer = next(filter(None, map(_LAYER.match, names)), None)
    is_tied = model_config.ties_head(config)
    if len(heads) != 1 or layer is None or is_tied is False or any(map(EMBEDDING.fullmatch, names)):
        return checkpoint
    embedding_name = _EMBEDDING_NAMES.get((layer[2], heads[0][2]))
    if embedding_name is None or not (is_tied or ties_head(folder)):
        return checkpoint
    head = heads[0][0]
    embedding = f"{layer[1]}{embedding_name}.weight"
    tensors = dict(checkpoint.tensors)
    tensors[embedding] = tensors.pop(head)
    return replace(checkpoint, tensors=tensors)


def check_own_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorPlace]) -> None:
    """Check that lm_head equals the embedding, where the checkpoint has both and the config ties them.

    Raises InputError where their numbers differ.
    """
    candidates = {name: place for name, place in tensors.items() if not OTHER_INPUTS.search(name)}
    heads = [name for name in candidates if HEAD.fullmatch(name)]
    embeddings = [name for name in candidates if EMBEDDING.fullmatch(name)]
    is_tied = model_config.ties_head(config)
    if len(heads) != 1 or len(embeddings) != 1 or is_tied is False:
        return
    head = candidates[heads[0]]
    embedding = candidates[embeddings[0]]
    if _is_copy(folder, head, embedding):
        return
    # If the config does not say, its class in transformers has a default. Asked last: it starts a process.
    if is_tied is None and not ties_head(folder):
        return
    raise InputError(
        f"{folder / head.file}: tensor {shorten(heads[0])}: expected the numbers of {shorten(embeddings[0])}, to which "
        "tie_word_embeddings in config.json ties it, found others; set tie_word_embeddings to false there, and this "
        "head is taken"
    )


def _is_copy(folder: Path, head: TensorPlace, embedding: TensorPlace) -> bool:
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    pieces = zip(_pieces(folder, head), _pieces(folder, embedding), strict=True)
    return all(head_piece == embedding_piece for head_piece, embedding_piece in pieces)


def _pieces(folder: Path, place: TensorPlace) -> Iterator[bytes]:
    with open(folder / place.file, "rb") as file:
        file.seek(place.offset)
        remaining = place.length
        while remaining:
            piece = file.read(min(remaining, _PIECE))
            if not piece:
                return
            yield piece
            remaining -= len(piece)
