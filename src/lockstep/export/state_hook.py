"""What mixes tokens through a state, as transformers' functions do it, during a trace.

In: calls of the functions that transformers' recurrent layers share, by name. Out: marker operators without
parameters, whose past is a state of fixed size; what has weights is computed around them, token by token. So no model
needs code of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from lockstep.errors import InputError

_layer: contextvars.ContextVar[int] = contextvars.ContextVar("layer")

# --- the markers ---


@torch.library.custom_op("lockstep::token_window", mutates_args=())
def token_window_marker(value: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """Give each token [num_tokens, size] beside the width - 1 before it, oldest first: [num_tokens, width * size]."""
    raise RuntimeError("the marker of a token window is traced, never run")


@token_window_marker.register_fake
def _(value: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return value.new_empty(value.shape[0], width * value.shape[1])


# --- the functions of transformers ---


def _convolution(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> torch.Tensor:
    """Stand for `causal_conv1d_fn`; hidden_states [1, size, num_tokens], weight [size, width]."""
    _refuse_packed(rest)
    size, width = weight.shape
    value = hidden_states.to(weight.dtype)[0].t()
    window = torch.ops.lockstep.token_window(value, _layer.get(), width).view(-1, width, size)
    output = (window * weight.t()).sum(1)
    if bias is not None:
        output = output + bias
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype).t()[None]


def _refuse_packed(rest: Mapping[str, Any]) -> None:
    """Refuse arguments that tell packed sequences apart: the graphs get one sequence after another."""
    for name in ("seq_idx", "cu_seqlens", "cu_seq_lens_q"):
        if rest.get(name) is not None:
            raise InputError(f"its recurrent layers are told of packed sequences ({name}); expected one sequence")


_FUNCTIONS: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": _convolution}


@contextlib.contextmanager
def state_markers(model: PreTrainedModel, layers: Sequence[torch.nn.Module], numbers: Sequence[int]) -> Iterator[None]:
    """Let a model's recurrent layers leave markers. numbers: those of its `layers`, which the markers bear."""
    with replaced(model, _FUNCTIONS), numbered(layers, numbers):
        yield


@contextlib.contextmanager
def replaced(model: PreTrainedModel, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions by name in the Python modules of a model's classes; they are given the original first."""
    homes = {name: sys.modules[name] for name in sorted({type(module).__module__ for module in model.modules()})}
    originals = [
        (home, name, getattr(home, name)) for home in homes.values() for name in functions if hasattr(home, name)
    ]
    for home, name, original in originals:
        setattr(home, name, functools.partial(functions[name], original))
    try:
        yield
    finally:
        for home, name, original in originals:
            setattr(home, name, original)


@contextlib.contextmanager
def numbered(layers: Sequence[torch.nn.Module], numbers: Sequence[int]) -> Iterator[None]:
    """Tell what is called inside a layer the layer's number."""
    hooks = [
        layer.register_forward_pre_hook(lambda *_, number=number: _layer.set(number) and None)
        for layer, number in zip(layers, numbers, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def current_layer() -> int:
    """Return the number of the layer that runs, within `numbered`."""
    return _layer.get()
