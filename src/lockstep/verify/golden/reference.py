"""The reference: answers of Hugging Face transformers to the golden prompts.

Needs torch and transformers.

In: a checkpoint's manifest, a layer count, prompts. Out: prompt ids, greedily decoded tokens, and the logits of every
step, computed in float32 with eager attention and a KV cache. One reference serves all precisions and backends of a
model and layer count.

Beside the prompts of the config stands a long one, of tokens from a hash, that goes as far as the limits allow: its
logits are kept on both sides of each length at which a KV cache, a window or a RoPE setting has an edge.

Beside all logits stands how far transformers' own fp16 is off them (`verify.noise`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
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
from lockstep.artifacts.reference import LongPrompt, ReferenceManifest, ReferencePrompt, ReferenceStep
from lockstep.checkpoint.stops import stop_ids
from lockstep.config.packing import packing_of
from lockstep.errors import InputError
from lockstep.export.quiet import quiet
from lockstep.export.torch_model import cut_config, float32_tensor, is_within, load_folder, load_tensors
from lockstep.manifests.digest_cache import check_stored
from lockstep.manifests.own_files import replacing, stale_files
from lockstep.verify.boundaries import both_sides, config_lengths
from lockstep.verify.golden.drift import drift_of, logits_along, perplexity
from lockstep.verify.golden.teacher_forced import Cached, logit_noise, logits_behind, run_behind
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.verify.golden.text import new_text
from lockstep.verify.rounded_kv_cache import round_kv_cache
from lockstep.weights.source import open_source

TOP = 5  # logits that are kept by value in the manifest
_MOST_ROWS, _MOST_BYTES = 256, 1 << 25  # logits of the long prompt that are kept beside those at edges


@dataclass(frozen=True)
class Answer:
    """One prompt and what follows it.

    tokens: greedy, an end-of-sequence token included. logits: [len(tokens), vocab_size] float32, those that each token
    was chosen from. noise: of each row, [len(tokens), 2]. new_text: the tokens as text, special tokens left out.
    adapter: as of `ReferencePrompt`.
    """

    text: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    new_text: str
    logits: np.ndarray
    noise: np.ndarray
    adapter: str | None = None


@dataclass(frozen=True)
class LongAnswer:
    """The long prompt and what follows it; end-of-sequence tokens do not end it.

    counts: ascending numbers of prompt tokens, the last is all of them; prompt_logits [len(counts), vocab_size] float32
    are those behind so many tokens. edges: those of counts at which something begins or ends. tokens, logits: as in
    `Answer`. noise: of the rows of prompt_logits, then of logits.
    """

    prompt_ids: tuple[int, ...]
    edges: tuple[int, ...]
    counts: tuple[int, ...]
    prompt_logits: np.ndarray
    tokens: tuple[int, ...]
    logits: np.ndarray
    noise: np.ndarray


@dataclass(frozen=True)
class Reference:
    answers: tuple[Answer, ...]
    eos_token_ids: tuple[int, ...]
    long: LongAnswer | None


def make_reference(
    checkpoint_json: Path, layers: int | str, golden: GoldenTerms, out: Path, drift_text: str = ""
) -> Path:
    """Write the reference of a model to `out`, its logits beside it; return `out`. Same inputs, same bytes.

    Of a rounded KV cache the drift stands beside it too; drift_text: as of `make_quantized_reference`.
    """
    checkpoint_json, out = Path(checkpoint_json), Path(out)
    logits_beside(out)
    manifest = CheckpointManifest.load(checkpoint_json)
    folder = manifest.folder_of(checkpoint_json)
    check_stored(manifest.files, folder, RESOLVE_AGAIN)
    model, tokenizer = load_checkpoint(checkpoint_json, layers), load_tokenizer(folder)
    asked = golden.prompts, golden.max_new_tokens, golden.long_prompt
    if golden.kv_cache_dtype is None:
        reference = answer(model, tokenizer, folder, manifest.config, *asked)
        return save_reference(reference, layers, golden.max_new_tokens, out)
    rows = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
    text = tokens_of(tokenizer, drift_text or " ".join(golden.prompts), rows)
    hook = round_kv_cache(model)
    reference = answer(model, tokenizer, folder, manifest.config, *asked)
    own_perplexity, count = perplexity(model, text)
    hook.remove()
    expected = logits_along(model, [(answered.prompt_ids, answered.tokens) for answered in reference.answers])
    drift = drift_of(
        expected,
        np.concatenate([answered.logits for answered in reference.answers]),
        (own_perplexity, perplexity(model, text)[0]),
        count,
        layers,
        "fp32",
        kv_cache_dtype=golden.kv_cache_dtype,
    )
    drift_out = drift_beside(out)
    drift.save(drift_out)
    return save_reference(reference, layers, golden.max_new_tokens, out, drift_out)


def drift_beside(out: Path) -> Path:
    """Return the file of a reference's drift."""
    return out.with_suffix(".drift.json")


def save_reference(
    reference: Reference,
    layers: int | str,
    max_new_tokens: int,
    out: Path,
    drift: Path | None = None,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write the manifest `out`, and the logits beside it. drift: a file that lies there already."""
    path, long = logits_beside(out), reference.long
    tensors: dict[str, np.ndarray] = {}
    for i, answer in enumerate(reference.answers):
        tensors |= {f"logits.{i}": answer.logits, f"noise.{i}": answer.noise}
    if long:
        tensors |= {"long.prompt": long.prompt_logits, "long.logits": long.logits, "long.noise": long.noise}
    with replacing(out, (path.name,)):
        write_bytes(path, save(tensors))
        ReferenceManifest(
            layers=layers,
            max_new_tokens=max_new_tokens,
            eos_token_ids=reference.eos_token_ids,
            logits=FileEntry(path.name, sha256_file(path)),
            prompts=tuple(map(_entry, reference.answers)),
            long=LongPrompt(long.prompt_ids, long.edges, long.counts, long.tokens) if long else None,
            drift=FileEntry(drift.name, sha256_file(drift)) if drift else None,
            adapters=adapters,
        ).save(out)
    return out


def logits_beside(out: Path) -> Path:
    """Return the file of a reference's logits; InputError where it is another's."""
    path = out.with_suffix(".safetensors")
    stale_files(out, (path.name,))
    return path


def load_checkpoint(checkpoint_json: Path, layers: int | str) -> PreTrainedModel:
    """Load a checkpoint's first layers in float32, dequantised where it is quantised."""
    manifest = CheckpointManifest.load(checkpoint_json)
    folder, config = manifest.folder_of(checkpoint_json), cut_config(manifest.config, layers)
    if packing_of(manifest.config) is None:
        return load_folder(folder, config)
    source = open_source(checkpoint_json)
    tensors = {name: float32_tensor(source.array(name)) for name in source.tensors if is_within(name, layers)}
    return load_tensors(tensors, config, "eager", str(folder))


def compute(
    folder: Path,
    config: Mapping[str, Any],
    layers: int | str,
    prompts: Sequence[str],
    max_new_tokens: int,
    long_prompt: int = 0,
) -> Reference:
    """Return the reference of a checkpoint folder, without writing files. config: config.json's content."""
    model = load_folder(folder, cut_config(config, layers))
    return answer(model, load_tokenizer(folder), folder, config, prompts, max_new_tokens, long_prompt)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: Mapping[str, Any],
    prompts: Sequence[str],
    max_new_tokens: int,
    long_prompt: int,
) -> Reference:
    """Return what a model says to the prompts. config: of all layers. Raises InputError for one that does not fit."""

    def decode(ids: list[int]) -> str:
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cast(str, text)  # of one sequence; of several it is a list

    rows = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
    ends = tuple(stop_ids(folder, config, cast("int | None", tokenizer.eos_token_id)))
    text_config = model.config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    answers = []
    for text in prompts:
        prompt_ids = tokens_of(tokenizer, text, rows)
        if limit is not None and len(prompt_ids) + max_new_tokens > limit:
            raise InputError(
                f"golden prompt {text[:40]!r}: expected prompt and answer within {limit} tokens "
                f"(max_position_embeddings), "
                f"found {len(prompt_ids)} + {max_new_tokens}; shorten the prompt or max_new_tokens"
            )
        tokens, logits = greedy(model, prompt_ids, max_new_tokens, ends)
        noise = logit_noise(model, [*prompt_ids, *tokens[:-1]], dict(enumerate(logits, len(prompt_ids))))
        answers.append(Answer(text, prompt_ids, tokens, new_text(decode, prompt_ids, tokens), logits, noise))
    if long_prompt and limit is not None and long_prompt + max_new_tokens > limit:
        raise InputError(
            f"golden.long_prompt: expected prompt and answer within {limit} tokens (max_position_embeddings), "
            f"found {long_prompt} + {max_new_tokens}; lower limits.max_seq_len or golden.long_prompt"
        )
    lengths = config_lengths(config)
    long = long_answer(model, text_config.vocab_size, long_prompt, max_new_tokens, lengths) if long_prompt else None
    return Reference(tuple(answers), ends, long)


def long_prompt_ids(count: int, vocab_size: int) -> tuple[int, ...]:
    """Return `count` token ids that only the count and the vocabulary decide."""
    return tuple(
        int.from_bytes(hashlib.sha256(f"long prompt {i}".encode()).digest()[:8], "big") % vocab_size
        for i in range(count)
    )


def long_answer(
    model: torch.nn.Module, vocab_size: int, count: int, max_new_tokens: int, lengths: Iterable[int]
) -> LongAnswer:
    """Decode behind a long prompt; keep logits on both sides of edges, and others evenly between."""
    prompt_ids = long_prompt_ids(count, vocab_size)
    edges = sorted({*(near for near in both_sides(count + max_new_tokens, lengths) if near < count), count})
    rows = min(count, _MOST_ROWS, max(1, _MOST_BYTES // (4 * vocab_size)))
    counts = sorted({*edges, *(count * (row + 1) // rows for row in range(rows))})
    kept, cache = logits_behind(model, prompt_ids, set(counts))
    tokens, logits = _decode(model, kept[count], cache, max_new_tokens, ())
    # The last row of the prompt's is the first of the answer's.
    noise = logit_noise(model, [*prompt_ids, *tokens[:-1]], {**kept, **dict(enumerate(logits, count))})
    noise = np.concatenate([noise[: len(counts)], noise[len(counts) - 1 :]])
    prompt_logits = np.stack([kept[near] for near in counts])
    return LongAnswer(prompt_ids, tuple(edges), tuple(counts), prompt_logits, tokens, logits, noise)


def greedy(
    model: torch.nn.Module, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], np.ndarray]:
    """Decode greedily until an end-of-sequence token, which is kept; return tokens, logits [steps, vocab_size]."""
    with torch.no_grad():
        rows, cache = run_behind(model, prompt_ids)
    return _decode(model, rows[-1].float().numpy().copy(), cache, max_new_tokens, eos_token_ids)


def _decode(
    model: torch.nn.Module, first: np.ndarray, cache: Cached | None, max_new_tokens: int, eos_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], np.ndarray]:
    """Decode greedily behind `cache`, whose last token gave the logits `first`."""
    rows, tokens = [first], [int(first.argmax())]
    with torch.no_grad():
        while len(tokens) < max_new_tokens and tokens[-1] not in eos_token_ids:
            (row,), cache = run_behind(model, tokens[-1:], cache)
            rows.append(row.float().numpy().copy())
            tokens.append(int(rows[-1].argmax()))
    return tuple(tokens), np.stack(rows)


def _entry(answer: Answer) -> ReferencePrompt:
    order = np.argsort(-answer.logits, axis=-1, kind="stable")[:, :TOP]  # equal logits: the lower id first, as argmax
    top = np.take_along_axis(answer.logits, order, axis=-1)
    steps = (
        ReferenceStep(
            top_ids=tuple(ids.tolist()),
            top_logits=tuple(values.astype(float).tolist()),
            gap=float(values[0] - values[1]) if len(values) > 1 else None,
        )
        for ids, values in zip(order, top)
    )
    own = answer.text, answer.prompt_ids, answer.tokens, answer.new_text
    return ReferencePrompt(*own, tuple(steps), answer.adapter)


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
