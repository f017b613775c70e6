"""What a model makes of token ids before its layers.

In: a model in torch. Out: the tensor that it takes as `inputs_embeds` in place of the ids: what its embedding module
gives, but of a model that scales it outside (Falcon-H1) what its first layer is called with.
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
    """Return whether a model changes what its embedding gives, and takes `inputs_embeds` as they are."""
    embedding: Any = model.get_input_embeddings()
    given = torch.zeros(1, 1, embedding.weight.shape[1], dtype=model.dtype)
    outputs: list[torch.Tensor] = []
    hook = embedding.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        of_ids = _entered(model, first_layer, input_ids=torch.zeros(1, 1, dtype=torch.int64))
        return of_ids is not outputs[0] and _entered(model, first_layer, inputs_embeds=given) is given
    except Exception:  # of a model that cannot be run so its trace or parity check says why
        return False
    finally:
        hook.remove()


def embed(model: PreTrainedModel, first_layer: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the embedded tokens [num_tokens, hidden_size] of one sequence."""
    if is_changed(model, first_layer):
        return _entered(model, first_layer, input_ids=token_ids[None])[0]
    embedded: torch.Tensor = model.get_input_embeddings()(token_ids)
    return embedded


def _entered(model: PreTrainedModel, first_layer: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the hidden state that the first layer is called with; what follows is not run."""
    with torch.no_grad(), contextlib.suppress(_ReachedError), at_entry(first_layer, None) as entered:
        model(**inputs, use_cache=False)
    return entered[0]


@contextlib.contextmanager
def at_entry(first_layer: torch.nn.Module, hidden: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """Yield what will hold the hidden state that a layer is called with; it goes on with `hidden`, or not at all."""
    entered: list[torch.Tensor] = []

    def enter(module: Any, args: Any, options: Any) -> Any:
        entered.append(args[0] if args else options["hidden_states"])
        if hidden is None:
            raise _ReachedError
        return ((hidden, *args[1:]), options) if args else (args, options | {"hidden_states": hidden})

    hook = first_layer.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield entered
    finally:
        hook.remove()
