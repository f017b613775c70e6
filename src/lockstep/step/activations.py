"""An assembly whose engines have another activation dtype than its graphs.

Some backends run float32 graphs with activations of another dtype.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from lockstep.artifacts.assembly import Assembly, AttentionVariant, GraphFile
from lockstep.artifacts.signature import IO, Signature

_Graph = TypeVar("_Graph", bound=GraphFile)


def with_activations(assembly: Assembly, dtype: str) -> Assembly:
    """Return the assembly with float32 inputs and outputs of all graphs as `dtype`.

    Slots, which say what the weights are, stay. Returns the assembly itself where it has that dtype.
    """
    if assembly.dtype == dtype:
        return assembly

    def own(ios: tuple[IO, ...]) -> tuple[IO, ...]:
        return tuple(replace(io, dtype=dtype) if io.dtype == "float32" else io for io in ios)

    def graph(of: _Graph) -> _Graph:
        signature: Signature = of.signature
        return replace(of, signature=Signature(own(signature.inputs), own(signature.outputs), signature.slots))

    def variant(of: AttentionVariant) -> AttentionVariant:
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
        tensor_parallel=ranks,
    )
