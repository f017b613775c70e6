"""What a graph and its engine are compared on: a graph, an assembly and the limits in; sizes and seeded arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from lockstep.engine.prepare import dtype_name
from lockstep.engine.tensorrt.profiles import LIMITS, profiles
from lockstep.errors import CheckError

SEED = 0
Sizes = dict[str, int]
_MODEST = 32  # tokens: enough for a matrix product to be one, and a 7B block on a CPU takes seconds
_POSITIONS = 64  # of a model that says nothing of how many it has


def sizes(model: onnx.ModelProto, assembly: Mapping[str, Any], limits: Mapping[str, Any]) -> list[Sizes]:
    """{dimension: size} for each optimization profile of a graph: the largest that the profile takes, up to 32 tokens; the smallest where that is more.

    Lengths stay below half the model's positions, so that a past and the tokens behind it have valid positions.
    """
    modest = min(_MODEST, max(1, _positions(assembly, limits) // 2))
    shapes = {value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    found = []
    for profile in profiles(model, limits):
        bounds = {}
        for name, (low, _, high) in profile.items():
            bounds.update({dim: (least, most) for dim, least, most in zip(shapes[name], low, high) if dim})
        found.append({dim: max(least, min(modest, most)) for dim, (least, most) in sorted(bounds.items())})
    return found


def arrays(model: onnx.ModelProto, slots: Mapping[str, Any], chosen: Sizes, assembly: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Seeded values for all inputs of a graph but its weights (`slots`): activations N(0, 1), as a norm gives them; integers are valid.

    Raises CheckError for an integer input of unknown meaning.
    """
    random, found = np.random.default_rng(SEED), {}
    lengths = None
    if "past_capacity" in chosen:  # empty, full and between; a single one is half full
        requests, capacity = chosen.get("num_requests", 1), chosen["past_capacity"]
        lengths = np.linspace(0, capacity, requests).astype(np.int64) if requests > 1 else np.array([capacity // 2])
    for value in model.graph.input:
        if value.name in slots:
            continue
        shape = [dim.dim_value or chosen[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        dtype = np.dtype(dtype_name(value.type.tensor_type.elem_type))
        if dtype.kind == "f":
            found[value.name] = random.standard_normal(shape, np.float32).astype(dtype)
        elif value.name == "token_ids":
            found[value.name] = random.integers(0, assembly["vocab_size"], shape, np.int64)
        elif value.name == "logit_rows":
            found[value.name] = np.linspace(0, chosen["num_tokens"] - 1, shape[0]).astype(np.int64)
        elif value.name == "past_lengths":
            found[value.name] = lengths
        elif value.name == "position_ids":
            found[value.name] = _position_ids(shape[0], lengths, _positions(assembly, limits))
        else:
            raise CheckError(f"graph {model.graph.name}: expected integers that a decoder step has, found the input {value.name}; export again")
    return found


def _position_ids(count: int, lengths: np.ndarray | None, positions: int) -> np.ndarray:
    """A token's position is the length of what lies before it. Without a cache all positions are valid: from the first to the last."""
    if lengths is None:
        return np.linspace(0, positions - 1, count).astype(np.int64) if count > 1 else np.array([positions - 1])
    return lengths if len(lengths) == count else lengths[0] + np.arange(count)


def _positions(assembly: Mapping[str, Any], limits: Mapping[str, Any]) -> int:
    """Positions that a request can have."""
    return min(assembly["max_position_embeddings"] or _POSITIONS, limits["max_seq_len"])


def limits_of(options: Mapping[str, Any]) -> dict[str, int]:
    """The limits that an engine set was built for; those of a small one where its backend has engines of any size."""
    return {name: options.get(name, default) for name, default in zip(LIMITS, (4, 512, 256))}
