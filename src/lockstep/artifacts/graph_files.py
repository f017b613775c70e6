"""A graph's file in an assembly, and the token mixers of its layers, each with its two graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.artifacts.bounds import Count, Digest, FileName, Name, Size
from lockstep.artifacts.document import Key, Mark, length
from lockstep.artifacts.signature import Signature

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class GraphFile:
    file: Annotated[FileName, Key("graph")]
    sha256: Digest
    signature: Annotated[Signature, Mark.INLINED]


@dataclass(frozen=True)
class AttentionVariant:
    """An attention of the model, its sizes and its two graphs.

    Layers with the same numbers share it. scale: of the scores. softcap: of the scores, 0 for none. window: how many
    tokens a token sees, 0 for all. sinks: whether each head has a sink logit, the last of its numbers in the query.
    """

    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    value_head_dim: Size
    scale: float
    softcap: float
    window: Count
    prefill: GraphFile
    decode: GraphFile
    sinks: bool = False

    @property
    def query_dim(self) -> int:
        # A head's sink logit travels as one more number of its query, so that attention needs no weight.
        return self.head_dim + self.sinks

    def phases(self) -> dict[str, GraphFile]:
        return {"prefill": self.prefill, "decode": self.decode}


@dataclass(frozen=True)
class StateMixer:
    """A token mixer with a float32 state. state: its shape, per request. inputs: names of a token's values it reads."""

    state: Annotated[tuple[Size, ...], length(4, minimum=1)]
    inputs: Annotated[tuple[Name, ...], length(8, minimum=1)]
    prefill: GraphFile
    decode: GraphFile

    def phases(self) -> dict[str, GraphFile]:
        return {"prefill": self.prefill, "decode": self.decode}


TokenMixer = AttentionVariant | StateMixer
