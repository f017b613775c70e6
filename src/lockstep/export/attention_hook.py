"""Replace the attention and the mask that transformers calls during a trace.

In: the arguments of transformers' `AttentionInterface`. Out: one `Attention` marker, with the layer's actual scale,
soft cap and sliding window; an InputError with the reason for attention that a parameter-free graph cannot carry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from lockstep.config.model_config import chunk_size
from lockstep.errors import InputError
from lockstep.export.markers import marker

HOOK = "lockstep"
_PROBED = 300  # tokens beyond a window at which a mask is evaluated

# Arguments besides scale, soft cap and window that change nothing here, with the reason. Any other that is passed is
# rejected.
HARMLESS = {
    "dropout": "exports run in evaluation mode, where it is zero",
    "sliding_window": "read by flash attention alone; the mask of eager attention says the same, and is what counts",
    "position_ids": "read by flash attention to separate packed sequences; positions reach queries and keys through "
    "RoPE",
    "output_attentions": "asks for the weights besides the result",
    "output_hidden_states": "asks for the layers' outputs besides the result",
    "output_router_logits": "asks for the router's logits besides the result",
    "return_dict": "is the form of the result",
    "use_cache": "the cache lives outside the traced model",
    "cache_position": "says where new rows go in a cache, which lives outside the traced model",
    "deterministic": "chooses between kernels of one computation",
    "num_items_in_batch": "scales the loss of training",
    "logits_to_keep": "says which logits are computed, after all attention",
}
# The meaning of arguments that are known to be rejected.
_MEANING = {
    "sinks": "attention sinks (learned keys or logits next to the scores)",
    "block_indices": "sparse attention (it attends to the blocks of keys that an indexer chooses)",
    "indices": "sparse attention (it attends to the keys that an indexer chooses)",
    "position_bias": "a learned bias of relative positions on the scores",
    "relative_position_bias": "a learned bias of relative positions on the scores",
    "alibi": "ALiBi (a bias on the scores that grows with distance)",
    "head_mask": "a mask of heads",
}


def refused_arguments(arguments: dict[str, Any]) -> list[str]:
    """Return why attention with these arguments cannot be split; empty when all are harmless."""
    reasons = []
    for name, value in sorted(arguments.items()):
        if value is None or name in HARMLESS:
            continue
        if name == "is_causal":
            if value is not True:
                reasons.append("attention to later tokens (is_causal is off), as encoders have it")
        elif name in _MEANING:
            reasons.append(f"{_MEANING[name]}, given as {name}")
        else:
            reasons.append(f"the argument {name}, which is not known to be harmless")
    return reasons


def _attention_hook(
    module: Any,  # with a layer_idx, which torch.nn.Module does not declare
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Emit the attention operator, for transformers; query, key, value: [1, heads, num_tokens, head_dim].

    s_aux: attention sinks, a learned logit next to the scores of each head.

    Raises InputError for what the batchless graphs cannot carry.
    """
    reasons = refused_arguments(arguments)
    if reasons:
        raise InputError(f"its attention uses {'; '.join(reasons)}: parameter-free causal attention cannot carry that")
    # Without a mask from transformers the window is an argument, for flash attention.
    if attention_mask is None:
        window = int(arguments.get("sliding_window") or 0)
    elif isinstance(attention_mask, Mask):
        window = attention_mask.window
    else:
        raise InputError(
            "its attention gets a mask or bias that the model makes itself: parameter-free "
            "causal attention cannot carry that"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if s_aux is not None and s_aux.shape != (query.shape[1],):
        raise InputError(
            f"its attention has sinks of shape {list(s_aux.shape)}, expected one of each of {query.shape[1]} heads:"
            " parameter-free causal attention cannot carry that"
        )
    # The marker takes [num_tokens, heads, head_dim]; the batch dimension is 1.
    inputs = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    shape = (*inputs[0].shape[:2], value.shape[-1])
    if s_aux is not None:
        inputs.append(s_aux)
    numbers = {"scale": float(scaling), "softcap": float(softcap or 0.0), "window": window}
    output = marker("Attention", inputs, shape, layer=int(module.layer_idx), **numbers)
    return output.unsqueeze(0), None


# --- the mask ---


@dataclass(frozen=True)
class Mask:
    """A causal mask with a sliding window (0: none). A model may pass it on, but not compute with it."""

    window: int

    def __getattr__(self, name: str) -> Any:
        raise InputError(_CHANGED)

    def _used(self, *_: Any) -> Any:
        raise InputError(_CHANGED)

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = __invert__ = (
        __len__
    ) = __iter__ = _used

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise InputError(_CHANGED)


_CHANGED = (
    "its layers change the attention mask or choose themselves which tokens they attend to: "
    "parameter-free causal attention cannot carry that"
)


def _mask_hook(
    *,
    mask_function: Callable,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> Mask:
    """Make a mask, for transformers; mask_function: (batch, head, query, key) -> whether the query sees the key."""
    chunk = chunk_size(lambda key: getattr(config, key, None))
    return Mask(window_of(mask_function, local_size, chunk))


def window_of(mask_function: Callable, local_size: int | None = None, chunk: int | None = None) -> int:
    """Return the sliding window of a causal mask, 0 without one.

    local_size: the window or chunk as transformers names it; chunk: the size of a chunk, after which the positions end
    (`rope.position_limit`). Raises InputError for a mask that lets a token see later ones or depends on more than the
    distance.
    """
    if local_size is not None and local_size == chunk:  # in the first chunk, all that is run, each token sees all
        return 0
    # The mask is a function: probe it at rows far beyond any window, all of which must see the same number of keys.
    first = (local_size or 0) + _PROBED
    widths = set()
    for position in (first, first + 1, first + 37):
        visible = _visible_keys(mask_function, position, position + 3)
        if visible[-1:] > [position]:
            raise InputError(
                "its attention lets tokens see later ones, as encoders do (is_decoder or "
                "use_bidirectional_attention in config.json says which)"
            )
        if visible != list(range(position + 1 - len(visible), position + 1)):
            raise InputError("its attention mask has holes: parameter-free causal attention cannot carry that")
        sees_all = len(visible) == position + 1
        widths.add(0 if sees_all else len(visible))
    if len(widths) != 1:
        raise InputError(
            "its attention mask depends on more than the distance between tokens (chunks, or "
            "blocks): parameter-free causal attention cannot carry that"
        )
    return widths.pop()


def _visible_keys(mask_function: Callable, query: int, num_keys: int) -> list[int]:
    """Return which of the first `num_keys` keys the query at position `query` sees."""
    # A trace is running: without this the mask would be traced and have no values.
    with disable_proxy_modes_tracing(), _disable_current_modes():
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        keys = torch.arange(num_keys, device="cpu")
        try:
            mask = torch.as_tensor(mask_function(zero, zero, torch.full_like(keys, query), keys)).expand(num_keys)
            return mask.nonzero().flatten().tolist()
        except Exception as error:  # a mask that depends on tokens, which a trace does not have
            raise InputError(
                f"its attention mask depends on the tokens themselves ({type(error).__name__}): "
                f"parameter-free causal attention cannot carry that"
            ) from error


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Let a trace have one sequence, whatever its positions.

    transformers takes positions that do not follow one another for several sequences, and makes masks of their values;
    a trace has no values.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # "one sequence"
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


AttentionInterface.register(HOOK, _attention_hook)
AttentionMaskInterface.register(HOOK, _mask_hook)
