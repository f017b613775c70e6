"""Replace transformers' functions of recurrent layers by markers during a trace.

In: calls of the functions that transformers' recurrent layers share. Out: marker operators without parameters, whose
past is a state of fixed size; operators with weights surround them and work token by token. So no model needs custom
code.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from lockstep.errors import InputError
from lockstep.export.markers import marker

current_layer: contextvars.ContextVar[int] = contextvars.ContextVar("layer")


def _convolution(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """Replace `causal_conv1d_fn`; hidden_states [1, size, num_tokens], weight [size, width]."""
    _check_one_sequence(options)
    size, width = weight.shape
    # The window alone is a marker: its weighted sum has a weight, and stays in the block.
    value = hidden_states.to(weight.dtype)[0].t()
    window = marker("TokenWindow", [value], (value.shape[0], width * size), layer=current_layer.get(), width=width)
    output = (window.view(-1, width, size) * weight.t()).sum(1)
    if bias is not None:
        output = output + bias
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype).t()[None]


@dataclass(frozen=True)
class Recurrent:
    """The inputs of a recurrence, float32.

    query, key [num_tokens, key_heads, size], value [num_tokens, value_heads, size], decay (a logarithm) and beta
    [num_tokens, value_heads]; beta None: plain linear attention.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None

    def marker(self, op_type: str) -> torch.Tensor:
        inputs = (self.query, self.key, self.value, self.decay, self.beta)
        flat = [value.flatten(1) for value in inputs if value is not None]
        heads = {"key_heads": self.key.shape[1], "value_heads": self.value.shape[1]}
        return marker(op_type, flat, flat[2].shape, layer=current_layer.get(), **heads).view(self.value.shape)


def delta_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> Recurrent:
    """Return the inputs of the delta rule from arguments of `torch_chunk_gated_delta_rule`, [1, num_tokens, ...]."""
    _check_one_sequence(options)
    query, key, value, g, beta = (tensor[0].float() for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query = _l2_norm(query)
        key = _l2_norm(key)
    return Recurrent(query * query.shape[-1] ** -0.5, key, value, g, beta)


def _l2_norm(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + 1e-6)


def _delta_rule(original: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
    bound = bound_arguments(original, arguments, options)
    return delta_inputs(**bound).marker("DeltaRule").to(bound["value"].dtype)[None], None


def scan_inputs(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Recurrent:
    """Return the inputs of linear attention from arguments of `mamba2_chunk_scan`, [1, num_tokens, ...]."""
    _check_one_sequence(options)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    low, high = dt_limit
    # TensorRT's parser refuses a Clip with an infinite limit.
    step = torch.clamp(dt, low, None if isinf(high) else high)[0].float()
    value = hidden_states[0].float() * step[..., None]
    return Recurrent(C[0].float(), B[0].float(), value, A.float() * step, None)


def _scan(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    bound = bound_arguments(original, arguments, options)
    output = scan_inputs(**bound).marker("LinearAttention")[None]
    if bound.get("D") is not None:
        output = output + bound["D"][..., None] * bound["hidden_states"].float()
    return (output, None) if bound.get("return_final_states") else output


def bound_arguments(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments {name: value}, with those in its `**kwargs` too."""
    bound = inspect.signature(function).bind(*arguments, **options).arguments
    extra = bound.pop("kwargs", {})
    return bound | extra


def _check_one_sequence(options: Mapping[str, Any]) -> None:
    """Raise InputError for arguments that separate packed sequences: the graphs get one sequence after another."""
    for name in ("seq_idx", "cu_seqlens", "cu_seq_lens_q"):
        if options.get(name) is not None:
            raise InputError(f"its recurrent layers are told of packed sequences ({name}); expected one sequence")


# What transformers' recurrent layers call, by name in their modules, and what a trace has instead.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _scan,
}


@contextlib.contextmanager
def replaced(model: PreTrainedModel, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions by name in the Python modules of a model's classes; the original becomes the first argument."""
    module_names = sorted({type(module).__module__ for module in model.modules()})
    originals = []
    for python_module in [sys.modules[name] for name in module_names]:
        for name in functions:
            if hasattr(python_module, name):
                originals.append((python_module, name, getattr(python_module, name)))
    for python_module, name, original in originals:
        setattr(python_module, name, functools.partial(functions[name], original))
    try:
        yield
    finally:
        for python_module, name, original in originals:
            setattr(python_module, name, original)


@contextlib.contextmanager
def numbered(layers: Iterable[torch.nn.Module], numbers: Sequence[int]) -> Iterator[None]:
    """Set `current_layer` to the number of a layer while it runs: the functions are not told which layer calls."""

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        current_layer.set(number_of[module])

    number_of = dict(zip(layers, numbers, strict=True))
    hooks = [layer.register_forward_pre_hook(enter) for layer in number_of]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
