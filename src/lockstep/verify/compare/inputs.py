"""The inputs on which a graph and its engine are compared.

A graph, an assembly and the limits in; cases of sizes and seeded arrays out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, IDS
from lockstep.artifacts.assembly import Assembly, AttentionVariant
from lockstep.backends.profiles import Profile, profiles
from lockstep.errors import CheckError
from lockstep.onnx_tools.signature import dtype_name
from lockstep.targets import Limits
from lockstep.verify.boundaries import both_sides, edges, synthetic_past

SEED = 0
Sizes = dict[str, int]
_MODEST = 32  # tokens: enough for a matrix product, and a 7B block on a CPU takes seconds
_POSITIONS = 64  # of a model without max_position_embeddings
_CHUNK_TOKENS = 4  # of a chunk after a long cache
CACHE_ROWS = 1 << 14  # of all requests of one case: at the 7B shape half a gigabyte
_SCORES = 0.5  # standard deviation of attention scores against a long cache: then each of its rows has some weight


@dataclass(frozen=True)
class Case:
    """One run of a graph and its engine: optimization profile, size of each dimension, lengths of caches.

    repeats: which rows are the same, in words.
    """

    profile: int
    sizes: Sizes
    past_lengths: tuple[int, ...] = ()
    long: bool = False
    repeats: str = ""

    def __str__(self) -> str:
        parts = [f"{dim} {size}" for dim, size in self.sizes.items()]
        if self.long:
            parts.append(f"past_lengths {' '.join(map(str, self.past_lengths))}")
        if self.repeats:
            parts.append(self.repeats)
        return ", ".join(parts)


@dataclass(frozen=True)
class ComparedGraph:
    """A graph as it is compared. slots: its weight inputs. variant: of an attention. limits: of its engines."""

    model: onnx.ModelProto
    assembly: Assembly
    limits: Limits
    slots: Collection[str] = ()
    variant: AttentionVariant | None = None

    @property
    def windows(self) -> list[int]:
        """The sliding window of an attention, as a list for `boundaries.edges`; empty where all tokens are visible."""
        if self.variant is None or not self.variant.window:
            return []
        return [self.variant.window]

    @property
    def positions(self) -> int:
        return min(self.assembly.max_position_embeddings or _POSITIONS, self.limits.max_seq_len)

    @property
    def dims(self) -> dict[str, list[str]]:
        """Return the free dimensions of each input, "" for a fixed one."""
        dims = {}
        for value in self.model.graph.input:
            dims[value.name] = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
        return dims

    def bounds(self) -> list[dict[str, tuple[int, int]]]:
        """Return {dimension: (smallest, largest size)} of each optimization profile."""
        dims = self.dims
        ranges: list[dict[str, tuple[int, int]]] = []
        for profile in profiles(self.model, self.limits):
            ranges.append({})
            for name, (low, _, high) in profile.items():
                for dim, lower, upper in zip(dims[name], low, high):
                    if dim:
                        ranges[-1][dim] = (lower, upper)
        return ranges


def cases(graph: ComparedGraph) -> list[Case]:
    """Return the cases of each optimization profile of a graph.

    At its smallest sizes and at up to 32 tokens; attention also over caches of the largest capacity, which end on both
    sides of each edge of page, window and capacity. Otherwise lengths stay below half the model's positions, so that a
    past and its next tokens have valid positions.
    """
    modest = min(_MODEST, max(1, graph.positions // 2))
    chosen: list[Case] = []
    for number, bounds in enumerate(graph.bounds()):
        for size in (1, modest):
            sizes = {dim: max(lower, min(size, upper)) for dim, (lower, upper) in sorted(bounds.items())}
            chosen.append(Case(number, sizes, _short_lengths(sizes)))
        if graph.variant is not None and "past_capacity" in bounds:
            chosen += _long_cases(number, bounds, graph)
    return [case for index, case in enumerate(chosen) if case not in chosen[:index]]


def ranges(graph: ComparedGraph) -> dict[str, tuple[int, int]]:
    widest: dict[str, tuple[int, int]] = {}
    for bounds in graph.bounds():
        for dim, (lower, upper) in bounds.items():
            lowest, highest = widest.get(dim, (lower, upper))
            widest[dim] = min(lower, lowest), max(upper, highest)
    return widest


def takes(profile: Profile, shapes: Mapping[str, Sequence[int]]) -> bool:
    for name, (low, _, high) in profile.items():
        if not all(lower <= size <= upper for lower, size, upper in zip(low, shapes[name], high)):
            return False
    return True


def _short_lengths(sizes: Sizes) -> tuple[int, ...]:
    """Return lengths of caches: empty, full and between. A single request's cache is half full."""
    if "past_capacity" not in sizes:
        return ()
    requests = sizes.get("num_requests", 1)
    capacity = sizes["past_capacity"]
    if requests == 1:
        return (capacity // 2,)
    return tuple(np.linspace(0, capacity, requests).astype(int).tolist())


def _long_cases(profile: int, bounds: Mapping[str, tuple[int, int]], graph: ComparedGraph) -> Iterator[Case]:
    """Yield cases over caches of the largest capacity.

    Of a decode graph all lengths, a few requests at a time; of a prefill graph one for each edge.
    """
    positions = graph.positions
    capacity = min(bounds["past_capacity"][1], positions)
    if "num_requests" in bounds:
        lower, upper = bounds["num_requests"]
        lengths = [length for length in both_sides(capacity, graph.windows) if length < positions]
        rows = max(lower, min(upper, max(2, CACHE_ROWS // capacity)))
        for first in range(0, len(lengths), rows):
            group = (lengths[first : first + rows] * rows)[:rows]  # the last group repeats its own lengths
            yield Case(profile, {"num_requests": rows, "past_capacity": capacity}, tuple(group), True)
    else:
        lower, upper = bounds["num_tokens"]
        tokens = max(lower, min(_CHUNK_TOKENS, upper))
        for length in sorted({min(edge - 1, positions - tokens) for edge in edges(capacity, graph.windows)}):
            if length > 0:
                yield Case(profile, {"num_tokens": tokens, "past_capacity": capacity}, (length,), True)


def arrays(graph: ComparedGraph, case: Case) -> dict[str, np.ndarray]:
    """Return seeded values for all inputs of a graph but its weights.

    Activations are N(0, 1), as after a norm; integers are valid. Of a long case queries are scaled down, so that each
    row of the cache has some weight. Raises CheckError for an integer input of unknown meaning.
    """
    random = np.random.default_rng(SEED)
    assembly = graph.assembly
    variant = graph.variant
    values: dict[str, np.ndarray] = {}
    has_state = "decay" in {value.name for value in graph.model.graph.input}
    lengths = np.array(case.past_lengths, np.int64)
    for value in graph.model.graph.input:
        if value.name in graph.slots:
            continue
        shape = [dim.dim_value or case.sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        dtype = np.dtype(dtype_name(value.type.tensor_type.elem_type))
        if dtype.kind == "f":
            numbers = random.standard_normal(shape, np.float32)
            if value.name.endswith((A_SUFFIX, B_SUFFIX)):  # so that an adapter's product is as large as its layer's
                numbers /= np.sqrt(np.float32(shape[0]))
            if has_state and value.name in ("query", "key", "decay", "beta"):
                numbers = _of_recurrence(value.name, numbers, graph.model.graph)
            values[value.name] = numbers.astype(dtype)
        elif value.name == IDS:
            assert assembly.adapters is not None  # whose graphs take them
            values[value.name] = random.integers(-1, assembly.adapters.max_adapters, shape, np.int64)
        elif value.name == "token_ids":
            values[value.name] = random.integers(0, assembly.vocab_size, shape, np.int64)
        elif value.name == "logit_rows":
            values[value.name] = np.linspace(0, case.sizes["num_tokens"] - 1, shape[0]).astype(np.int64)
        elif value.name == "past_lengths":
            values[value.name] = lengths
        elif value.name == "position_ids":
            values[value.name] = _position_ids(shape[0], lengths, graph.positions)
        else:
            raise CheckError(
                f"graph {graph.model.graph.name}: expected integers that a decoder step has, found "
                f"the input {value.name}; export again"
            )
    if case.long:
        assert variant is not None  # `cases` makes long ones of attention only
        query = values["query"]
        values["query"] = (query * (_SCORES / (abs(variant.scale) * variant.head_dim**0.5))).astype(query.dtype)
        for row, length in enumerate(case.past_lengths):
            dims = variant.head_dim, variant.value_head_dim
            past = synthetic_past(random, length, variant.num_kv_heads, dims, graph.windows)
            for name, array in zip(("past_key", "past_value"), past):
                values[name][row, :, :length] = array.swapaxes(0, 1)
    return values


def _of_recurrence(name: str, numbers: np.ndarray, graph: onnx.GraphProto) -> np.ndarray:
    """Return valid inputs of a recurrence: keys of length one, states that decay, betas between 0 and 1."""
    if name == "decay":
        return -np.abs(numbers)
    if name == "beta":
        return 1 / (1 + np.exp(-numbers))
    state = next(value for value in graph.input if value.name == "past_state")
    return numbers / np.sqrt(np.float32(state.type.tensor_type.shape.dim[2].dim_value))


def _position_ids(count: int, lengths: np.ndarray, positions: int) -> np.ndarray:
    """Return positions that follow the cache; without one, from the first to the last that is valid."""
    if not len(lengths) and count == 1:
        return np.array([positions - 1])
    if not len(lengths):
        return np.linspace(0, positions - 1, count).astype(np.int64)
    if len(lengths) == count:  # decode: a token of each request
        return lengths
    return lengths[0] + np.arange(count)
