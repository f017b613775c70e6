"""Record a model's activations in torch, layer by layer.

An assembly's target weights and token sequences in; recorded arrays out.

The weights are the target's (fp16 weights are upcast), the arithmetic is float32: a difference is then the graph's own
error, neither the rounding of the weights by `convert` nor that of torch's fp16, which is as large as ours.

Each record comes with one of the same model rounded to fp16 (`verify.rounded`), each layer on the float32 activations
before it: the difference is the noise of the precision there.

The recording uses transformers' `AttentionInterface`, so no model needs special code: the hook is called with query,
key (after RoPE) and value, and calls the model's own eager attention, with the eager mask. The functions of recurrent
layers, which have the same names in all models of transformers, are replaced in the same way.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from lockstep.errors import InputError
from lockstep.export.decoder_layers import layer_list
from lockstep.export.embedding import embed
from lockstep.export.state_hook import (
    Recurrent,
    bound_arguments,
    current_layer,
    delta_inputs,
    numbered,
    replaced,
    scan_inputs,
)
from lockstep.export.torch_model import TokensBefore, eager_attention
from lockstep.verify.records import LayerRecord, Record, interpolate
from lockstep.verify.rounded import NOISE_DTYPES, Rounded, noisy, round_activations
from lockstep.verify.validate.mapped_model import mapped_model
from lockstep.weights import Weights

HOOK = "lockstep_recording"
_NONE = np.empty(0, np.float32)
Past = Sequence[tuple[np.ndarray, np.ndarray] | None]
# After a synthetic cache: the standard deviation of scores against its standard normal keys. Small, so that every
# cache row has some weight.
_SCORES = 0.5


@dataclass
class _Recording:
    """The calls of hooks, one for each token mixer.

    past: keys and values [1, num_kv_heads, num_past, ...] of a synthetic cache for each mixer, None for one with a
    state; empty without such a cache. exact: the record whose outputs replace those of the mixers.
    """

    past: Sequence[tuple[torch.Tensor, torch.Tensor] | None] = ()
    calls: list[dict[str, Any]] = field(default_factory=list)
    exact: Record | None = None

    @property
    def num_past(self) -> int:
        return next((pair[0].shape[2] for pair in self.past if pair is not None), 0)

    def next_exact(self) -> LayerRecord | None:
        """Return the record that replaces the output of the mixer that is called next; None without one."""
        if self.exact is None:
            return None
        return self.exact.layers[len(self.calls)]


# transformers calls the hooks by name and with its own arguments, so they find the recording here.
_recording: contextvars.ContextVar[_Recording] = contextvars.ContextVar("recording")


class TorchModel:
    """The first layers of a model in torch. Raises InputError where it does not use the attention interface."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, layers: int | str):
        self.model = mapped_model(config, weights, layers, HOOK)
        round_activations(self.model, weights, layers)

    def embed(self, token_ids: np.ndarray, dtype: torch.dtype = torch.float32) -> np.ndarray:
        """Return the embedded tokens, float32 [num_tokens, hidden_size], as a model of `dtype` has them."""
        with Rounded(dtype), torch.no_grad():
            ids = torch.from_numpy(np.ascontiguousarray(token_ids))
            return _numpy(embed(self.model, layer_list(self.model)[1][0], ids))

    def noisy_embed(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the same of a model in fp16; beyond its range the errors are those of bf16, scaled."""
        return noisy(self.embed(token_ids), lambda dtype: self.embed(token_ids, dtype))

    def record(
        self,
        token_ids: np.ndarray,
        past: Past = (),
        embedded: np.ndarray | None = None,
        dtype: torch.dtype = torch.float32,
        exact: Record | None = None,
    ) -> Record:
        """Run one sequence (int64, 1-D) and record it.

        past: for each mixer the keys [num_past, num_kv_heads, head_dim] (as after RoPE) and values of a synthetic cache
        before the sequence, None for one with a state. Each layer's own queries and keys are then scaled so that every
        cache row has some weight. embedded: instead of the embedded tokens, [num_tokens, hidden_size]. dtype: of the
        model. exact: the record whose activations each layer and each mixer continues with.
        """
        recording = _Recording(_caches(past, dtype), exact=exact)
        entered = dict[int, np.ndarray]()
        ids = torch.from_numpy(np.ascontiguousarray(token_ids))
        if embedded is None:
            inputs = {"input_ids": ids[None]}
            embedded = self.embed(token_ids, dtype)
        else:
            inputs = {"inputs_embeds": torch.from_numpy(embedded.astype(np.float32))[None].to(dtype)}
        cache: dict[str, Any] = {"use_cache": False}
        if recording.past:
            cache = {"past_key_values": TokensBefore(self.model.config, recording.num_past), "use_cache": True}
        with self._hooked(recording, dtype), _hidden_replaced(self.model, exact, entered):
            # Some classes (Bamba) count new tokens from 0 whatever the cache holds.
            positions = (recording.num_past + torch.arange(len(ids)))[None]
            output = self.model(**inputs, position_ids=positions, output_hidden_states=exact is None, **cache)
        hidden = entered
        if exact is None:
            hidden = {index: _numpy(state[0]) for index, state in enumerate(output.hidden_states)}
        mixed = [call["layer"] for call in recording.calls]
        if mixed != sorted(mixed) or mixed[:1] != [0]:  # layers without a mixer are checked with the graphs
            raise InputError(
                f"model type {self.model.config.model_type!r}: expected one attention for each of "
                f"{len(layer_list(self.model)[1])} layers, or the first of them and others, through transformers' "
                f"attention interface, found layers {mixed}; this model cannot be validated"
            )
        layers = tuple(LayerRecord(hidden=hidden[call["layer"]], **call) for call in recording.calls)
        return Record(np.asarray(token_ids, np.int64), embedded, layers, _numpy(output.logits[0]), recording.num_past)

    def noisy(self, exact: Record, past: Past = ()) -> Record:
        """Return the record of the model in fp16, each layer on the activations of `exact`.

        exact: the record of the same tokens and `past`. Of a model that exceeds fp16's range the errors are those of
        bf16, scaled. Raises InputError where these are not finite either.
        """
        for dtype, rounding in NOISE_DTYPES:
            rounded = self.record(exact.token_ids, past, dtype=dtype, exact=exact)
            scaled = replace(
                exact,
                embedded=interpolate(exact.embedded, rounded.embedded, 1 / rounding),
                layers=tuple(layer.toward(other, 1 / rounding) for layer, other in zip(exact.layers, rounded.layers)),
                logits=interpolate(exact.logits, rounded.logits, 1 / rounding),
            )
            if scaled.is_finite():
                return scaled
        raise InputError(
            f"model type {self.model.config.model_type!r}: expected finite numbers of its weights rounded to bfloat16, "
            "found NaN or infinity; are these weights whole?"
        )

    @contextlib.contextmanager
    def _hooked(self, recording: _Recording, dtype: torch.dtype) -> Iterator[None]:
        _recording.set(recording)
        layers = list(layer_list(self.model)[1])
        with replaced(self.model, _FUNCTIONS), numbered(layers, range(len(layers))), Rounded(dtype), torch.no_grad():
            yield

    @contextlib.contextmanager
    def adapted(self, modules: Mapping[str, tuple[np.ndarray, np.ndarray]], columns: np.ndarray) -> Iterator[None]:
        """Add adapters to linear layers: x A B, for each token with the columns of A of its adapter.

        modules: of each, A [in_features, columns] and B [columns, out_features], float32 or narrower. columns
        [num_tokens, columns]: 1 for those of the token's adapter, else 0.
        """
        chosen = torch.from_numpy(columns.astype(np.float32))

        def add(a: torch.Tensor, b: torch.Tensor, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output + (inputs[0] @ a * chosen) @ b

        layers = dict(self.model.named_modules())
        with contextlib.ExitStack() as hooks:
            for name, arrays in modules.items():
                a, b = (torch.from_numpy(array.astype(np.float32)) for array in arrays)
                hooks.enter_context(layers[name].register_forward_hook(functools.partial(add, a, b)))
            yield

    def logits(self, hidden: np.ndarray, dtype: torch.dtype = torch.float32) -> np.ndarray:
        """Return the logits [num_tokens, vocab_size] of embedded tokens [num_tokens, hidden_size], in `dtype`."""
        return self.record(np.zeros(len(hidden), np.int64), embedded=hidden, dtype=dtype).logits


@contextlib.contextmanager
def _hidden_replaced(model: Any, exact: Record | None, entered: dict[int, np.ndarray]) -> Iterator[None]:
    """Replace each layer's hidden state by that of `exact`; the model's own goes to `entered`."""
    hidden_states = {}
    if exact is not None:
        hidden_states = {layer.layer: layer.hidden for layer in exact.layers}

    def before(
        index: int, module: Any, args: Sequence[Any], options: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        hidden_in = args[0] if args else options["hidden_states"]
        if index not in hidden_states:  # without a token mixer
            return args, options
        hidden = torch.from_numpy(hidden_states[index])[None]
        if hidden.shape != hidden_in.shape:  # several residual streams, of which transformers returns one
            entered[index] = hidden_states[index]
            return args, options
        entered[index] = _numpy(hidden_in[0])
        hidden = hidden.to(hidden_in.dtype)
        if args:  # models differ in how they call their layers
            return (hidden, *args[1:]), options
        return args, {**options, "hidden_states": hidden}

    with contextlib.ExitStack() as hooks:
        for index, layer in enumerate(layer_list(model)[1]):
            hook = functools.partial(before, index)
            hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _record_attention(
    module: Any,  # with a layer_idx, which torch.nn.Module does not declare
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention for transformers, and record it.

    query: [1, num_heads, num_tokens, head_dim]. key, value: [1, num_kv_heads, ...]. Raises InputError for a layer that
    is called twice.
    """
    recording = _recording.get()
    eager = eager_attention(module)
    exact = recording.next_exact()
    if any(call["layer"] == module.layer_idx and not call["states"] for call in recording.calls):
        raise InputError(
            f"{type(module).__name__}: expected one attention in layer {module.layer_idx}, "
            f"found two; this model cannot be validated"
        )
    scales: dict[str, float] = {}
    if recording.past and (pair := recording.past[len(recording.calls)]) is not None:
        past_key, past_value = pair
        key = torch.cat([past_key, key], 2)
        value = torch.cat([past_value, value], 2)
        query, key, scales = _scaled(query, key, past_key.shape[2], options.get("scaling"), exact)
    attention, weights = eager(module, query, key, value, attention_mask, **options)
    recorded = {"keys": _by_token(key), "values": _by_token(value), "attention": _numpy(attention[0].flatten(1))}
    recording.calls.append({"layer": int(module.layer_idx), "states": {}, **recorded, **scales})
    if exact:
        attention = torch.from_numpy(exact.attention).to(attention.dtype).reshape(attention.shape)
    return attention, weights


def _record_convolution(
    original: Any, hidden_states: torch.Tensor, weight: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """Compute a causal convolution, and record its windows. hidden_states: [1, size, num_tokens]."""
    recording = _recording.get()
    size, width = weight.shape
    exact = recording.next_exact()
    tokens = hidden_states[0].t()
    rows = torch.cat([tokens.new_zeros(width - 1, size), tokens])
    window = _numpy(rows.unfold(0, width, 1).transpose(1, 2).flatten(1))
    states = {count: _numpy(rows[None, count : count + width - 1]) for count in _state_counts(len(tokens))}
    recording.calls.append(_state_call(window, states))
    if exact:  # the last column of each window is the token itself
        hidden_states = torch.from_numpy(exact.attention[:, -size:].T)[None].to(hidden_states.dtype)
    return original(hidden_states, weight, *arguments, **options)


def _record_delta_rule(original: Any, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule for transformers, and record it; tensors are [1, num_tokens, heads, size]."""
    bound = bound_arguments(original, arguments, options)
    output, state = original(**{**bound, "output_final_state": True})
    return _record_recurrence(delta_inputs(**bound), output), state


def _record_scan(original: Any, *arguments: Any, **options: Any) -> Any:
    """Compute Mamba-2's scan for transformers, and record it without the skip connection D, which has no state."""
    bound = bound_arguments(original, arguments, options)
    output, state = original(**{**bound, "D": None, "return_final_states": True})
    output = _record_recurrence(scan_inputs(**bound), output)
    if bound.get("D") is not None:
        output = output + bound["D"][..., None] * bound["hidden_states"].float()
    if bound.get("return_final_states"):
        return output, state
    return output


def _record_recurrence(inputs: Recurrent, output: torch.Tensor) -> torch.Tensor:
    recording = _recording.get()
    exact = recording.next_exact()
    recording.calls.append(_state_call(_numpy(output[0].flatten(1)), _states(inputs)))
    if exact is None:
        return output
    return torch.from_numpy(exact.attention).to(output.dtype).reshape(output.shape)


def _states(inputs: Recurrent) -> dict[int, np.ndarray]:
    """Return the states [1, value_heads, key_dim, value_dim] of a recurrence after `_state_counts` of its tokens."""
    count, heads, size = inputs.value.shape
    group = heads // inputs.key.shape[1]
    keys = inputs.key.repeat_interleave(group, 1)
    state = inputs.value.new_zeros(heads, inputs.key.shape[2], size)
    states = {0: _numpy(state[None])}
    for number, (key, value, decay) in enumerate(zip(keys, inputs.value, inputs.decay), 1):
        state = state * decay.exp()[:, None, None]
        if inputs.beta is not None:
            value = (value - (key[:, None] @ state)[:, 0]) * inputs.beta[number - 1, :, None]
        state = state + key[:, :, None] * value[:, None]
        states[number] = _numpy(state[None])
    return {number: states[number] for number in _state_counts(count)}


def _state_call(output: np.ndarray, states: Mapping[int, np.ndarray]) -> dict[str, Any]:
    return {"layer": current_layer.get(), "attention": output, "states": states, "keys": _NONE, "values": _NONE}


def _state_counts(count: int) -> list[int]:
    """Return after how many of a sequence's `count` tokens its states are recorded."""
    return sorted({0, count // 2, count - 1, count})


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _record_convolution,
    "torch_chunk_gated_delta_rule": _record_delta_rule,
    "mamba2_chunk_scan": _record_scan,
}


def _scaled(
    query: torch.Tensor, key: torch.Tensor, num_past: int, scaling: float | None, exact: LayerRecord | None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Scale queries to scores of standard deviation _SCORES, and keys to rms one.

    The scores are against standard normal keys; the keys are the new ones. RoPE is linear, so the graphs may scale
    their queries and keys before it. A norm after RoPE (Llama 4) would undo that, so normalised ones are not scaled.
    exact: of a layer that is rounded, the record of the exact one.
    """
    squares = [x.square().mean(-1) for x in (query, key[:, :, num_past:])]
    query_rms, key_rms = (max(float(square.mean().sqrt()), 1e-6) for square in squares)
    if scaling is None:  # as in transformers
        scaling = query.shape[-1] ** -0.5
    query_scale = _SCORES / (abs(scaling) * query.shape[-1] ** 0.5 * query_rms)
    key_scale = 1 / key_rms
    if all(bool(((square - 1).abs() < 0.01).all()) for square in squares):
        query_scale = 1.0
        key_scale = 1.0
    if exact:  # both sides of the noise must have the same factors
        query_scale = exact.query_scale
        key_scale = exact.key_scale
    key = torch.cat([key[:, :, :num_past], key[:, :, num_past:] * key_scale], 2)
    return query * query_scale, key, {"query_scale": query_scale, "key_scale": key_scale}


def _caches(past: Past, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for pair in past:
        if pair is None:
            pairs.append(None)
        else:
            pairs.append((_by_head(pair[0]).to(dtype), _by_head(pair[1]).to(dtype)))
    return pairs


def _by_token(heads: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(_numpy(heads[0].transpose(0, 1)))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy()


def _by_head(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.swapaxes(0, 1)))[None]


AttentionInterface.register(HOOK, _record_attention)
AttentionMaskInterface.register(HOOK, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
