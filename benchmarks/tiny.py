"""One model type, or one published family, as a tiny model through all stages, against transformers.

Its weights are random, its activations like those of trained models (`tests.lifelike`).

Used by `python -m benchmarks models`, in a child process.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # noqa: F401  here so that the process that others are forked from has it
import torch
import transformers
from tests import lifelike
from tests.whole_workflow import LIMITS, failures

import lockstep
from benchmarks.models import BROKEN, NO_MODEL, REFUSED, WORKS, WRONG
from benchmarks.published import FAMILIES, Published
from lockstep import Advance, Assembly, CheckError, InputError, Model, ModelOptions, Results
from lockstep.artifacts.document import ValidationError
from lockstep.config.packing import KEY as PACKING_KEY
from lockstep.config.packing import packing_of
from lockstep.export.language import build_config
from lockstep.export.parity import depths_to_try
from lockstep.export.quiet import quiet
from lockstep.export.small_configs import shallow_config, small_configs
from lockstep.export.torch_model import cut_config, load_folder
from lockstep.export.tracer import meta_model
from lockstep.export.unique_layers import signatures
from lockstep.tolerances import EXPORT, OWN_ERRORS

_MAX_PARAMETERS = 150_000_000  # 600 MB
_MAX_TRIES = 2
_PROMPTS = (5, 19, 11)  # tokens, prefilled together; the longest prompt of all comes in chunks meanwhile
_LONG = 300  # tokens, or as many as the model has positions for
_LONG_OF_EXPERTS = 100  # of a mixture: a step gathers the weights of each token's experts
_CHUNK = 97
_DECODE_STEPS = 4
_NAME = "tiny"
_GPU_LIMITS = {"max_batch_size": 5, "max_seq_len": 320, "max_num_tokens": 640}
# TensorRT tries fewer tactics, for the table is not about speed.
_GPU_BACKENDS = {"tensorrt": {"optimization_level": 2}}


def try_family(name: str, folder: Path) -> dict[str, Any]:
    """Try one published family, in fp32."""
    family = FAMILIES[name]
    record = _try(family.config, folder)
    return {"example": family.example, "model_type": family.config["model_type"], **_packing(family)} | record


def try_on_gpu(name: str, backend: str, precision: str, folder: Path, published_widths: bool) -> dict[str, Any]:
    """Try one published family on a GPU backend: all stages, then its logits in company and alone.

    published_widths: with the checkpoint's hidden size, heads and experts, and few layers; else tiny.
    """
    source = folder / "checkpoint"
    results = Results(folder / "results")
    engines = results.engines(_NAME, precision, backend)
    stage = NO_MODEL
    lines: list[str] = []
    try:
        config = dict(FAMILIES[name].config)
        if published_widths:
            config = shallow_config(config, depths_to_try(signatures(meta_model(config, "fp32")))[0])
        else:
            config = tiny_configs(config)[0]
        lifelike.write_without_weights(config, source)
        stage = "export"
        architecture = lockstep.resolve_architecture(str(source), source, results.architecture(_NAME))
        lockstep.export_graphs(architecture, precision, results.assembly(_NAME, precision))
        lifelike.write(config, 0, source)
        stage = "stages"
        positions = _positions(_assembly(results, precision), _GPU_LIMITS)
        limits = _GPU_LIMITS | {"max_input_len": positions - _DECODE_STEPS, "max_seq_len": positions}
        backends = {backend: _GPU_BACKENDS[backend]} if backend in _GPU_BACKENDS else {}
        lines = failures(results.root, str(source), {backend: [precision]}, limits=limits, backends=backends)
        if not engines.is_file():
            return {"result": REFUSED, "reason": _joined(lines, folder)}
        stage = "run"
        record = _errors_on_gpu(config, source, results, engines, precision)
    except (CheckError, InputError) as error:
        return {"result": REFUSED if stage in (NO_MODEL, "export") else WRONG, "reason": _ended(stage, error, folder)}
    except Exception as error:
        return {"result": NO_MODEL if stage == NO_MODEL else BROKEN, "reason": _ended(stage, error, folder)}
    if record["batch_invariant"] and not record["same_bits"]:
        lines.insert(0, "logits of a request alone have other bits")
    if lines:
        return {"result": WRONG, "reason": _joined(lines, folder), **record}
    return {"result": WORKS, **record}


def _joined(lines: Sequence[str], folder: Path) -> str:
    return " ".join("; ".join(lines).replace(f"{folder}/", "").split())[:600]


def _ended(stage: str, error: Exception, folder: Path) -> str:
    return f"{stage}: {_one_line(error)}".replace(f"{folder}/", "")


def _errors_on_gpu(
    config: Mapping[str, Any], source: Path, results: Results, engines: Path, precision: str
) -> dict[str, Any]:
    """Return the errors of logits, in company and alone, over their deviation, and whether both have the same bits.

    Of a mixture one token is left out, as in `_logit_errors`.
    """
    assembly = _assembly(results, precision)
    positions = _positions(assembly, _GPU_LIMITS)
    prompts = (*_PROMPTS, min(_LONG, positions - _DECODE_STEPS))
    reference, sequences = _reference(config, source, assembly.vocab_size, prompts)
    expected, spread = _expected(reference, sequences, prompts)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(precision, torch.float16)
    # A CPU takes minutes for what 16 bits cost, where PyTorch has no fast kernels of them.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    in_dtype, _ = _expected(reference.to(device, dtype), sequences, prompts)
    model = Model.open(
        engines,
        results.assembly(_NAME, precision),
        results.weights(_NAME, precision),
        options=ModelOptions(max_batch_size=_GPU_LIMITS["max_batch_size"], max_seq_len=positions),
    )
    in_company = _logits_of_engines(model, sequences, prompts)
    requests = enumerate(zip(sequences, prompts))
    alone = np.stack([_alone(model, slot, ids, length) for slot, (ids, length) in requests], axis=1)
    left_out = int(_has_experts(config))
    errors = [
        _largest(in_company - expected[:, [0, 1, 2, 3, 3]], spread, left_out),
        _largest(alone - expected, spread, left_out),
    ]
    return {
        "logit_error": _rounded(max(errors)),
        "transformers_error": _rounded(_largest(in_dtype - expected, spread, left_out)),
        "same_bits": np.array_equal(alone, in_company[:, : len(prompts)]),
        "batch_invariant": model.engines.batch_invariant,
    }


def _alone(model: Model, slot: int, ids: np.ndarray, length: int) -> np.ndarray:
    """Return the logits after a prompt and each decoded token of a request that runs alone."""
    rows = [model.step([Advance(slot, ids[:length], 0)])[0]]
    rows += [model.step([Advance(slot, ids[at : at + 1], at)])[0] for at in range(length, length + _DECODE_STEPS)]
    return np.array(rows)


def _packing(family: Published) -> dict[str, Any]:
    """Return how a family's weights are quantised as published, and why that is not read."""
    if family.packing is None:
        return {}
    try:
        packing_of({PACKING_KEY: family.packing})
    except ValidationError as error:
        return {"quantized": family.packing["quant_method"], "not_read": _one_line(error)}
    return {"quantized": family.packing["quant_method"]}


def _try(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Try the small models of a config, with files in `folder`, and return what came of it.

    {"result", "reason" or "logit_error", "classes", "kinds"}.
    """
    try:
        configs = tiny_configs(config)
    except InputError as error:  # the export's own words for a config that is none of its
        return {"result": REFUSED, "reason": _short(error, folder)}
    except Exception as error:  # transformers' own code
        return {"result": NO_MODEL, "reason": _one_line(error)}
    records = []
    # a class may take a config and fail when it runs: then the next one, closer to its default
    for number, tiny_config in enumerate(configs):
        records.append(try_config(tiny_config, folder / str(number)))
        if records[-1]["result"] not in (REFUSED, BROKEN):
            return records[-1]
    return records[0]


def _short(error: BaseException, folder: Path) -> str:
    return re.sub(r"model type '\w+' cannot be split: ", "", _one_line(error)).replace(f"{folder}/", "")


def try_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    try:
        source, results = _export(config, folder)
        activations = dataclasses.asdict(lifelike.write(config, 0, source))
    except InputError as error:
        return {"result": REFUSED, "reason": _short(error, folder)}
    except Exception as error:  # any other exception is our fault, and shown in the table
        return {"result": BROKEN, "reason": f"export: {_one_line(error)}"}
    try:
        error, reference_error = _logit_errors(config, source, results)
    except Exception as error:
        return {"result": BROKEN, "reason": _one_line(error)}
    assembly = Assembly.load(results.assembly(_NAME, "fp32"))
    record = {
        "logit_error": _rounded(error),
        "transformers_error": _rounded(reference_error),
        "activations": {name: value and _rounded(value) for name, value in activations.items()},
        "classes": len(assembly.classes),
        "kinds": len(assembly.variants),
    }
    if error > max(EXPORT, OWN_ERRORS * reference_error):  # weights may be so unlucky that fp32 itself is no better
        return {"result": WRONG, "reason": f"logits differ by {error:.1e} of their standard deviation", **record}
    lines = failures(
        results.root, str(source), {"onnxruntime": ["fp32"]}, limits=LIMITS | {"max_seq_len": _positions(assembly)}
    )
    if lines:
        return {"result": WRONG, "reason": _joined(lines[:1], folder)[:400], **record}
    return {"result": WORKS, **record}


def _assembly(results: Results, precision: str) -> Assembly:
    return Assembly.load(results.assembly(_NAME, precision))


def _positions(assembly: Assembly, limits: Mapping[str, int] = LIMITS) -> int:
    """Return the longest sequence that the stages run."""
    return min(limits["max_seq_len"], assembly.max_position_embeddings or limits["max_seq_len"])


def _rounded(value: float) -> float:
    return float(f"{value:.1e}")


def tiny_configs(default: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a config, as small as its class takes it, then closer to the original: config.json mappings.

    Raises what the class raises when it takes none of them.
    """
    build_config(default)
    configs = []
    failures = []
    try:
        depths = depths_to_try(signatures(meta_model(default, "fp32")))
    except InputError as error:
        depths = [3]  # no list of layers, or a default that the class itself refuses: the export will say which
        failures.append(error)
    for config in itertools.chain.from_iterable(small_configs(default, depth) for depth in depths):
        try:
            with quiet(), torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(build_config(config), dtype=torch.float32)
        except Exception as error:  # whatever the class finds wrong
            failures.append(error)
            continue
        count = sum(parameter.numel() for parameter in model.parameters())
        if count <= _MAX_PARAMETERS:
            configs.append(config)
        else:
            failures.append(InputError(f"{count:,} parameters, expected at most {_MAX_PARAMETERS:,}"))
    if not configs:
        raise failures[0]
    return configs[:_MAX_TRIES]


def _has_experts(config: Mapping[str, Any]) -> bool:
    return any("expert" in key and isinstance(value, int) and value > 1 for key, value in config.items())


def _export(config: Mapping[str, Any], folder: Path) -> tuple[Path, Results]:
    """Write a checkpoint without weights, and export it."""
    source = folder / "checkpoint"
    results = Results(folder / "results")
    lifelike.write_without_weights(config, source)
    architecture = lockstep.resolve_architecture(str(source), source, results.architecture(_NAME))
    lockstep.export_graphs(architecture, "fp32", results.assembly(_NAME, "fp32"))
    return source, results


def _logit_errors(config: Mapping[str, Any], source: Path, results: Results) -> tuple[float, float]:
    """Return the largest difference of a logit from transformers in fp32, and of transformers from itself in fp64.

    There each request runs alone and whole. Both over the logits' standard deviation. Requests: `_logits_of_engines`.
    """
    lockstep.resolve_checkpoint(str(source), source, results.checkpoint(_NAME))
    assembly = Assembly.load(results.assembly(_NAME, "fp32"))
    positions = assembly.max_position_embeddings or _LONG + _DECODE_STEPS
    longest = _LONG_OF_EXPERTS if _has_experts(config) else _LONG
    prompts = (*_PROMPTS, min(longest, positions - _DECODE_STEPS))
    reference, sequences = _reference(config, source, assembly.vocab_size, prompts)
    expected, spread = _expected(reference, sequences, prompts)
    exact, _ = _expected(reference.double(), sequences, prompts)
    # The long prompt comes twice: in one piece, and in chunks while other requests decode.
    logits = _run(results, "fp32", sequences, prompts)
    return _largest(logits - expected[:, [0, 1, 2, 3, 3]], spread), _largest(expected - exact, spread)


def _reference(
    config: Mapping[str, Any], source: Path, vocab_size: int, prompts: Sequence[int]
) -> tuple[torch.nn.Module, list[np.ndarray]]:
    """Return transformers' model of a checkpoint, and random token ids of each prompt and its decoded tokens."""
    full_config = cut_config(config, "all")
    full_config._experts_implementation = "eager"  # the one that also runs in fp64
    model = load_folder(source, full_config)
    random = np.random.default_rng(1)
    sequences = [random.integers(0, vocab_size, length + _DECODE_STEPS) for length in prompts]
    for ids in sequences:
        ids[0] = lifelike.first_token(model)
    return model, sequences


def _largest(difference: np.ndarray, spread: float, left_out: int = 0) -> float:
    """Return the largest difference [steps, requests, vocab_size], but for the tokens with the largest ones."""
    by_token = np.sort(np.abs(difference).max(axis=2), axis=None)
    largest = float(by_token[-1 - left_out] / spread)
    return largest if np.isfinite(largest) else float("inf")


def _run(results: Results, precision: str, sequences: Sequence[np.ndarray], prompts: Sequence[int]) -> np.ndarray:
    """Return the logits of a precision's engines (`_logits_of_engines`)."""
    lockstep.convert_weights(results.checkpoint(_NAME), precision, results.weights(_NAME, precision))
    engines = results.engines(_NAME, precision, "onnxruntime")
    lockstep.build_engines(results.assembly(_NAME, precision), "onnxruntime", engines)
    model = Model.open(
        engines,
        results.assembly(_NAME, precision),
        results.weights(_NAME, precision),
        options=ModelOptions(max_batch_size=len(prompts) + 1, max_seq_len=prompts[-1] + _DECODE_STEPS),
    )
    return _logits_of_engines(model, sequences, prompts)


def _logits_of_engines(model: Model, sequences: Sequence[np.ndarray], prompts: Sequence[int]) -> np.ndarray:
    """Return logits after each prompt and each decoded token.

    [steps, requests, vocab_size]: the prompts, and the last once more in chunks.

    All whole prompts are prefilled in one step. The last one's chunks come while the others decode; its tokens
    are decoded last.
    """
    rows = [
        list(model.step([Advance(slot, ids[:length], 0) for slot, (ids, length) in enumerate(zip(sequences, prompts))]))
    ]
    slot = len(prompts)
    ids = sequences[-1]
    total = prompts[-1]
    cuts = [0, *(min(total, _CHUNK * (i + 1)) for i in range(_DECODE_STEPS - 1)), total]
    chunked: list[np.ndarray] = []
    for step in range(_DECODE_STEPS):
        parts = [
            Advance(other, tokens[length + step : length + step + 1], length + step)
            for other, (tokens, length) in enumerate(zip(sequences, prompts))
        ]
        start = cuts[step]
        stop = cuts[step + 1]
        step_rows = model.step([*parts, *([Advance(slot, ids[start:stop], start)] if stop > start else [])])
        rows.append(list(step_rows[: len(parts)]))
        chunked = [step_rows[-1]] if stop > start else chunked
    chunked += [model.step([Advance(slot, ids[at : at + 1], at)])[0] for at in range(total, total + _DECODE_STEPS)]
    return np.array([[*row, last] for row, last in zip(rows, chunked, strict=True)])


def _expected(
    model: torch.nn.Module, sequences: Sequence[np.ndarray], prompts: Sequence[int]
) -> tuple[np.ndarray, float]:
    """Return the logits of transformers after each prompt and each decoded token.

    [steps, requests, vocab_size], and the standard deviation of all logits.

    Each request runs alone, in one piece.
    """
    with torch.no_grad():
        by_request = []
        for ids in sequences:
            tokens = torch.from_numpy(ids)[None].to(model.device)
            by_request.append(model(tokens, use_cache=False).logits[0].double().cpu().numpy())
    rows = []
    for step in range(_DECODE_STEPS + 1):
        rows.append([logits[length - 1 + step] for logits, length in zip(by_request, prompts)])
    return np.array(rows), float(np.concatenate(by_request).std())


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:400] if isinstance(error, InputError) else f"{type(error).__name__}: {text[:300]}"
