"""The export's numeric check against transformers: is the split form of a model the same computation?

In: a config.json mapping and the assembly that was made from it. A small model of the same class and settings gets
random weights and is split in the same way. Its graphs run in ONNX Runtime (chunked prefill, decode, two requests
mixed, long contexts and far positions) and are compared with transformers' eager forward. A model whose attention does
more than the split supports (its own mask, a bias, a sink) passes every other check and fails here. Needs neither
weights nor a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.artifacts.assembly import Assembly, Layer
from lockstep.artifacts.graph_files import StateMixer
from lockstep.errors import InputError
from lockstep.export import far_positions
from lockstep.export.float64_constants import float64_constants
from lockstep.export.language import build_config, check_wrapper
from lockstep.export.quiet import quiet
from lockstep.export.reference_runner import PackedRequest, ReferenceRunner
from lockstep.export.refusals import known_reason
from lockstep.export.rope import define_frequencies, rope_settings
from lockstep.export.small_configs import shallow_config, small_configs
from lockstep.export.torch_model import draw_weights
from lockstep.export.tracer import meta_model
from lockstep.export.unique_layers import signatures
from lockstep.onnx_tools import judge
from lockstep.progress import steps
from lockstep.tolerances import EXPORT, OWN_ERRORS

LENGTHS = (23, 15)  # tokens of two requests: each crosses a window several times
# Tokens of each request in each step: whole and partial prompts, a prompt with a decoding request, both decoding.
_STEPS = ((7, 6), (8, 1), (1, 1), (1, 4), (4, 1), (1, 1), (1, 1))
_LONG_STEPS = (70, 57, 1)  # of a request to a model with states
_SMALL_ENOUGH = 3_000_000  # parameters: a model below is only cut to the depth that shows all its layers
_TOO_LARGE = 120_000_000  # parameters, 500 MB
# Where norms precede scores that nothing scales down, gains near 1 make attention so sharp that fp32 itself is
# inaccurate: a draw counts when transformers in fp32 agrees with fp64 `OWN_ERRORS` times better than we have to.
DRAWS = ((0, 1.0), (1, 1.0), (2, 0.25), (3, 0.25))  # seeds of random weights, and the mean of gains
# A router that chooses between two nearly equal experts may choose differently after rounding; a real fault shows with
# all weights.
_DRAWS_THAT_COUNT = 2

Files = Mapping[str, bytes]
Assemble = Callable[[PreTrainedModel, dict[str, Any], str], tuple[Files, Assembly]]


@dataclass(frozen=True)
class Small:
    """A small model in split form: its config.json, its graphs and assembly (fp32)."""

    config: dict[str, Any]
    files: Files
    assembly: Assembly


def check_parity(
    config: Mapping[str, Any], meta: PreTrainedModel, files: Files, assembly: Assembly, assemble: Assemble
) -> float:
    """Return the largest error of a small model's logits in split form over their standard deviation.

    meta: the model of `config`; files, assembly: its split form by `assemble`. Raises InputError for a model whose
    split form differs from transformers, or for which no small model can be made.
    """
    small = make_small(config, meta, files, assembly, assemble)
    refusal = f"model type {config['model_type']!r} cannot be split: "
    errors: list[float] = []
    for draw in DRAWS:
        measured = measure(small, draw)
        if measured.reference_error > EXPORT / OWN_ERRORS:  # says nothing about the split form
            continue
        if measured.error <= EXPORT:
            check_wrapper(config, small.config, reference_model(small.config, *draw))
            return measured.error
        errors.append(measured.error)
        if len(errors) == _DRAWS_THAT_COUNT:
            break
    if not errors:
        raise InputError(
            f"{refusal}no random weights were found for which transformers in fp32 is accurate enough to compare with"
        )
    reason = known_reason(meta)
    if reason is not None:
        raise InputError(refusal + reason)
    raise InputError(
        f"{refusal}its split form differs from transformers by {min(errors):.1e} of the logits' standard deviation on "
        f"a small model of its kind, expected at most {EXPORT:.0e}; please report it"
    )


def make_small(
    config: Mapping[str, Any], meta: PreTrainedModel, files: Files, assembly: Assembly, assemble: Assemble
) -> Small:
    """Return the smallest model with the same layers in split form. Raises InputError for none."""
    layer_signatures = signatures(meta)
    reasons = []
    for depth in depths_to_try(layer_signatures):
        for candidate in steps(_candidates(config, depth), "export: small models to compare with", "models"):
            try:
                small = meta_model(candidate, "fp32")
                small_pattern = _repetitions(signatures(small))
                pattern = _repetitions(layer_signatures[: len(small_pattern)])
                if small_pattern != pattern:
                    raise InputError(f"expected layers that look alike as in {pattern}, found {small_pattern}")
                count = _num_parameters(small)
                if count > _TOO_LARGE:
                    raise InputError(f"it has {count:,} parameters, expected at most {_TOO_LARGE:,}")
                if assembly.precision == "fp32" and small.config.to_dict() == meta.config.to_dict():
                    return Small(candidate, files, assembly)
                small_split = assemble(small, candidate, "fp32")
                difference = _form_difference(small_split, (files, assembly))
                # Some operators differ by precision (Min, and Clip), so a difference counts only in the same one.
                if difference and assembly.precision != "fp32":
                    same_precision = assemble(meta_model(candidate, assembly.precision), candidate, assembly.precision)
                    difference = _form_difference(same_precision, (files, assembly))
                if difference:
                    raise InputError(difference)
                return Small(candidate, *small_split)
            except InputError as error:  # ours or the class's: the next candidate may do
                reasons.append(str(error))
    raise InputError(
        f"model type {config['model_type']!r} cannot be split: no small model with its settings could be "
        f"made to check the split form: {reasons[0]}"
    )


def _candidates(config: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    shallow = shallow_config(config, depth)
    try:
        if _num_parameters(meta_model(shallow, "fp32")) <= _SMALL_ENOUGH:
            yield shallow
    except InputError:  # the class refuses the small vocabulary: the other candidates say why
        pass
    yield from small_configs(config, depth)


def depths_to_try(layer_signatures: Sequence[str]) -> list[int]:
    """Return depths that show every pair of neighbouring layers, three layers at least where the model has them.

    Some classes require a certain last layer: the next depth that ends as the model does comes second.
    """
    pairs = list(zip(layer_signatures, layer_signatures[1:]))
    last_new_pair = max((pairs.index(pair) for pair in set(pairs)), default=0)
    depth = min(len(layer_signatures), max(3, last_new_pair + 2))
    same_end = depth
    while layer_signatures[same_end - 1] != layer_signatures[-1]:
        same_end += 1
    return sorted({depth, same_end})


def _num_parameters(meta: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in meta.parameters())


def _repetitions(names: Sequence[str]) -> list[int]:
    """Return for each name the index of the first equal one."""
    return [list(names).index(name) for name in names]


def _form_difference(small: tuple[Files, Assembly], real: tuple[Files, Assembly]) -> str | None:
    """Return how a layer's form differs from the real model's; None if the small model represents it."""
    for index, (small_layer, real_layer) in enumerate(zip(small[1].layers, real[1].layers)):
        # The small model may end before a layer without a mixer.
        count = min(len(small_layer.parts), len(real_layer.parts))
        small_form = _form(*small, small_layer, count)
        for name, value in _form(*real, real_layer, count).items():
            if small_form.get(name) != value:
                return f"expected layer {index} as in the model itself, found another form of its {name}"
    return None


def _form(files: Files, assembly: Assembly, layer: Layer, count: int) -> dict[str, Any]:
    """Return what a small model must share with the real one: operators of `count` blocks, sizeless mixer settings."""
    names = ["block", *(f"exit {number}" for number in range(1, count))]
    form: dict[str, Any] = {}
    for name, block in zip(names, layer.parts):
        form[name] = _operators(files[assembly.classes[block.graph].file])
    mixer = assembly.mixers[layer.variant]
    if isinstance(mixer, StateMixer):
        form |= {phase: _operators(files[graph.file]) for phase, graph in mixer.phases().items()}
        return form | {"inputs": mixer.inputs, "dimensions of a state": len(mixer.state)}
    form |= {key: getattr(mixer, key) for key in ("head_dim", "value_head_dim", "scale", "softcap", "sinks")}
    return form | {"window": bool(mixer.window), "groups of heads": mixer.num_heads > mixer.num_kv_heads}


@functools.lru_cache(maxsize=64)
def _operators(graph: bytes) -> tuple[str, ...]:
    """Return the operators of a canonical graph except for casts, by which precisions differ."""
    return tuple(node.op_type for node in onnx.ModelProto.FromString(graph).graph.node if node.op_type != "Cast")


@dataclass(frozen=True)
class Measured:
    """Largest errors of a logit over the standard deviation; reference_error: of transformers in fp32 against fp64."""

    error: float
    reference_error: float


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread: products this small take longer to share than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def measure(small: Small, draw: tuple[int, float] = DRAWS[0]) -> Measured:
    """Measure the errors of requests' tokens under random weights. Raises InputError where nothing runs."""
    model = reference_model(small.config, *draw)
    random = np.random.default_rng(draw[0])
    lengths = [*LENGTHS]
    if small.assembly.state_mixers:  # a recurrence computes spans of tokens at a time
        lengths.append(sum(_LONG_STEPS))
    limit = small.assembly.max_position_embeddings or sum(_LONG_STEPS)
    sequences = [random.integers(0, small.assembly.vocab_size, min(length, limit)) for length in lengths]
    expected = _forward(model, sequences)
    spread = float(np.concatenate(expected).std())
    refusal = f"model type {small.config['model_type']!r} cannot be split: "
    if not np.isfinite(spread) or spread == 0:
        raise InputError(f"{refusal}transformers gives logits with standard deviation {spread} on a small model")
    # The original lengths of RoPE settings, beyond which frequencies are stretched: a fault may begin there.
    settings = rope_settings(model.config.get_text_config())
    originals = [int(rope.get("original_max_position_embeddings") or 0) for rope in settings]
    contexts = far_positions.contexts(small.assembly, list(filter(None, originals)))
    filled = [far_positions.fill(context, small.assembly, random) for context in contexts]
    expected_far = [far_positions.reference_logits(model, context) for context in filled]
    try:
        longest = max(map(len, sequences))
        run = ReferenceRunner(small.files, small.assembly, checkpoint_tensors(model), len(sequences), longest + 1)
        logits = step_through(run, sequences)
        logits_far = [far_positions.split_logits(run, context) for context in filled]
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise InputError(f"{refusal}its split form does not run: {' '.join(str(error).split())}") from error
    near_error = max_difference(logits, expected)
    far_error = max(map(max_difference, logits_far, expected_far), default=0.0)
    reference_error = max_difference(_forward(model.double(), sequences), expected)
    if far_error > EXPORT:  # it may be transformers' own error in fp32, which takes long to measure
        exact = [far_positions.reference_logits(model, context) for context in filled]
        reference_error = max(reference_error, *map(max_difference, exact, expected_far))
    return Measured(max(near_error, far_error), reference_error)


def max_difference(logits: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest difference over the standard deviation of `expected`; infinity for non-finite logits."""
    scale = float(np.concatenate(expected).std())
    errors = []
    for rows, expected_rows in zip(logits, expected, strict=True):
        error = judge.measure(expected_rows, rows, judge.Bound(EXPORT), scale).relative_error
        if error is None:
            return float("inf")
        errors.append(error)
    return max(errors)


def _forward(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    with torch.no_grad():
        return [model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy() for ids in sequences]


def step_through(run: ReferenceRunner, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return all logits of each sequence: two in the steps of `_STEPS`, a third alone in `_LONG_STEPS`."""
    logits: list[list[np.ndarray]] = [[] for _ in sequences]
    lengths = [0] * len(sequences)
    steps: list[tuple[int, ...]] = [*_STEPS]
    if len(sequences) > 2:
        steps += [(0, 0, count) for count in _LONG_STEPS]
    for counts in steps:
        requests = []
        for number, (ids, count) in enumerate(zip(sequences, counts)):
            tokens = ids[lengths[number] : lengths[number] + count]
            if len(tokens):
                requests.append(PackedRequest(number, tokens))
        if not requests:  # the sequences of a model with few positions have ended
            continue
        for request, rows in zip(requests, run.step(requests), strict=True):
            logits[request.request].append(rows)
            lengths[request.request] += len(request.tokens)
    return [np.concatenate(rows) for rows in logits]


def reference_model(config: Mapping[str, Any], seed: int, gain: float) -> PreTrainedModel:
    """Return transformers' own model in fp32 and eager, with random weights, gains and biases."""
    settings = build_config(config)
    settings._experts_implementation = "eager"  # unlike the trace's, it also runs in fp64
    with quiet(), float64_constants():  # the constants of the graphs: at far positions a last bit shows
        model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager", dtype=torch.float32).eval()
    define_frequencies(model)
    draw_weights(model, torch.Generator().manual_seed(seed), gain)
    return model


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the model's tensors under the names, and in the form, of a checkpoint."""
    with quiet():
        saved = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: tensor.numpy() for name, tensor in saved.items()}
