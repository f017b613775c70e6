"""The reference: answers of Hugging Face transformers to the golden prompts.

Needs torch and transformers.

In: a checkpoint's manifest, a layer count, prompts; quantised weights or adapters of it. Out: prompt ids, greedily
decoded tokens, and the logits of every step, computed in float32 with eager attention and a KV cache. One reference
serves all precisions and backends of a model and layer count. Quantised weights have their own: transformers on the
same weights, dequantised.

After the prompts of the config comes a long one, of tokens from a hash, up to the limits: its logits are kept on both
sides of each length at which a KV cache, a window or a RoPE setting has an edge.

All logits come with the error of transformers' own fp16 (`verify.noise`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from safetensors.numpy import save
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.artifacts.checkpoint import RESOLVE_AGAIN, CheckpointManifest
from lockstep.artifacts.files import sha256_file, write_bytes
from lockstep.artifacts.places import FileEntry
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.reference import LongPrompt, ReferenceManifest, ReferencePrompt
from lockstep.checkpoint.stops import stop_ids
from lockstep.errors import InputError
from lockstep.export.quiet import quiet
from lockstep.manifests.digest_cache import check_stored
from lockstep.manifests.own_files import replacing, stale_files
from lockstep.onnx_tools.judge import max_abs_error
from lockstep.progress import steps
from lockstep.verify.boundaries import both_sides, config_lengths
from lockstep.verify.golden.model import adapted, load_checkpoint, load_dequantized
from lockstep.verify.golden.quantized import weights_error
from lockstep.verify.golden.teacher_forced import logit_noise, logits_after, logits_along, perplexity, run_after
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.verify.golden.text import new_text
from lockstep.verify.rounded import round_kv_cache
from lockstep.weights import Weights
from lockstep.weights.adapters import LoadedAdapter, open_adapters
from lockstep.weights.source import open_source

# The long prompt's logits that are stored besides those at edges: rows, and bytes (a row of 128k tokens has 0.5 MB).
_MAX_ROWS = 256
_MAX_BYTES = 1 << 25


@dataclass(frozen=True)
class Reference:
    """A model's answers: the parts of the manifest, and the arrays of its file."""

    prompts: tuple[ReferencePrompt, ...]
    eos_token_ids: tuple[int, ...]
    long: LongPrompt | None
    arrays: Mapping[str, np.ndarray]


def make_reference(
    checkpoint_json: Path,
    layers: int | str,
    golden: GoldenTerms,
    out: Path,
    weights_json: Path | None = None,
    adapters_json: Path | None = None,
    perplexity_text: str = "",
) -> Path:
    """Write the reference of a model to `out`, and its logits; return `out`. Same inputs, same bytes.

    layers: how many of the model's first ones, or "all". weights_json: quantised weights of the checkpoint, dequantised
    to compute with. adapters_json: those that `golden` names. Of quantised weights or a rounded KV cache the
    quantization error is measured too, without adapters; perplexity_text: whose perplexity it has, empty for the
    prompts, one after another.

    Raises CheckError for a weight that is off the checkpoint's by more than its rounding, InputError for inputs that do
    not fit together, and for an adapter of modules that the model does not have.
    """
    checkpoint_json = Path(checkpoint_json)
    out = Path(out)
    logits_file = out.with_suffix(".safetensors")
    error_file = out.with_suffix(".quantization_error.json")
    stale_files(out, (logits_file.name,))
    manifest = CheckpointManifest.load(checkpoint_json)
    folder = manifest.folder_of(checkpoint_json)
    config = manifest.config
    check_stored(manifest.files, folder, RESOLVE_AGAIN)
    weights = None
    if weights_json:
        weights = Weights.open(weights_json)
    adapters = open_adapters(adapters_json) if adapters_json else {}
    # Not with adapters: the reference without them has measured it.
    has_quantization_error = (weights is not None or golden.kv_cache_dtype is not None) and not golden.adapted
    max_weight_error = 0.0
    if weights and has_quantization_error:
        max_weight_error = weights_error(open_source(checkpoint_json), weights)
    if weights:
        model = load_dequantized(config, weights, layers)
    else:
        model = load_checkpoint(checkpoint_json, layers)
    tokenizer = load_tokenizer(folder)
    hook = round_kv_cache(model) if golden.kv_cache_dtype else None
    reference = answer(model, tokenizer, folder, config, golden, adapters, layers)
    if has_quantization_error:
        rows = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
        text = tokens_of(tokenizer, perplexity_text or " ".join(golden.prompts), rows)
        quantized_perplexity, num_predicted = perplexity(model, text)
        if hook:
            hook.remove()
        if weights:
            del model  # before another one is loaded
            model = load_checkpoint(checkpoint_json, layers)
        exact = logits_along(model, [(prompt.prompt_ids, prompt.tokens) for prompt in reference.prompts])
        logits = np.concatenate([reference.arrays[f"logits.{i}"] for i in range(len(reference.prompts))])
        QuantizationError(
            layers=layers,
            precision=weights.precision if weights else "fp32",
            group_size=(weights and weights.group_size) or 0,
            kv_cache_dtype=golden.kv_cache_dtype,
            max_weight_error=max_weight_error,
            max_logit_error=max_abs_error(exact, logits),
            rms_logit_error=_rms(logits - exact),
            rms_logit=_rms(exact),
            tokens=len(exact),
            tokens_differing=int((logits.argmax(-1) != exact.argmax(-1)).sum()),
            perplexity_tokens=num_predicted,
            perplexity=quantized_perplexity,
            full_perplexity=perplexity(model, text)[0],
        ).save(error_file)
    quantization_error = None
    if has_quantization_error:
        quantization_error = FileEntry(error_file.name, sha256_file(error_file))
    with replacing(out, (logits_file.name,)):
        write_bytes(logits_file, save(dict(reference.arrays)))
        ReferenceManifest(
            layers=layers,
            max_new_tokens=golden.max_new_tokens,
            eos_token_ids=reference.eos_token_ids,
            logits=FileEntry(logits_file.name, sha256_file(logits_file)),
            prompts=reference.prompts,
            long=reference.long,
            quantization_error=quantization_error,
            adapters={name: adapters[name].sha256 for name in golden.adapted if name},
        ).save(out)
    return out


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: Mapping[str, Any],
    golden: GoldenTerms,
    adapters: Mapping[str, LoadedAdapter] = MappingProxyType({}),
    layers: int | str = "all",
) -> Reference:
    """Return a model's answers to the prompts. config: of all layers. Raises InputError for one that is too long."""

    def decode(ids: list[int]) -> str:
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cast(str, text)  # of one sequence; of several it is a list

    rows = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
    ends = tuple(stop_ids(folder, config, cast("int | None", tokenizer.eos_token_id)))
    text_config = model.config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    prompts: list[ReferencePrompt] = []
    arrays: dict[str, np.ndarray] = {}
    prompts_by_adapter: Mapping[Any, Sequence[str]] = golden.adapted or {None: golden.prompts}
    for name, texts in prompts_by_adapter.items():
        with adapted(model, adapters.get(name), layers):
            for text in texts:
                ids = tokens_of(tokenizer, text, rows)
                if limit is not None and len(ids) + golden.max_new_tokens > limit:
                    raise InputError(
                        f"golden prompt {text[:40]!r}: expected prompt and answer within {limit} tokens "
                        f"(max_position_embeddings), found {len(ids)} + {golden.max_new_tokens}; shorten the prompt or "
                        "max_new_tokens"
                    )
                tokens, logits, _, noise = follow(model, ids, {len(ids)}, golden.max_new_tokens, ends)
                arrays |= {f"logits.{len(prompts)}": logits, f"noise.{len(prompts)}": noise}
                new = new_text(decode, ids, tokens)
                prompts.append(ReferencePrompt(text, ids, tokens, new, name))
    if not golden.long_prompt:
        return Reference(tuple(prompts), ends, None, arrays)
    if limit is not None and golden.long_prompt + golden.max_new_tokens > limit:
        raise InputError(
            f"golden.long_prompt: expected prompt and answer within {limit} tokens (max_position_embeddings), "
            f"found {golden.long_prompt} + {golden.max_new_tokens}; lower limits.max_seq_len or golden.long_prompt"
        )
    long, long_arrays = _long(model, text_config.vocab_size, golden, config)
    return Reference(tuple(prompts), ends, long, arrays | long_arrays)


def _long(
    model: PreTrainedModel, vocab_size: int, golden: GoldenTerms, config: Mapping[str, Any]
) -> tuple[LongPrompt, dict[str, np.ndarray]]:
    """Decode after a long prompt, also past end-of-sequence tokens; keep logits on both sides of edges, and between.

    Its tokens depend on their number and the size of the vocabulary alone: any model has such a prompt.
    """
    count = golden.long_prompt
    prompt_ids = tuple(
        int.from_bytes(hashlib.sha256(f"long prompt {i}".encode()).digest()[:8], "big") % vocab_size
        for i in range(count)
    )
    near = both_sides(count + golden.max_new_tokens, config_lengths(config))
    edges = sorted({*(length for length in near if length < count), count})
    rows = min(count, _MAX_ROWS, max(1, _MAX_BYTES // (4 * vocab_size)))
    counts = sorted({*edges, *(count * (row + 1) // rows for row in range(rows))})
    tokens, logits, edge_logits, noise = follow(model, prompt_ids, counts, golden.max_new_tokens, ())
    arrays = {
        "long.prompt": np.stack([edge_logits[length] for length in counts]),
        "long.logits": logits,
        # The row after the whole prompt is stored with both.
        "long.noise": np.concatenate([noise[: len(counts)], noise[len(counts) - 1 :]]),
    }
    return LongPrompt(prompt_ids, tuple(edges), tuple(counts), tokens), arrays


def follow(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    counts: Collection[int],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
) -> tuple[tuple[int, ...], np.ndarray, dict[int, np.ndarray], np.ndarray]:
    """Decode greedily until an end-of-sequence token, which is kept.

    counts: numbers of the prompt's tokens after which logits are kept, all of them included. Returns the tokens, the
    logits [steps, vocab_size] float32 that they were chosen from, {count: logits after `count` tokens}, and the noise
    of all these rows [rows, 2].
    """
    logits_by_count, cache = logits_after(model, prompt_ids, counts)
    rows = [logits_by_count[len(prompt_ids)]]
    tokens = [int(rows[-1].argmax())]
    with torch.no_grad():
        for _ in steps(range(max_new_tokens - 1), "reference: answer", "tokens"):
            if tokens[-1] in eos_token_ids:
                break
            (row,), cache = run_after(model, tokens[-1:], cache)
            rows.append(row.float().numpy().copy())
            tokens.append(int(rows[-1].argmax()))
    ids = [*prompt_ids, *tokens[:-1]]
    expected = {**logits_by_count, **dict(enumerate(rows, len(prompt_ids)))}
    return tuple(tokens), np.stack(rows), logits_by_count, logit_noise(model, ids, expected)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged settings of a tokenizer fail anywhere in its class
        raise InputError(
            f"{folder}: expected a tokenizer that transformers can load, found {' '.join(str(error).split())[:300]}"
        ) from error


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of a golden prompt. Raises InputError for none, or one that the model does not know."""
    try:
        ids = tuple(tokenizer(text)["input_ids"])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # whatever its classes raise; a panic of its native code is no Exception
        raise InputError(
            f"golden prompt {text[:40]!r}: expected a text that the tokenizer can split, found"
            f" {' '.join(str(error).split())[:300]}"
        ) from error
    if not ids:
        raise InputError(f"golden prompt {text!r}: expected at least one token, found none; give a longer prompt")
    if max(ids) >= vocab_size:
        raise InputError(
            f"golden prompt {text[:40]!r}: expected tokens below {vocab_size}, as the model's embedding has rows, found"
            f" {max(ids)}; does tokenizer.json belong to it?"
        )
    return ids
