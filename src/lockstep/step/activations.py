"""An assembly whose engines have another activation dtype than its graphs.

Some backends run float32 graphs with activations of another dtype.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from lockstep.artifacts.assembly import Assembly, AttentionVariant, GraphFile, StateMixer
from lockstep.artifacts.signature import IO, Signature

_Graph = TypeVar("_Graph", bound=GraphFile)
_Mixer = TypeVar("_Mixer", AttentionVariant, StateMixer)
_STATES = ("past_state", "state_out")


def with_activations(assembly: Assembly, dtype: str) -> Assembly:
    """Return the assembly with float32 inputs and outputs of all graphs as `dtype`.

    Slots, which say what the weights are, stay, and so do states.
    """

    def own(ios: tuple[IO, ...]) -> tuple[IO, ...]:
        return tuple(replace(io, dtype=dtype) if io.dtype == "float32" and io.name not in _STATES else io for io in ios)

    def graph(of: _Graph) -> _Graph:
        signature: Signature = of.signature
        return replace(of, signature=Signature(own(signature.inputs), own(signature.outputs), signature.slots))

    def variant(of: _Mixer) -> _Mixer:
        return replace(of, prefill=graph(of.prefill), decode=graph(of.decode))

    ranks = assembly.tensor_parallel
    if ranks is not None:
        ranks = replace(
            ranks,
            graphs={name: graph(each) for name, each in ranks.graphs.items()},
            variants={name: variant(each) for name, each in ranks.variants.items()},
        )
    return replace(
        assembly,
        dtype=dtype,
        classes={name: graph(each) for name, each in assembly.classes.items()},
        variants={name: variant(each) for name, each in assembly.variants.items()},
        state_mixers={name: variant(each) for name, each in assembly.state_mixers.items()},
        tensor_parallel=ranks,
    )
