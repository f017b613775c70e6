"""Run an assembly's blocks and attentions, of one rank or of all.

In: an assembly, arrays by name. Out: the outputs of a block or an attention, whole; the logits of a run through layers.
A subclass says how one graph is run, and where weights and the adapters' inputs come from.
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
        """Return the outputs of a block in pieces, of all ranks; partial sums are added in the order of the ranks."""
        known = [
            {io.name: _part(sharded.values.get(io.name), env[io.name], rank) for io in signature.inputs}
            for rank in range(ranks.degree)
        ]
        for piece in sharded.pieces:
            names = [slot.name for slot in ranks.graphs[piece.graph].signature.slots]
            for rank, values in enumerate(known):
                taken = {name: np.ascontiguousarray(sharded.take_weight(name, weights[name], rank)) for name in names}
                values.update(self.run_graph(piece.graph, values, taken))
            for partial, total in piece.sums.items():
                in_float32 = functools.reduce(np.add, (values[partial].astype(np.float32) for values in known))
                summed = in_float32.astype(known[0][partial].dtype)
                for values in known:
                    values[total] = summed
        return _joined(signature, sharded.values, known)

    def run_mixer(self, variant: str, phase: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run a token mixer's prefill or decode graph on what it names of `inputs`.

        One without RoPE may need no position_ids. Returns `attention`, `key_out`, `value_out`, or `attention` and
        `state_out`.
        """
        ranks = self.assembly.tensor_parallel
        name = f"{variant}.{phase}"
        if ranks is None:
            return self.run_graph(name, inputs, {})
        whole = self.assembly.variants[variant]
        signature = whole.phases()[phase].signature
        shards = attention_shards(whole, ranks.degree)
        given = {io.name: inputs[io.name] for io in signature.inputs if io.name in inputs}
        parts = [
            {key: _part(shards.get(key), array, rank) for key, array in given.items()} for rank in range(ranks.degree)
        ]
        return _joined(signature, shards, [self.run_graph(name, part, {}) for part in parts])

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


def _part(shard: Shard | None, array: np.ndarray, rank: int) -> np.ndarray:
    return np.ascontiguousarray(shard.take(array, rank)) if shard else array


def _joined(signature: Signature, shards: Mapping[str, Shard], ranks: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Return outputs, whole, of what each rank holds of them; what is not sharded all hold."""
    outputs = {}
    for io in signature.outputs:
        outputs[io.name] = first = ranks[0][io.name]
        if (shard := shards.get(io.name)) is not None:
            sizes = [
                found if isinstance(size, str) else size for size, found in zip(io.shape, first.shape, strict=True)
            ]
            outputs[io.name] = np.empty(sizes, first.dtype)
            for rank, values in enumerate(ranks):
                shard.put(outputs[io.name], rank, values[io.name])
    return outputs
