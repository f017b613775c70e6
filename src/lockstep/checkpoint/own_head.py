"""Heads that the config says are the embedding: one of other numbers is refused, one without the embedding is it.

In: the config, names and places of a checkpoint's tensors. transformers takes such a head from the file, whatever the
config says; graphs are made from the config alone, and take the embedding.
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

_KEY = "tie_word_embeddings"
_PIECE = 16 << 20  # bytes that are compared at a time
# How an embedding is called beside a list of layers and a head of these names.
_EMBEDDINGS = {("layers", "lm_head"): "embed_tokens", ("h", "lm_head"): "wte", ("layers", "embed_out"): "embed_in"}
_LAYER = re.compile(r"((?:.*\.)?)(layers|h)\.\d+\.")


def embedding_of_head(folder: Path, config: Mapping[str, Any], found: CheckpointTensors) -> CheckpointTensors:
    """Return a checkpoint's tensors; a head without the embedding that it is tied to is named as that."""
    named = [name for name in found.tensors if not OTHER_INPUTS.search(name)]
    heads = [match for name in named if (match := HEAD.fullmatch(name))]
    layer = next((match for name in named if (match := _LAYER.match(name))), None)
    tied = model_config.ties_head(config)
    if len(heads) != 1 or layer is None or tied is False or any(map(EMBEDDING.fullmatch, named)):
        return found
    name = _EMBEDDINGS.get((layer[2], heads[0][2]))
    if name is None or not (tied or ties_head(folder)):
        return found
    head = heads[0][0]
    embedding = f"{layer[1]}{name}.weight"
    return replace(
        found, tensors={embedding if other == head else other: place for other, place in found.tensors.items()}
    )


def check_own_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorPlace]) -> None:
    """Hold a head that lies in the checkpoint to the embedding, where the config ties them.

    Raises InputError where their numbers differ.
    """
    named = {name: place for name, place in tensors.items() if not OTHER_INPUTS.search(name)}
    heads = [name for name in named if HEAD.fullmatch(name)]
    embeddings = [name for name in named if EMBEDDING.fullmatch(name)]
    tied = model_config.ties_head(config)
    if len(heads) != 1 or len(embeddings) != 1 or tied is False:
        return
    head = named[heads[0]]
    embedding = named[embeddings[0]]
    if _is_copy(folder, head, embedding):
        return
    # Where it does not stand in the config, its class in transformers says it.
    if tied is None and not ties_head(folder):
        return
    raise InputError(
        f"{folder / head.file}: tensor {shorten(heads[0])}: expected the numbers of {shorten(embeddings[0])}, to which "
        f"{_KEY} in config.json ties it, found others; set {_KEY} to false there, and this head is taken"
    )


def _is_copy(folder: Path, one: TensorPlace, other: TensorPlace) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(_pieces(folder, one), _pieces(folder, other), strict=True))


def _pieces(folder: Path, place: TensorPlace) -> Iterator[bytes]:
    with open(folder / place.file, "rb") as file:
        file.seek(place.offset)
        left = place.length
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                return
            yield piece
            left -= len(piece)
