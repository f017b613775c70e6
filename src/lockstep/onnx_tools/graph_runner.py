"""Run an assembly's blocks and attentions, of one rank or of all.

In: an assembly, arrays by name. Out: the outputs of a block or an attention, whole; the logits of a run through layers.
A subclass says how one graph is run, and where weights and the adapters' inputs come from.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.artifacts.assembly import Assembly, BoundBlock, Layer
from lockstep.artifacts.signature import IO
from lockstep.artifacts.tensor_parallel import attention_shards
from lockstep.onnx_tools.run_ranks import run_sharded_attention, run_sharded_block

Arrays = Mapping[str, np.ndarray]


class GraphRunner(abc.ABC):
    """Runs blocks and attentions of an assembly, those of several ranks one rank after another."""

    assembly: Assembly

    @abc.abstractmethod
    def run_graph(self, name: str, inputs: Arrays, weights: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs by name of one graph.

        name: as in `Assembly.engine_graphs`, or of a whole block. inputs: what there is by name, from which the graph
        takes the inputs that it declares. weights: {slot: array}.
        """

    @abc.abstractmethod
    def slot_array(self, tensors: Sequence[str], slot: IO) -> np.ndarray:
        """Return a slot's weights, made of tensors of the checkpoint, in the dtype of the computation."""

    def adapter_inputs(self, part: BoundBlock, env: Arrays) -> Arrays:
        """Return what a block reads of adapters beside `env`, by input name."""
        return {}

    def run_block(self, part: BoundBlock, env: Arrays) -> dict[str, np.ndarray]:
        """Run a block; outputs by the name under which the next one reads them (`hidden_out` as `hidden`)."""
        signature, ranks = self.assembly.classes[part.graph].signature, self.assembly.tensor_parallel
        env = {**env, **self.adapter_inputs(part, env)}
        weights = {slot.name: self.slot_array(part.slots[slot.name], slot) for slot in signature.slots}
        if ranks is None or part.graph not in ranks.classes:
            outputs = self.run_graph(part.graph, env, weights)
        else:
            graphs, sharded = ranks.graphs, ranks.classes[part.graph]

            def run(piece: str, rank: int, known: Arrays) -> Arrays:
                names = [slot.name for slot in graphs[piece].signature.slots]
                taken = {name: np.ascontiguousarray(sharded.take_weight(name, weights[name], rank)) for name in names}
                return self.run_graph(piece, known, taken)

            inputs = {io.name: env[io.name] for io in signature.inputs}
            outputs = run_sharded_block(sharded, signature, ranks.degree, inputs, run)
        return {name.removesuffix("_out"): value for name, value in outputs.items()}

    def run_mixer(self, variant: str, phase: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run a token mixer's prefill or decode graph on what it names of `inputs`.

        One without RoPE may need no position_ids. Returns `attention`, `key_out`, `value_out`, or `attention` and
        `state_out`.
        """
        ranks, name = self.assembly.tensor_parallel, f"{variant}.{phase}"
        if ranks is None:
            return self.run_graph(name, inputs, {})
        whole = self.assembly.variants[variant]
        signature, shards = whole.phases()[phase].signature, attention_shards(whole, ranks.degree)
        given = {io.name: inputs[io.name] for io in signature.inputs if io.name in inputs}
        return run_sharded_attention(
            ranks, name, signature, shards, given, lambda name, rank, known: self.run_graph(name, known, {})
        )

    def run_layers(
        self, layers: Sequence[Layer], env: dict[str, np.ndarray], attend: Callable[[int, Arrays], np.ndarray]
    ) -> np.ndarray:
        """Run the blocks of `layers`, and the exit behind the last one, on `env`.

        The blocks' outputs are added to `env`. attend: (layer number, env) -> that layer's attention [num_tokens,
        num_heads * head_dim]. Returns the logits of the tokens that `logit_rows` names, [num_requests, vocab_size].
        """
        for index, layer in enumerate(layers):
            env |= self.run_block(layer.block, env)
            env["attention"] = attend(index, env)
        return self.run_block(self.assembly.exit_of(layers), env)["logits"]
