"""The check that the parts of an assembly fit together.

Each block must take what earlier blocks give, and each attention must have its variant's sizes. A bundle is untrusted:
what passes here is bound to buffers without further checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lockstep.artifacts.adapters import IDS, LoraSlots
from lockstep.artifacts.document import ValidationError
from lockstep.artifacts.dtypes import COMPUTE_NAMES, QUANTIZATIONS, ROW, is_fp8
from lockstep.artifacts.quantized import is_data
from lockstep.artifacts.signature import IO, Signature
from lockstep.artifacts.tensor_parallel import Shard, ShardedClass, TensorParallel, heads_divide

if TYPE_CHECKING:
    from lockstep.artifacts.assembly import Assembly, AttentionVariant, BoundBlock, StateMixer, TokenMixer

Values = dict[str, tuple[str, list[int | str]]]  # {name: (dtype, shape)} of the values that a block may read


def validate_assembly(assembly: Assembly, num_layers: Any) -> None:
    """Raise ValidationError where the assembly does not fit together. num_layers: what its file says."""
    _expect("num_layers", num_layers, assembly.num_layers)
    if not assembly.layers[-1].exits:
        raise ValidationError(f"layers[{len(assembly.layers) - 1}].exit", "an exit after the last layer", None)
    _expect("dtype", COMPUTE_NAMES[assembly.precision], assembly.dtype)
    _expect("quantization", assembly.quantization is not None, assembly.precision in QUANTIZATIONS)
    if assembly.quantization is not None:
        _expect("quantization: a scale a row", assembly.quantization.group_size == ROW, is_fp8(assembly.precision))
    for name, variant in assembly.variants.items():
        _check_variant(f"kinds.{name}", variant, assembly.dtype)
    for name, mixer in assembly.state_mixers.items():
        if name in assembly.variants:  # layers name both alike
            raise ValidationError(f"state_mixers.{name}", "a name that no attention has", name)
        _check_state_mixer(f"state_mixers.{name}", mixer)
    values: Values = {
        "token_ids": ("int64", ["num_tokens"]),
        "position_ids": ("int64", ["num_tokens"]),
        "logit_rows": ("int64", ["num_requests"]),
    }
    if assembly.adapters is not None:
        values[IDS] = ("int64", ["num_tokens"])
        _check_adapters(assembly, assembly.adapters)
    # From here on in the order of a step: each block adds its outputs to the values that later ones may read.
    _check_block(assembly, "embedding", assembly.embedding, values)
    _expect("embedding: dtype", values.get("hidden", ("",))[0], assembly.hidden_dtype)
    _expect("hidden_size", values.get("hidden", ("", [None]))[1], ["num_tokens", assembly.hidden_size])
    for index, layer in enumerate(assembly.layers):
        _check_block(assembly, f"layers[{index}].block", layer.block, values)
        _check_mixer(f"layers[{index}].kind", _look_up(assembly.mixers, layer.variant, f"layers[{index}].kind"), values)
        for number, exit in enumerate(layer.exits):
            # A copy: a model that ends here runs this exit, any other continues with the next layer instead.
            values_at_exit = dict(values)
            place = f"later_exits[{number - 1}]" if number else "exit"
            _check_block(assembly, f"layers[{index}].{place}", exit, values_at_exit)
            logits_shape = values_at_exit.get("logits", ("", [None]))[1]
            _expect("vocab_size", logits_shape, ["num_requests", assembly.vocab_size])
    if assembly.tensor_parallel is not None:
        _check_tensor_parallel(assembly, assembly.tensor_parallel)


def _check_block(assembly: Assembly, where: str, part: BoundBlock, values: Values) -> None:
    """Compare a block's inputs with `values`, and add its outputs to them."""
    signature = _look_up(assembly.classes, part.graph, f"{where}.class").signature
    _expect(f"{where}.slots", sorted(part.slots), sorted(slot.name for slot in signature.slots))
    _require_unique_names(f"classes.{part.graph}", signature)
    written = assembly.adapters.names(part.graph) if assembly.adapters else ()
    for io in signature.inputs:
        if io.name not in written:
            _expect(f"classes.{part.graph}: {io.name}", _type(io), values.get(io.key))
    for io in signature.outputs:
        # The runtime sizes a block's output buffers by its number of rows alone.
        if (
            not io.shape
            or io.shape[0] not in ("num_tokens", "num_requests")
            or not all(isinstance(size, int) for size in io.shape[1:])
        ):
            raise ValidationError(
                f"classes.{part.graph}: {io.name}", "num_tokens or num_requests, then sizes", list(io.shape)
            )
        values[io.key] = _type(io)


def _check_adapters(assembly: Assembly, adapters: LoraSlots) -> None:
    """Check that blocks have the inputs of adapters, of their linear layers' sizes."""
    for name, slots in adapters.classes.items():
        signature = _look_up(assembly.classes, name, "adapters.classes").signature
        inputs = {io.name: io for io in signature.inputs}
        weights = {slot.name: slot for slot in signature.slots}
        for slot, entry in slots.items():
            where = f"adapters.classes.{name}.{slot}"
            shape = list(_look_up(weights, slot, where).shape)
            sizes = [entry.out_features, entry.in_features]
            # Integers are packed [out_features, num_groups, bytes]: count the numbers, not the bytes.
            if assembly.quantization is not None and is_data(slot) and len(shape) == 3:
                rows, groups, _ = (int(size) for size in shape)
                shape = [rows, groups * assembly.quantization.group_size]
            # Sorted, since GPT-2 holds its weights as [in_features, out_features].
            _expect(where, sorted(shape), sorted(sizes))
            for key in (entry.a, entry.b):
                _expect(f"{where}: dtype", _look_up(inputs, key, where).dtype, assembly.dtype)
        for key, expected in adapters.shapes(name):
            _expect(f"adapters.classes.{name}: {key}", list(inputs[key].shape), list(expected))


def _check_mixer(where: str, mixer: TokenMixer, values: Values) -> None:
    """Compare the inputs of a layer's attention or state mixer with `values`, and add its output to them."""
    for phase, graph in mixer.phases().items():
        for io in graph.signature.inputs:
            if not io.name.startswith("past_"):  # these come from the cache
                _expect(f"{where}: {phase}: {io.name}", _type_by_token(io), values.get(io.name))
    values["attention"] = _type_by_token(next(io for io in mixer.decode.signature.outputs if io.name == "attention"))


def _check_state_mixer(where: str, mixer: StateMixer) -> None:
    # Prefill runs one request of many tokens, decode many requests of one token each.
    for phase, tokens, rows in (("prefill", "num_tokens", 1), ("decode", "num_requests", "num_requests")):
        signature = mixer.phases()[phase].signature
        place = f"{where}.{phase}"
        _require_unique_names(place, signature)
        _expect(f"{place}.inputs", [io.name for io in signature.inputs], [*mixer.inputs, "past_state"])
        _expect(f"{place}.outputs", [io.name for io in signature.outputs], ["attention", "state_out"])
        for io in (*signature.inputs, *signature.outputs):
            expected = io.dtype, [tokens, *io.shape[1:]]
            if io.name in ("past_state", "state_out"):
                # A state is float32 in every precision: its rounding errors would accumulate over all tokens.
                expected = "float32", [rows, *mixer.state]
            _expect(f"{place}: {io.name}", _type(io), expected)


def _check_variant(where: str, variant: AttentionVariant, dtype: str) -> None:
    heads = variant.num_heads
    kv_heads = variant.num_kv_heads
    dim = variant.head_dim
    value_dim = variant.value_head_dim
    for phase, tokens, rows in (("prefill", "num_tokens", 1), ("decode", "num_requests", "num_requests")):
        inputs = {
            "query": [tokens, heads * variant.query_dim],
            "key": [tokens, kv_heads * dim],
            "value": [tokens, kv_heads * value_dim],
            "position_ids": [tokens],
            "past_key": [rows, kv_heads, "past_capacity", dim],
            "past_value": [rows, kv_heads, "past_capacity", value_dim],
            "past_lengths": [rows],
        }
        outputs = {
            "attention": [tokens, heads * value_dim],
            "key_out": [tokens, kv_heads, dim],
            "value_out": [tokens, kv_heads, value_dim],
        }
        # A graph that lacks an input does not read it; a missing output would leave the cache nothing to store.
        signature = variant.phases()[phase].signature
        _require_unique_names(f"{where}.{phase}", signature)
        _expect(f"{where}.{phase}.outputs", sorted(io.name for io in signature.outputs), sorted(outputs))
        for io in (*signature.inputs, *signature.outputs):
            _expect(f"{where}.{phase}: {io.name}", list(io.shape), {**inputs, **outputs}.get(io.name))
            if io.name in ("past_key", "past_value", "key_out", "value_out"):  # what the cache holds
                _expect(f"{where}.{phase}: {io.name}", io.dtype, dtype)


def _check_tensor_parallel(assembly: Assembly, ranks: TensorParallel) -> None:
    place = "tensor_parallel"
    # All but the embedding, whose rows each rank looks up for itself.
    _expect(f"{place}.classes", sorted(ranks.classes), sorted(assembly.classes.keys() - {assembly.embedding.graph}))
    _expect(f"{place}.kinds", sorted(ranks.variants), sorted(assembly.variants))
    for name, sharded_variant in ranks.variants.items():
        variant = assembly.variants[name]
        where = f"{place}.kinds.{name}"
        if not heads_divide(variant.num_heads, variant.num_kv_heads, ranks.degree):
            raise ValidationError(
                where, f"heads that {ranks.degree} ranks can share", f"{variant.num_heads}, {variant.num_kv_heads}"
            )
        _check_variant(where, sharded_variant, assembly.dtype)
        _expect(f"{where}.num_heads", sharded_variant.num_heads, variant.num_heads // ranks.degree)
        _expect(f"{where}.num_kv_heads", sharded_variant.num_kv_heads, max(1, variant.num_kv_heads // ranks.degree))
        for key in ("head_dim", "value_head_dim", "scale", "softcap", "window", "sinks"):
            _expect(f"{where}.{key}", getattr(sharded_variant, key), getattr(variant, key))
    for name, sharded in ranks.classes.items():
        _check_pieces(f"{place}.classes.{name}", sharded, assembly.classes[name].signature, ranks)


def _check_pieces(where: str, sharded: ShardedClass, block: Signature, ranks: TensorParallel) -> None:
    """Check that shards are within the whole `block`, and that pieces read outputs of earlier ones."""
    ios = {io.name: io for io in (*block.inputs, *block.outputs)}
    slots = {slot.name: slot for slot in block.slots}
    for label, shards, declared in (("values", sharded.values, ios), ("weights", sharded.weights, slots)):
        for name, shard in shards.items():
            shape = _look_up(declared, name, f"{where}.{label}").shape
            _check_shard(f"{where}.{label}.{name}", shard, shape, ranks.degree)
    for name in sharded.first:
        _look_up(slots, name, f"{where}.first")
        if name in sharded.weights:
            raise ValidationError(f"{where}.weights", "no shard of a slot that the first rank takes whole", name)
    # The values that a rank has while its pieces run in order.
    values: Values = {io.name: _type(io, sharded.values) for io in block.inputs}
    slots_read: list[str] = []
    for piece in sharded.pieces:
        signature = _look_up(ranks.graphs, piece.graph, f"{where}.pieces").signature
        at = f"tensor_parallel.graphs.{piece.graph}"
        _require_unique_names(at, signature)
        for slot in signature.slots:
            _expect(f"{at}: {slot.name}", _type(slot), _type(_look_up(slots, slot.name, at), sharded.weights))
        slots_read += [slot.name for slot in signature.slots]
        for io in signature.inputs:
            _expect(f"{at}: {io.name}", _type(io), values.get(io.name))
        values |= {io.name: _type(io) for io in signature.outputs}
        for partial, total in piece.sums.items():
            values[total] = _look_up(values, partial, f"{where}.pieces: sums")
    # Each weight of the block is read by some piece: one that is not would silently be left out of the sum.
    _expect(f"{where}.pieces: slots", sorted(set(slots_read)), sorted(slots))
    for io in block.outputs:
        _expect(f"{where}: {io.name}", values.get(io.name), _type(io, sharded.values))


def _check_shard(where: str, shard: Shard, shape: Sequence[int | str], degree: int) -> None:
    """Check that the ranges of all ranks cover one axis of fixed size. Each rank has the same number of entries."""
    _expect(f"{where}.ranges", len(shard.ranges), degree)
    if shard.axis >= len(shape) or not isinstance(shape[shard.axis], int):
        raise ValidationError(f"{where}.axis", f"an axis of {_describe(shape)} with a size", shard.axis)
    size = cast(int, shape[shard.axis])
    for rank in shard.ranges:
        if any(not low < high <= size for low, high in rank) or sum(high - low for low, high in rank) != shard.count:
            raise ValidationError(f"{where}.ranges", f"{shard.count} numbers within {size} at each rank", rank)
    for index, ranks in _holders(shard):
        # Several ranks may hold the same heads of keys and values, where there are fewer of these than ranks.
        if index < size and not _share_a_head(ranks, degree):
            words = ", ".join(map(str, ranks)) or "none"
            raise ValidationError(
                f"{where}.ranges", f"all of {size}, each at a rank or a group of them", f"{index} at ranks {words}"
            )


def _holders(shard: Shard) -> Iterator[tuple[int, list[int]]]:
    """Yield (index, the ranks that hold it and all up to the next) where a rank's range begins or ends."""
    begins: dict[int, list[int]] = {0: []}
    ends: dict[int, list[int]] = {}
    for rank, ranges in enumerate(shard.ranges):
        for low, high in ranges:
            begins.setdefault(low, []).append(rank)
            ends.setdefault(high, []).append(rank)
    holders: list[int] = []
    for index in sorted({*begins, *ends}):
        for rank in ends.get(index, ()):
            holders.remove(rank)
        holders += begins.get(index, ())
        yield index, sorted(holders)


def _share_a_head(ranks: Sequence[int], degree: int) -> bool:
    """Return whether these are one rank, or a group that may share a head: of 4 ranks 0 and 1, or 2 and 3."""
    count = len(ranks)
    if count == 0 or degree % count != 0:
        return False
    return ranks[0] % count == 0 and list(ranks) == list(range(ranks[0], ranks[0] + count))


def _type(io: IO, shards: Mapping[str, Shard] = {}) -> tuple[str, list[int | str]]:
    """Return (dtype, shape) of a value, or of a rank's part where it is one of `shards`."""
    shape = io.shape
    if io.name in shards:
        shape = shards[io.name].shape(shape)
    return io.dtype, list(shape)


def _type_by_token(io: IO) -> tuple[str, list[int | str]]:
    return io.dtype, ["num_tokens", *io.shape[1:]]


def _require_unique_names(where: str, signature: Signature) -> None:
    names = [io.name for io in (*signature.inputs, *signature.outputs, *signature.slots)]
    _expect(where, len(names), len(set(names)))


def _look_up(entries: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in entries:
        raise ValidationError(where, f"one of {_describe(sorted(entries))}", name)
    return entries[name]


def _expect(where: str, actual: Any, expected: Any) -> None:
    if actual != expected:
        words = "nothing of this name" if expected is None else _describe(expected)
        raise ValidationError(where, words, actual)


def _describe(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "nothing"
    return str(value)
