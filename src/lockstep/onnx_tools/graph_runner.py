"""Run an assembly's blocks and attentions, on one rank or on all.

In: an assembly, {name: array}. Out: the outputs of a block or an attention, whole; the logits of a run through layers.
A subclass defines how one graph is run, and where weights and the adapters' inputs come from.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.artifacts.assembly import Assembly, BoundBlock, Layer
from lockstep.artifacts.signature import IO, Signature
from lockstep.artifacts.tensor_parallel import Shard, ShardedClass, TensorParallel, attention_shards

Arrays = Mapping[str, np.ndarray]


class GraphRunner(abc.ABC):
    """Runs blocks and attentions of an assembly, those of several ranks one rank after another."""

    assembly: Assembly

    @abc.abstractmethod
    def run_graph(self, name: str, inputs: Arrays, weights: Arrays) -> dict[str, np.ndarray]:
        """Return {output: array} of one graph.

        name: as in `Assembly.engine_graphs`, or of a whole block. inputs: {name: array}, of which the graph takes those
        that it declares. weights: {slot: array}.
        """

    @abc.abstractmethod
    def slot_array(self, tensors: Sequence[str], slot: IO) -> np.ndarray:
        """Return a slot's weights, joined from tensors of the checkpoint, in the dtype of the computation."""

    def adapter_inputs(self, part: BoundBlock, env: Arrays) -> Arrays:
        return {}

    def run_block(self, part: BoundBlock, env: Arrays) -> dict[str, np.ndarray]:
        """Run a block; return {name under which the next block reads it: array} (`hidden_out` as `hidden`)."""
        signature = self.assembly.classes[part.graph].signature
        ranks = self.assembly.tensor_parallel
        env = {**env, **self.adapter_inputs(part, env)}
        weights = {slot.name: self.slot_array(part.slots[slot.name], slot) for slot in signature.slots}
        if ranks is None or part.graph not in ranks.classes:
            outputs = self.run_graph(part.graph, env, weights)
        else:
            outputs = self._run_pieces(ranks, ranks.classes[part.graph], signature, env, weights)
        return {name.removesuffix("_out"): value for name, value in outputs.items()}

    def _run_pieces(
        self, ranks: TensorParallel, sharded: ShardedClass, signature: Signature, env: Arrays, weights: Arrays
    ) -> dict[str, np.ndarray]:
        """Return the outputs of a block in pieces, of all ranks; the all-reduce adds in the order of the ranks."""
        values_of_ranks: list[dict[str, np.ndarray]] = []
        for rank in range(ranks.degree):
            values_of_ranks.append(
                {io.name: _shard(sharded.values.get(io.name), env[io.name], rank) for io in signature.inputs}
            )
        for piece in sharded.pieces:
            names = [slot.name for slot in ranks.graphs[piece.graph].signature.slots]
            for rank, values in enumerate(values_of_ranks):
                shards = {name: np.ascontiguousarray(sharded.take_weight(name, weights[name], rank)) for name in names}
                values.update(self.run_graph(piece.graph, values, shards))
            for partial, total in piece.sums.items():  # accumulated in float32, as an all-reduce of 16 bits does
                partials = [values[partial].astype(np.float32) for values in values_of_ranks]
                reduced = functools.reduce(np.add, partials).astype(values_of_ranks[0][partial].dtype)
                for values in values_of_ranks:
                    values[total] = reduced
        return _join_shards(signature, sharded.values, values_of_ranks)

    def run_mixer(self, variant: str, phase: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run a token mixer's prefill or decode graph on those of `inputs` that it declares.

        One without RoPE may need no position_ids. Returns `attention`, `key_out`, `value_out`, or `attention` and
        `state_out`.
        """
        ranks = self.assembly.tensor_parallel
        name = f"{variant}.{phase}"
        if ranks is None:
            return self.run_graph(name, inputs, {})
        attention = self.assembly.variants[variant]
        signature = attention.phases()[phase].signature
        shards = attention_shards(attention, ranks.degree)
        declared = [io.name for io in signature.inputs if io.name in inputs]
        outputs = []
        for rank in range(ranks.degree):
            rank_inputs = {key: _shard(shards.get(key), inputs[key], rank) for key in declared}
            outputs.append(self.run_graph(name, rank_inputs, {}))
        return _join_shards(signature, shards, outputs)

    def run_layers(
        self, layers: Sequence[Layer], env: dict[str, np.ndarray], attend: Callable[[int, Arrays], np.ndarray]
    ) -> np.ndarray:
        """Run the blocks of `layers`, and the exit after the last one, on `env`.

        The blocks' outputs are added to `env`. attend: (layer number, env) -> that layer's attention [num_tokens,
        num_heads * head_dim]. Returns the logits of the tokens that `logit_rows` names, [num_requests, vocab_size].
        """
        for index, layer in enumerate(layers):
            env |= self.run_block(layer.block, env)
            env["attention"] = attend(index, env)
        return self.run_block(self.assembly.exit_of(layers), env)["logits"]


def _shard(shard: Shard | None, array: np.ndarray, rank: int) -> np.ndarray:
    return np.ascontiguousarray(shard.take(array, rank)) if shard else array


def _join_shards(signature: Signature, shards: Mapping[str, Shard], ranks: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Return whole outputs from those of the ranks; outputs that are not sharded are equal on all."""
    outputs = {}
    for io in signature.outputs:
        array = ranks[0][io.name]
        shard = shards.get(io.name)
        if shard is not None:
            shape = []
            for size, rank_size in zip(io.shape, array.shape, strict=True):
                shape.append(rank_size if isinstance(size, str) else size)
            array = np.empty(shape, array.dtype)
            for rank, values in enumerate(ranks):
                shard.put(array, rank, values[io.name])
        outputs[io.name] = array
    return outputs
