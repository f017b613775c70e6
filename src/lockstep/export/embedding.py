"""The embedding of token ids before a model's layers.

In: a model in torch. Out: the tensor that the model accepts as `inputs_embeds` instead of ids: the output of its
embedding module, or the input of its first layer if the model scales it outside that module (Falcon-H1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel


class _ReachedError(Exception):
    """The first layer was called."""


def is_changed(model: PreTrainedModel, first_layer: torch.nn.Module) -> bool:
    """Return whether a model changes the output of its embedding module, but not `inputs_embeds`."""
    embedding: Any = model.get_input_embeddings()
    embedded = torch.zeros(1, 1, embedding.weight.shape[1], dtype=model.dtype)
    outputs: list[torch.Tensor] = []
    hook = embedding.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        # Identity of tensors tells: any operation in between, even by a factor of 1, makes another one.
        hidden = _hidden_at_entry(model, first_layer, input_ids=torch.zeros(1, 1, dtype=torch.int64))
        if hidden is outputs[0]:
            return False
        return _hidden_at_entry(model, first_layer, inputs_embeds=embedded) is embedded
    except Exception:  # a model that cannot run this way: its trace or parity check says why
        return False
    finally:
        hook.remove()


def embed(model: PreTrainedModel, first_layer: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the embedded tokens [num_tokens, hidden_size] of one sequence."""
    if is_changed(model, first_layer):
        return _hidden_at_entry(model, first_layer, input_ids=token_ids[None])[0]
    embedded: torch.Tensor = model.get_input_embeddings()(token_ids)
    return embedded


def _hidden_at_entry(model: PreTrainedModel, first_layer: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the hidden state that the first layer is called with, without running it."""
    with torch.no_grad(), contextlib.suppress(_ReachedError), at_entry(first_layer, None) as entered:
        model(**inputs, use_cache=False)
    return entered[0]


@contextlib.contextmanager
def at_entry(first_layer: torch.nn.Module, hidden: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """Yield a list for the hidden state that a layer is called with.

    hidden: what the layer runs on instead; None: it does not run.
    """
    entered: list[torch.Tensor] = []

    def enter(module: Any, args: Any, options: Any) -> Any:
        if args:
            entered.append(args[0])
            replaced = (hidden, *args[1:]), options
        else:
            entered.append(options["hidden_states"])
            replaced = args, options | {"hidden_states": hidden}
        if hidden is None:
            raise _ReachedError
        return replaced

    hook = first_layer.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield entered
    finally:
        hook.remove()
