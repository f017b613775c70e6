"""Optimization profiles from the limits: for each {input: (min, opt, max)}; it is tuned for the second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from lockstep.errors import InputError
from lockstep.targets import Limits

Shape = tuple[int, ...]
Sizes = tuple[dict[str, int], dict[str, int], dict[str, int]]  # the smallest, best and largest of each dimension
Profile = dict[str, tuple[Shape, Shape, Shape]]
LIMITS = ("max_batch_size", "max_num_tokens", "max_seq_len")
# Tokens of prompts that blocks are tuned for besides `max_num_tokens`. A 7B step tuned for 2048 alone takes 34 us a
# token at 512 (H200, fp16), and 25 us at 2048. More sizes would make each build longer.
PROMPT_SIZES = (512, 1024)


def built_limits(options: Mapping[str, Any]) -> Limits:
    """Return the limits that the optimization profiles of a build are made for, from its options."""
    return Limits(**{name: options[name] for name in LIMITS})


def profiles(model: onnx.ModelProto, limits: Limits) -> list[Profile]:
    """Return the optimization profiles of a graph.

    A block has one for each range of decoding rows, for each range of tokens of prompts, and for any number of tokens.
    There is one without inputs where nothing is dynamic. Raises InputError for a limit below 1 or a dimension that has
    no limit.
    """
    for name in LIMITS:
        limit = getattr(limits, name)
        if not isinstance(limit, int) or limit < 1:
            raise InputError(f"{name}: expected at least 1, found {limit!r}")
    if limits.max_num_tokens < limits.max_batch_size:
        raise InputError(
            f"max_num_tokens: expected at least max_batch_size ({limits.max_batch_size}), found {limits.max_num_tokens}"
        )
    shapes = {}
    for value in model.graph.input:
        shapes[value.name] = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
    return [_profile(shapes, sizes) for sizes in _sizes(shapes, limits)]


def decode_ranges(max_batch_size: int) -> list[tuple[int, int]]:
    """Return the ranges of decoding rows that have a profile each.

    They are 1, 2 to 4, 5 to 8, 9 to 16, 17 to 32 ..., as far as `max_batch_size` goes. Decode graphs are captured for
    powers of two of rows, so each runs in a profile that is tuned for just it: a 7B step of 64 rows takes 9.1 ms so,
    and 10.3 ms in one for 33 to 128.
    """
    ranges = [(1, 1)]
    low = 2
    top = 4
    while low <= max_batch_size:
        ranges.append((low, min(top, max_batch_size)))
        low = top + 1
        top = 2 * top
    return ranges


def prompt_ranges(max_batch_size: int, max_num_tokens: int) -> list[tuple[int, int]]:
    """Return the ranges of prompt tokens, above those of decoding rows; a profile is tuned for the top of each."""
    tops = [size for size in PROMPT_SIZES if max_batch_size < size < max_num_tokens]
    return [(low + 1, top) for low, top in zip([max_batch_size, *tops], tops)]


def _sizes(shapes: Mapping[str, Sequence[int | str]], limits: Limits) -> list[Sizes]:
    """Return the sizes of each profile.

    A block that decodes one request is tuned for just that: measured, a 7B block takes 112 us so, and 134 us when tuned
    for 16. A step that takes `max_num_tokens` of prompts may carry one more token for each row that decodes. An exit
    takes its rows first: however many tokens come, it computes one row for each request, so its ranges are of requests;
    a prompt's row goes to the first that takes many tokens. An embedding looks up, at any size alike.
    """
    names = set[str]()
    for shape in shapes.values():
        names.update(dim for dim in shape if isinstance(dim, str))
    requests = limits.max_batch_size
    tokens = limits.max_num_tokens
    capacity = limits.max_seq_len
    smallest = {"num_tokens": 1, "num_requests": 1, "past_capacity": 1}
    best = {"num_tokens": tokens, "num_requests": requests, "past_capacity": capacity}
    largest = {**best, "num_tokens": tokens + requests}
    unknown = sorted(names - set(smallest))
    if unknown:
        raise InputError(f"dimension: expected one of {', '.join(smallest)}, found {', '.join(unknown)}")
    any_size = (smallest, best, largest)
    if "num_tokens" not in names or "past_capacity" in names or "token_ids" in shapes:
        return [any_size]
    one_row = (smallest, smallest, smallest)
    ranges = decode_ranges(requests)
    if "num_requests" in names:
        ranges = ranges[1:] or ranges
        ranges[0] = (1, ranges[0][1])  # also of one request, that may have many tokens
        sizes = [one_row]
        for low, high in ranges:
            tuned = {**best, "num_requests": high}
            sizes.append((dict.fromkeys(smallest, low), tuned, {**largest, "num_requests": high}))
        return sizes
    sizes = [one_row]
    ranges = [*ranges[1:], *prompt_ranges(requests, tokens)]
    if "position_ids" in shapes:
        # TensorRT 10.6 computes RoPE wrong in a profile of one size (records/tensorrt.md, Hunyuan).
        sizes = [(smallest, smallest, {**smallest, "num_tokens": 2})]
        ranges = [(min(low, high - 1), high) for low, high in ranges]
    for low, high in ranges:
        tuned = {**best, "num_tokens": high}
        sizes.append(({**smallest, "num_tokens": low}, tuned, tuned))
    return [*sizes, any_size]


def _profile(shapes: Mapping[str, Sequence[int | str]], sizes: Sizes) -> Profile:
    profile = {}
    for name, shape in shapes.items():
        if any(isinstance(dim, str) for dim in shape):
            smallest, best, largest = (_fill(shape, values) for values in sizes)
            profile[name] = (smallest, best, largest)
    return profile


def _fill(shape: Sequence[int | str], values: Mapping[str, int]) -> Shape:
    sizes = list[int]()
    for dim in shape:
        sizes.append(values[dim] if isinstance(dim, str) else dim)
    return tuple(sizes)
