"""PyTorch's activations of a sequence, for checks that run without PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class LayerRecord:
    """One token mixer on one sequence, float32.

    hidden [num_tokens, hidden_size] enters its decoder layer, `layer`. keys (rotated) [num_past + num_tokens,
    num_kv_heads, head_dim] and values [..., value_head_dim] are those that its tokens attend to. attention is
    [num_tokens, num_heads*value_head_dim]. query_scale and key_scale are factors of the layer's own queries and keys:
    1, but for tokens after a synthetic cache. A mixer with a state has `states` instead of keys and values, {number of
    its tokens: state [1, *state] after them}, and attention is its output.
    """

    layer: int
    hidden: np.ndarray
    attention: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    states: Mapping[int, np.ndarray] = field(default_factory=dict)
    query_scale: float = 1.0
    key_scale: float = 1.0

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.hidden, self.attention, self.keys, self.values, *self.states.values()]

    def toward(self, other: LayerRecord, fraction: float) -> LayerRecord:
        """Return the record that is `fraction` of the way to `other`."""
        states = {}
        for count, state in self.states.items():
            states[count] = interpolate(state, other.states[count], fraction)
        return replace(
            self,
            hidden=interpolate(self.hidden, other.hidden, fraction),
            attention=interpolate(self.attention, other.attention, fraction),
            keys=interpolate(self.keys, other.keys, fraction),
            values=interpolate(self.values, other.values, fraction),
            states=states,
        )


def interpolate(first: np.ndarray, second: np.ndarray, fraction: float) -> np.ndarray:
    return first + (second - first) * np.float32(fraction)


@dataclass(frozen=True)
class Record:
    """PyTorch's activations of a sequence after `num_past` tokens of a synthetic cache.

    token_ids [num_tokens] int64, embedded [num_tokens, hidden_size], layers (of each token mixer), logits [num_tokens,
    vocab_size].
    """

    token_ids: np.ndarray
    embedded: np.ndarray
    layers: tuple[LayerRecord, ...]
    logits: np.ndarray
    num_past: int = 0

    def is_finite(self) -> bool:
        layers = itertools.chain.from_iterable(layer.arrays for layer in self.layers)
        return all(np.isfinite(array).all() for array in (self.embedded, self.logits, *layers))

    @property
    def position_ids(self) -> np.ndarray:
        return self.num_past + np.arange(len(self.token_ids), dtype=np.int64)
