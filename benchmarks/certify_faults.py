"""Endpoints with planted faults, for `certify`: transformers in its own kernels of a dtype. Needs torch.

No fault is done as `lockstep.certify.tables` does it: other quantisers, other RoPE settings, other cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.certify_proxy import DRAWN, KEPT, PENALTY, TEMPLATE, TRUNCATED
from lockstep.artifacts.certificate import CHAT, Question
from lockstep.verify.golden.model import load_checkpoint
from lockstep.verify.golden.teacher_forced import logits_after


def _int8(weight: torch.Tensor) -> torch.Tensor:
    """As LLM.int8 and per-channel W8A16: by row, symmetric, 127 steps."""
    steps = weight.abs().amax(1, keepdim=True) / 127
    return torch.round(weight / steps) * steps


def _int4(weight: torch.Tensor) -> torch.Tensor:
    """As AWQ and Q4_1: 16 steps from the smallest to the largest of each 16 numbers."""
    groups = weight.reshape(-1, 16)
    low = groups.amin(1, keepdim=True)
    steps = (groups.amax(1, keepdim=True) - low) / 15
    return (torch.round((groups - low) / steps) * steps + low).reshape(weight.shape)


def _fp8(weight: torch.Tensor) -> torch.Tensor:
    """By tensor, as FP8 with one scale."""
    scale = weight.abs().amax() / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def _revision(weight: torch.Tensor) -> torch.Tensor:
    """As a little more training: weights off by 4 % of their rms."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return weight + 0.04 * weight.square().mean().sqrt() * noise


_WEIGHTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8 by rows": _int8,
    "int4 with zero points": _int4,
    "fp8 by tensors": _fp8,
    "another revision": _revision,
}
_ROPE = "RoPE scaled by 4"
DTYPES = ("float32", "float16", "bfloat16")
FAULTS = (*_WEIGHTS, _ROPE, TRUNCATED, TEMPLATE, DRAWN, PENALTY)


def logits_of(model_folder: Path, questions: Sequence[Question], dtype: str, fault: str) -> np.ndarray:
    """Return the logits after each question, [questions, vocab_size] float32, of a model with a fault, "" for none."""
    model = load_checkpoint(model_folder / "checkpoint.json", "all")
    _plant(model, fault)
    model = model.to(getattr(torch, dtype))
    ids_of = [_ids(question, fault) for question in questions]
    by_length = sorted(set(ids_of), key=len, reverse=True)
    rows: dict[tuple[int, ...], np.ndarray] = {}
    for ids in by_length:
        if ids in rows:
            continue
        counts = [count for count in range(1, len(ids) + 1) if ids[:count] in set(by_length)]
        logits, _ = logits_after(model, ids, counts)
        for count, row in logits.items():
            rows.setdefault(ids[:count], row)
    return np.stack([rows[ids] for ids in ids_of])


def _plant(model: PreTrainedModel, fault: str) -> None:
    for module in model.modules():
        if fault in _WEIGHTS and isinstance(module, torch.nn.Linear):
            weight = _WEIGHTS[fault](module.weight.detach())
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
        if fault == _ROPE and isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            module.inv_freq = module.inv_freq / 4


def _ids(question: Question, fault: str) -> tuple[int, ...]:
    if fault == TRUNCATED:
        return question.prompt_ids[-KEPT:]
    if fault == TEMPLATE and question.kind == CHAT:
        return question.prompt_ids[:-1]
    return question.prompt_ids
