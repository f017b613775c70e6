"""The reference with adapters: answers of Hugging Face transformers with each.

Needs torch and transformers.

In: a checkpoint's manifest and that of its adapters, a layer count, prompts; where weights are quantised, these. Out:
as of the reference (`verify.golden.reference`), for each adapter, and for none.

An adapter is what PEFT defines as LoRA: a linear layer gives y + scale * (x A^T) B^T, computed in float32 beside the
layer, not merged into its weights. A test holds this against PEFT's own numbers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from lockstep.artifacts.checkpoint import RESOLVE_AGAIN, CheckpointManifest
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import check_stored
from lockstep.verify.golden.quantized import dequantized
from lockstep.verify.golden.reference import (
    Answer,
    Reference,
    answer,
    load_checkpoint,
    load_tokenizer,
    logits_beside,
    save_reference,
)
from lockstep.verify.golden.terms import AdaptedTerms
from lockstep.verify.rounded_kv_cache import round_kv_cache
from lockstep.weights import Weights
from lockstep.weights.adapters import LoadedAdapter, open_adapters


def make_adapted_reference(
    checkpoint_json: Path,
    adapters_json: Path,
    layers: int | str,
    golden: AdaptedTerms,
    out: Path,
    weights_json: Path | None = None,
) -> Path:
    """Write the reference of a model with each adapter, and with none, to `out`.

    layers: the model's first so many, or "all". The logits lie beside `out`, which is returned. weights_json: quantised
    weights of the checkpoint, which are computed with, dequantised, in its place.

    Same inputs, same bytes. Raises InputError as `make_reference` does, and for an adapter of modules that the model
    does not have.
    """
    checkpoint_json, out = Path(checkpoint_json), Path(out)
    logits_beside(out)
    manifest, adapters = CheckpointManifest.load(checkpoint_json), open_adapters(adapters_json)
    folder = manifest.folder_of(checkpoint_json)
    check_stored(manifest.files, folder, RESOLVE_AGAIN)
    if weights_json is None:
        model = load_checkpoint(checkpoint_json, layers)
    else:
        model = dequantized(manifest.config, Weights.open(weights_json), layers)
    if golden.kv_cache_dtype is not None:
        round_kv_cache(model)
    tokenizer = load_tokenizer(folder)
    answers: list[Answer] = []
    ends: tuple[int, ...] = ()
    for name, prompts in golden.prompts.items():
        adapter = adapters[name] if name else None
        hooks = attach(model, adapter, layers) if adapter else []
        reference = answer(model, tokenizer, folder, manifest.config, prompts, golden.max_new_tokens, 0)
        for hook in hooks:
            hook.remove()
        ends = reference.eos_token_ids
        answers += [replace(each, adapter=name) for each in reference.answers]
    digests = {name: adapters[name].sha256 for name in golden.prompts if name}
    return save_reference(Reference(tuple(answers), ends, None), layers, golden.max_new_tokens, out, adapters=digests)


def attach(model: PreTrainedModel, adapter: LoadedAdapter, layers: int | str = "all") -> list[RemovableHandle]:
    """Have a model computed with an adapter until the returned hooks are removed.

    layers: how many of the base's the model has; modules of others are left out. Raises InputError, of all layers, for
    a module that the model does not have.
    """
    modules, hooks = dict(model.named_modules()), []
    for name, (a, b) in adapter.modules.items():
        if name not in modules:
            if layers == "all":
                raise InputError(
                    f"adapter {adapter.name!r} ({adapter.where}): expected modules of the model, found {name}"
                )
            continue
        first, second = (torch.from_numpy(array.astype("float32")) for array in (a, b))

        def add(
            module: torch.nn.Module,
            inputs: tuple[torch.Tensor, ...],
            output: torch.Tensor,
            a: torch.Tensor = first,
            b: torch.Tensor = second,
            scale: float = adapter.scale_of(name),
        ) -> torch.Tensor:
            return output + (inputs[0] @ a.T @ b.T) * scale

        hooks.append(modules[name].register_forward_hook(add))
    return hooks
