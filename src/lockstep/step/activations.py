"""The assembly of engines whose activations have another dtype than the graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from lockstep.artifacts.assembly import Assembly, AttentionVariant, GraphFile, StateMixer
from lockstep.artifacts.signature import IO, Signature

_Graph = TypeVar("_Graph", bound=GraphFile)
_Mixer = TypeVar("_Mixer", AttentionVariant, StateMixer)
_NEVER_CAST = ("past_state", "state", "hidden")  # keys


def with_activations(assembly: Assembly, dtype: str | None) -> Assembly:
    """Return the assembly with the float32 inputs and outputs of all graphs as `dtype`, its backend's; None: unchanged.

    Weights, states and hidden states keep their type. An assembly of 16 bits keeps its own dtype, which its float32
    inputs and outputs get too; one of quantised weights may say its own `activations`, one of fp32 is unchanged.
    """
    if dtype is None or (assembly.dtype == "float32" and assembly.quantization is None):
        return assembly
    if assembly.dtype != "float32":
        dtype = assembly.dtype
    elif assembly.activations is not None:
        dtype = assembly.activations

    def cast_io(io: IO) -> IO:
        if io.dtype != "float32" or io.key in _NEVER_CAST:
            return io
        return replace(io, dtype=dtype)

    def cast_graph(graph: _Graph) -> _Graph:
        signature: Signature = graph.signature
        inputs = tuple(map(cast_io, signature.inputs))
        outputs = tuple(map(cast_io, signature.outputs))
        return replace(graph, signature=Signature(inputs, outputs, signature.slots))

    def cast_mixer(mixer: _Mixer) -> _Mixer:
        return replace(mixer, prefill=cast_graph(mixer.prefill), decode=cast_graph(mixer.decode))

    ranks = assembly.tensor_parallel
    if ranks is not None:
        ranks = replace(
            ranks,
            graphs={name: cast_graph(graph) for name, graph in ranks.graphs.items()},
            variants={name: cast_mixer(variant) for name, variant in ranks.variants.items()},
        )
    return replace(
        assembly,
        dtype=dtype,
        classes={name: cast_graph(graph) for name, graph in assembly.classes.items()},
        variants={name: cast_mixer(variant) for name, variant in assembly.variants.items()},
        state_mixers={name: cast_mixer(mixer) for name, mixer in assembly.state_mixers.items()},
        tensor_parallel=ranks,
    )
