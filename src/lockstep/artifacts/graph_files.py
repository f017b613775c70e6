"""A graph's file in an assembly, and an attention variant with its two graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lockstep.artifacts.dtypes import PRECISION_NAMES
from lockstep.artifacts.manifests import DIGEST, FILE, LARGEST, NAME, SIZE, SLOTS
from lockstep.artifacts.schema import either, integer, items, number, one_of, record
from lockstep.artifacts.signature import Signature

PHASES = ("prefill", "decode")
HEADS = ("num_heads", "num_kv_heads", "head_dim", "value_head_dim")

_DIMENSION = either(
    SIZE,
    one_of("num_tokens", "num_requests", "past_capacity"),
    words="a size, num_tokens, num_requests or past_capacity",
)
IO_SCHEMA = record(
    {"name": NAME, "dtype": one_of(*PRECISION_NAMES.values(), "int64", "uint8"), "shape": items(_DIMENSION, most=8)}
)
IOS = items(IO_SCHEMA, 100)
GRAPH = record({"graph": FILE, "sha256": DIGEST, "inputs": IOS, "outputs": IOS}, {"slots": SLOTS})
VARIANT = record(
    {
        **dict.fromkeys(HEADS, SIZE),
        "scale": number,
        "softcap": number,
        "window": integer(0, LARGEST),
        "prefill": GRAPH,
        "decode": GRAPH,
    }
)


@dataclass(frozen=True)
class GraphFile:
    """A graph of the assembly: its file beside assembly.json, sha256 and signature."""

    file: str
    sha256: str
    signature: Signature

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GraphFile:
        return cls(value["graph"], value["sha256"], Signature.from_json(value))

    def to_json(self) -> dict[str, Any]:
        return {"graph": self.file, "sha256": self.sha256, **self.signature.to_json()}


@dataclass(frozen=True)
class AttentionVariant:
    """An attention of the model, its sizes and its two graphs.

    Layers with the same numbers share it. scale: of the scores. softcap: of the scores, 0 for none. window: how many
    tokens a token sees, 0 for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    softcap: float
    window: int
    prefill: GraphFile
    decode: GraphFile

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AttentionVariant:
        values = {field.name: value[field.name] for field in fields(cls)}
        return cls(**{**values, **{phase: GraphFile.from_json(value[phase]) for phase in PHASES}})

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, **{phase: graph.to_json() for phase, graph in self.phases().items()}}

    def phases(self) -> dict[str, GraphFile]:
        """Return the graphs by phase: prefill, decode."""
        return {"prefill": self.prefill, "decode": self.decode}
