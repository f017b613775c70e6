"""Optimization profiles from the limits: which sizes an engine must take, and for which it is tuned.

In: a graph's inputs with their dimension names, and the limits. Out: for each profile {input: (min, opt, max)}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from lockstep.errors import InputError

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
LIMITS = ("max_batch_size", "max_num_tokens", "max_seq_len")


def profiles(model: onnx.ModelProto, limits: Mapping[str, int]) -> list[Profile]:
    """The profiles of a graph; the decode profile comes before the prefill profile. One without inputs where nothing is dynamic.

    Raises InputError for a limit below 1 or a dimension that has no limit.
    """
    for name in LIMITS:
        if not isinstance(limits[name], int) or limits[name] < 1:
            raise InputError(f"{name}: expected at least 1, found {limits[name]!r}")
    if limits["max_num_tokens"] < limits["max_batch_size"]:
        raise InputError(f"max_num_tokens: expected at least max_batch_size ({limits['max_batch_size']}), found {limits['max_num_tokens']}")
    shapes = {value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    return [_profile(shapes, sizes) for sizes in _sizes(shapes, limits)]


def _sizes(shapes: Mapping[str, Sequence[int | str]], limits: Mapping[str, int]) -> list[dict[str, int]]:
    """The largest size by dimension, for each profile. All start at 1 and are tuned for the largest.

    A step that takes `max_num_tokens` of prompts may carry one more token for each row that decodes.
    """
    names = {dim for shape in shapes.values() for dim in shape if isinstance(dim, str)}
    requests, tokens, capacity = (limits[name] for name in LIMITS)
    largest = {"num_tokens": tokens + requests, "num_requests": requests, "past_capacity": capacity}
    unknown = sorted(names - set(largest))
    if unknown:
        raise InputError(f"dimension: expected one of {', '.join(largest)}, found {', '.join(unknown)}")
    if "num_tokens" in names and "past_capacity" not in names:  # a block: one token for each request, then many
        return [{**largest, "num_tokens": requests}, largest]
    return [largest]


def _profile(shapes: Mapping[str, Sequence[int | str]], sizes: Mapping[str, int]) -> Profile:
    low = {name: 1 for name in sizes}
    fill = lambda shape, values: tuple(values[dim] if isinstance(dim, str) else dim for dim in shape)
    return {
        name: (fill(shape, low), fill(shape, sizes), fill(shape, sizes))
        for name, shape in shapes.items()
        if any(isinstance(dim, str) for dim in shape)
    }
