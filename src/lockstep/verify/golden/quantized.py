"""The reference of quantised weights, and their drift.

Needs torch and transformers.

In: a checkpoint, its weights as integers with scales, and what the checkpoint itself says (the reference). Out: what
transformers says on the same weights, dequantised, in float32: the reference that engines are held against; and how far
that is from the checkpoint. Each weight is first held against the checkpoint's: it must lie within half a step of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.dtypes import ROW
from lockstep.artifacts.quantized import data_name, quantized_names, scales_name
from lockstep.artifacts.reference import ReferenceManifest
from lockstep.errors import CheckError, InputError
from lockstep.export.torch_model import cut_config, float32_tensor, is_within, load_tensors
from lockstep.verify.golden.drift import drift_of, logits_along, perplexity
from lockstep.verify.golden.logits_file import read_logits
from lockstep.verify.golden.reference import (
    answer,
    load_checkpoint,
    load_tokenizer,
    logits_beside,
    save_reference,
    tokens_of,
)
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.verify.rounded_activations import round_activations
from lockstep.verify.rounded_kv_cache import round_kv_cache
from lockstep.weights import Weights, e4m3
from lockstep.weights.groups import unpack
from lockstep.weights.source import Source, open_source

_TINY = float(np.finfo(np.float32).tiny)
_ROUNDING = 1e-3  # of a step: what float32 arithmetic adds to half of one
_WITHIN = {False: "within half a step of", True: "equal to"}


def make_quantized_reference(
    checkpoint_json: Path,
    weights_json: Path,
    reference_json: Path,
    layers: int | str,
    golden: GoldenTerms,
    drift_text: str,
    out: Path,
    drift_out: Path,
) -> Path:
    """Write the reference of the quantised weights, and the drift.

    The reference goes to `out`, which is returned, its logits beside it, and the drift to `drift_out`. reference_json:
    of the checkpoint and the same layers. drift_text: whose perplexity is measured; empty for the prompts, one after
    another.

    Same inputs, same bytes. Raises CheckError for a weight that is off the checkpoint's by more than its rounding,
    InputError for inputs that do not fit together.
    """
    logits_beside(Path(out))
    manifest = CheckpointManifest.load(checkpoint_json)
    weights, folder = Weights.open(weights_json), manifest.folder_of(Path(checkpoint_json))
    reference = ReferenceManifest.load(reference_json)
    if reference.layers != layers:
        raise InputError(f"{reference_json}: layers: expected {layers}, found {reference.layers}; make it again")
    if weights.group_size is None:
        raise InputError(f"{weights_json}: expected quantised weights, found {weights.precision}; convert again")
    off = _check_weights(open_source(Path(checkpoint_json)), weights)
    tokenizer, config = load_tokenizer(folder), manifest.config
    model = load_checkpoint(Path(checkpoint_json), layers)
    rows = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
    text = tokens_of(tokenizer, drift_text or " ".join(golden.prompts), rows)
    full_perplexity, count = perplexity(model, text)
    answers = [(prompt.prompt_ids, prompt.tokens) for prompt in reference.prompts]
    if golden.kv_cache_dtype is None:
        expected = _own_logits(reference, Path(reference_json).with_name(reference.logits.file))
    else:  # the reference's are of a rounded cache
        expected = logits_along(model, answers)
    del model
    model = dequantized(config, weights, layers)
    if golden.kv_cache_dtype is not None:
        round_kv_cache(model)
    made = answer(model, tokenizer, folder, config, golden.prompts, golden.max_new_tokens, golden.long_prompt)
    own_perplexity, _ = perplexity(model, text)
    drift_of(
        expected,
        logits_along(model, answers),
        (own_perplexity, full_perplexity),
        count,
        layers,
        weights.precision,
        weights.group_size,
        off,
        golden.kv_cache_dtype,
    ).save(drift_out)
    return save_reference(made, layers, golden.max_new_tokens, Path(out), drift_out)


def dequantized(config: Mapping[str, Any], weights: Weights, layers: int | str) -> PreTrainedModel:
    """Load a model's first layers with quantised weights' numbers, float32, activations rounded as they are."""
    tensors = {name: float32_tensor(array) for name, array in weights.dequantized() if is_within(name, layers)}
    model = load_tensors(tensors, cut_config(config, layers), "eager", str(weights.manifest_path))
    round_activations(model, weights, layers)
    return model


def _check_weights(source: Source, weights: Weights) -> float:
    """Return the largest error of a weight, in steps. Raises CheckError where it is no rounding."""
    worst = 0.0
    for name in quantized_names(dict.fromkeys(weights.names())):
        error, allowed = _steps(source, weights, name)
        exact = source.stays_packed(name) or (
            weights.group_size == ROW and source.keeps_codes(name)
        )  # quantised by whoever made the checkpoint: there is nothing to round
        wrong = np.argwhere(~(error <= (0 if exact else allowed + _ROUNDING)))
        if len(wrong):
            first = tuple(map(int, wrong[0]))
            raise CheckError(
                f"{weights.manifest_path}: tensor {name!r}: expected numbers {_WITHIN[exact]} the checkpoint's, "
                f"found {len(wrong)} that are not, the first at {list(first)}, off by {error[first]:.3g} "
                f"steps; convert the checkpoint again"
            )
        worst = max(worst, float(error.max(initial=0)))
    return worst


def _steps(source: Source, weights: Weights, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the error of each number, in steps of its group, and what is allowed: a whole step at the end."""
    place, group_size = source.tensors[name], weights.group_size
    assert group_size is not None  # checked before
    exact = source.array(name).astype(np.float64)
    if weights.quantization is not None and weights.quantization.mxfp4:
        return np.where(weights.dequantize(name) == exact, 0.0, np.inf), np.zeros(exact.shape)
    data, scales = weights[data_name(name)], weights[scales_name(name)].astype(np.float64)
    error = np.abs(weights.dequantize(name) - exact)
    if group_size == ROW:
        step, last, none = e4m3.steps(data.view(np.uint8)) * scales[:, None], np.zeros((), bool), 448 * _TINY
    else:
        step, none = np.repeat(np.abs(scales), group_size, axis=1), _TINY
        last = unpack(data, group_size).reshape(place.shape) == (255 if data.shape[-1] == group_size else 15)
    # A step of zero is that of a group or row of zeros, or of nearly that.
    in_steps = np.divide(error, step, out=np.where(error > none, np.inf, 0.0), where=step > 0)
    return in_steps, np.where(last, 1.0, 0.5)


def _own_logits(reference: ReferenceManifest, file: Path) -> np.ndarray:
    """Return the logits of a reference's own answers, which lie in `file`: [tokens, vocab_size]."""
    logits = read_logits(file, reference.logits.sha256)
    return np.concatenate([logits[f"logits.{number}"] for number in range(len(reference.prompts))])
