"""Check that a checkpoint's headers fit its config.json.

In: the config as a mapping, names, dtypes and shapes. Out: nothing, or one line. Only transformers knows a model type's
names and shapes: `export.checkpoint_layout.check_tensors` checks the tensors against those when the model is created,
before anything is traced or loaded.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts.dtypes import FLOAT_DTYPES
from lockstep.artifacts.places import TensorPlace
from lockstep.checkpoint.packed import PackedWeight, unpacked_places
from lockstep.checkpoint.source_files import shorten
from lockstep.checkpoint.tensors import CheckpointTensors
from lockstep.config import model_config
from lockstep.errors import InputError

_LAYER = re.compile(r"(.*?)\.?\b(\d+)\.")  # model.layers.12.mlp.up_proj.weight; h.0.attn of a bare GPT-2
EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")
HEAD = re.compile(r"(.*\.)?(lm_head|embed_out)\.weight")
OTHER_INPUTS = re.compile(r"vision|visual|image|audio|speech|encoder")
_WIDTH_KEYS = re.compile(r"hidden_size|d_model|dim|.*embd|.*embed.*")
# Keys of extra layers at the end that predict further tokens; transformers ignores their tensors.
_EXTRA_LAYER_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


def check_fit(
    folder: Path, config: Mapping[str, Any], checkpoint: CheckpointTensors, packed: Mapping[str, PackedWeight]
) -> None:
    """Check layers, vocabulary and width of the weights against the config.

    packed: weights that are quantised already. Raises InputError where they differ, and for weights that are not
    floating point or empty.
    """
    for name, place in checkpoint.tensors.items():
        if name.endswith(".weight") and name not in packed:
            _check_weight(folder / place.file, name, place)
    _check_layers(folder, config, checkpoint)
    for name, place in unpacked_places(checkpoint.tensors, packed).items():
        if len(place.shape) == 2 and not OTHER_INPUTS.search(name):
            _check_embedding(folder / place.file, config, name, place.shape)


def _check_weight(path: Path, name: str, place: TensorPlace) -> None:
    where = f"{path}: tensor {shorten(name)}"
    if place.dtype not in FLOAT_DTYPES:
        raise InputError(
            f"{where}: expected one of {', '.join(FLOAT_DTYPES)}, found {place.dtype}, which is not supported; use a"
            " checkpoint that is not quantized"
        )
    if 0 in place.shape:
        raise InputError(
            f"{where}: expected numbers, found none in shape {list(place.shape)}; download this file again"
        )


def _check_layers(folder: Path, config: Mapping[str, Any], checkpoint: CheckpointTensors) -> None:
    """Check the layer numbers in tensor names against the depth."""
    layers: dict[str, set[int]] = defaultdict(set)  # {list of layers: its numbers}
    counts: Counter[str] = Counter()  # {list of layers: its tensors}
    for name in checkpoint.tensors:
        match = _LAYER.match(name)
        if match and not OTHER_INPUTS.search(match[1]):
            layers[match[1]].add(int(match[2][:9]))  # names are untrusted, and `int` refuses thousands of digits
            counts[match[1]] += 1
    depth, key = model_config.depth(config)
    assert depth is not None  # checked before
    max_layers = depth
    for extra_key in _EXTRA_LAYER_KEYS:
        extra = model_config.setting(config, (extra_key,))
        if type(extra) is int:
            max_layers += extra
    expected = set(range(depth))
    if not counts or any(expected <= numbers <= set(range(max_layers)) for numbers in layers.values()):
        return
    (layer_list, count), *_ = counts.most_common(1)
    if 2 * count <= counts.total():  # a name with a number need not be a layer's: without a majority nothing is said
        return
    numbers = layers[layer_list]
    missing = sorted(expected - numbers)
    if missing:
        actual = f"{len(numbers & expected)} of them, without layer {missing[0]}"
        remedy = "use the config.json that came with these weights, or download all of them"
    else:
        actual = f"{len(numbers)}, up to layer {max(numbers)}"
        remedy = f"correct {key}; to cut a model, use `layers` of its entry in the config"
    raise InputError(
        f"{folder}: expected {depth} layers ({key} in config.json), found tensors of {actual} ({layer_list}); {remedy}"
    )


def _check_embedding(path: Path, config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> None:
    is_head = HEAD.fullmatch(name)
    if not is_head and not EMBEDDING.fullmatch(name):
        return
    vocabulary = model_config.setting(config, ("vocab_size",))
    where = f"{path}: tensor {shorten(name)}"
    # Embeddings may have extra rows, for padding or images; a head has the vocabulary and nothing else.
    if type(vocabulary) is int and (shape[0] < vocabulary or (is_head and shape[0] != vocabulary)):
        raise InputError(
            f"{where}: expected {vocabulary} rows (vocab_size in config.json), found {shape[0]}; use the config.json"
            " that came with these weights"
        )
    widths = set()
    for section in model_config.parts(config):
        for key, value in section.items():
            if _WIDTH_KEYS.fullmatch(key) and type(value) is int:
                widths.add(value)
    if widths and shape[1] not in widths:
        size = model_config.setting(config, model_config.HIDDEN_KEYS)
        raise InputError(
            f"{where}: expected rows of {size} numbers (hidden_size in config.json), found {shape[1]}; use the"
            " config.json that came with these weights"
        )
