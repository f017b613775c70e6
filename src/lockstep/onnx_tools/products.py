"""The products of a graph that is cut at them, which kernels compute: what runs them needs no graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.artifacts.document import Mark
from lockstep.artifacts.dtypes import ROW


@dataclass(frozen=True)
class ExpertWeight:
    """The weights of experts: [count, out_features, in_features] if `transposed`, else with the last two swapped.

    slots: the weight itself for the kind "floats"; data and scales for "integers" and "mxfp4", of `bits` bits, in
    groups.
    """

    slots: tuple[str, ...]
    count: int
    in_features: int
    out_features: int
    bits: int
    group_size: int
    kind: str
    transposed: bool


@dataclass(frozen=True)
class Lora:
    """The term that a row's adapter adds to a product: (input times a) times b.

    a, b: inputs [in_features, columns] and [columns, out_features]; each adapter has `rank` of the `columns`. rows: the
    input that selects rows of `IDS`; "" where the product's rows are tokens.
    """

    a: str
    b: str
    columns: int
    rank: int
    rows: Annotated[str, Mark.ALWAYS] = ""


@dataclass(frozen=True)
class Experts:
    """The experts whose weights the rows of a product are multiplied with.

    ids: a value [rows, per_token], the experts of each token. shared: a token has one row for all of them; else one for
    each.
    """

    ids: str
    per_token: int
    shared: bool
    weight: ExpertWeight


@dataclass(frozen=True)
class Product:
    """out [rows, out_features] = input [rows, in_features] times a weight, transposed.

    slots: the weight's data, scales and zero points if any; for 16 bits the weight itself. bits: 4, 8 or 16.
    group_size: numbers that share a scale; 0 at 16 bits, and for e4m3 numbers, which have a scale a row. With experts
    the output is [rows, per_token * out_features], and so is the input if its rows are not shared. transposed: the
    weight is [in_features, out_features], as GPT-2 has it. is_float32: in a graph of 16 bits, weight and output are
    float32, as of some routers.
    """

    input: str
    output: str
    slots: tuple[str, ...]
    bits: int
    group_size: int
    in_features: int
    out_features: int
    lora: Annotated[Lora | None, Mark.ALWAYS] = None
    experts: Experts | None = None
    transposed: bool = False
    is_float32: bool = False

    @property
    def is_fp8(self) -> bool:
        """Return whether weights and activations are e4m3 numbers."""
        return self.bits == 8 and self.group_size == ROW
