"""The reference: what a checkpoint answers to the golden prompts in Hugging Face transformers. Needs torch and transformers.

In: a checkpoint's manifest, a layer count, prompts. Out: prompt ids, greedily decoded tokens, and the logits of every step, computed in
float32 with eager attention and a KV cache. One reference serves all precisions and backends of a model and layer count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lockstep import formats
from lockstep.checkpoint import check_checkpoint, checkpoint_folder
from lockstep.errors import InputError
from lockstep.files import read_json, sha256_file, write_bytes, write_json
from lockstep.golden.text import new_text
from lockstep.quiet import quiet
from lockstep.torch_model import cut_config, load_folder

TOP = 5  # logits that are kept by value in the manifest


@dataclass(frozen=True)
class Answer:
    """One prompt and what follows it. tokens: greedy, an end-of-sequence token included; logits [len(tokens), vocab_size] float32:
    those that each token was chosen from; new_text: the tokens as text, special tokens left out."""

    text: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    new_text: str
    logits: np.ndarray


@dataclass(frozen=True)
class Reference:
    answers: tuple[Answer, ...]
    eos_token_ids: tuple[int, ...]


def make_reference(checkpoint_json: Path, layers: int | str, golden: Mapping[str, Any], out: Path) -> Path:
    """Write the reference of the model's first `layers` layers (or "all") to `out`, its logits beside it; gives `out`.

    golden: {"max_new_tokens": int, "prompts": [text, ...]}. Same inputs, same bytes. Raises InputError for a checkpoint that
    transformers cannot load or a prompt that does not fit the model.
    """
    checkpoint_json, out = Path(checkpoint_json), Path(out)
    manifest = read_json(checkpoint_json, formats.CHECKPOINT)
    folder = checkpoint_folder(checkpoint_json, manifest)
    check_checkpoint(folder, manifest)
    reference = compute(folder, manifest["config"], layers, golden["prompts"], golden["max_new_tokens"])
    logits_path = out.with_suffix(".safetensors")
    write_bytes(logits_path, save({f"logits.{i}": answer.logits for i, answer in enumerate(reference.answers)}))
    logits = {"file": logits_path.name, "sha256": sha256_file(logits_path)}
    write_json(
        out,
        {
            "format": formats.REFERENCE,
            "layers": layers,
            "max_new_tokens": golden["max_new_tokens"],
            "eos_token_ids": list(reference.eos_token_ids),
            "logits": logits,
            "prompts": [_entry(answer) for answer in reference.answers],
        },
    )
    return out


def compute(folder: Path, config: Mapping[str, Any], layers: int | str, prompts: Sequence[str], max_new_tokens: int) -> Reference:
    """The reference without files: a checkpoint folder and its config.json's content in."""
    cut = cut_config(config, layers)
    tokenizer, model = _load_tokenizer(folder), load_folder(folder, cut)
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    ends = _eos_token_ids(model)
    limit = getattr(cut.get_text_config(), "max_position_embeddings", None)
    answers = []
    for text in prompts:
        prompt_ids = tuple(tokenizer(text)["input_ids"])
        if not prompt_ids:
            raise InputError(f"golden prompt {text!r}: expected at least one token, found none; give a longer prompt")
        if limit is not None and len(prompt_ids) + max_new_tokens > limit:
            raise InputError(
                f"golden prompt {text[:40]!r}: expected prompt and answer within {limit} tokens (max_position_embeddings), "
                f"found {len(prompt_ids)} + {max_new_tokens}; shorten the prompt or max_new_tokens"
            )
        tokens, logits = greedy(model, prompt_ids, max_new_tokens, ends)
        answers.append(Answer(text, prompt_ids, tokens, new_text(decode, prompt_ids, tokens), logits))
    return Reference(tuple(answers), ends)


def greedy(model: torch.nn.Module, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]) -> tuple[tuple[int, ...], np.ndarray]:
    """Decode greedily with a KV cache until an end-of-sequence token, which is kept, or `max_new_tokens`: tokens, logits [steps, vocab_size]."""
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    inputs, cache = torch.tensor([list(prompt_ids)]), None
    with torch.no_grad():
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos_token_ids):
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0, -1].float().numpy().copy())
            tokens.append(int(rows[-1].argmax()))
            inputs = torch.tensor([[tokens[-1]]])
    return tuple(tokens), np.stack(rows)


def _entry(answer: Answer) -> dict[str, Any]:
    order = np.argsort(-answer.logits, axis=-1, kind="stable")[:, :TOP]  # equal logits: the lower id first, as argmax
    top = np.take_along_axis(answer.logits, order, axis=-1)
    steps = [
        {"top_ids": ids.tolist(), "top_logits": values.astype(float).tolist(), "gap": float(values[0] - values[1]) if len(values) > 1 else None}
        for ids, values in zip(order, top)
    ]
    return {"text": answer.text, "prompt_ids": list(answer.prompt_ids), "tokens": list(answer.tokens), "new_text": answer.new_text, "steps": steps}


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{folder}: expected a tokenizer that transformers can load, found {' '.join(str(error).split())[:300]}") from error


def _eos_token_ids(model: torch.nn.Module) -> tuple[int, ...]:
    """Where `generate` would stop: the generation config's ids, which transformers takes from config.json when it has no file of its own."""
    found = model.generation_config.eos_token_id
    return tuple(sorted({found} if isinstance(found, int) else set(found or ())))
