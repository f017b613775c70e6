"""Rewrite the graphs of an assembly in fp32 for quantised weights.

In: an assembly in fp32 and its graphs. Out: those of a quantised precision.

A plain `Gemm` whose weight nothing else reads becomes ONNX Runtime's `MatMulNBits`, which reads the weight as integers
and a scale for each group of them. Its slot becomes two, `<slot>.data` and `<slot>.scales`; a checkpoint that was
quantised with zero points adds `<slot>.zero_points`, one with activation order adds `<slot>.order`, the permutation of
the activations. A weight that the product reads as `[in_features, out_features]` (GPT-2) is stored transposed.
Activations are not quantised: without `accuracy_level` the graph is a product with the dequantised weight. In w8a8 and
w4a8 nodes of the graph round them to int8 in the weight's groups (`onnx_tools.int8_rounding`), except for experts. An
embedding that is tied to such a weight, usually the output head, shares its two tensors: its `Gather` becomes
`GatherBlockQuantized`. So does the `GatherND` of a stack `[num_experts, out_features, in_features]`, whose slots hold
the experts' integers and scales one after another. A stack of MXFP4, `[num_experts, in_features, out_features]`, is
gathered as the checkpoint's codes and shared exponents, which two lookup tables in the graph turn into numbers.

In w8a8-fp8 weights and activations are e4m3 numbers (`onnx_tools.fp8_products`), except for experts and a head that is
tied to the embedding.

Everything else stays in full precision: other embeddings, norms, biases, convolutions, weights that a graph also reads
in another way, and routers. A note tells of experts that stay so.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from lockstep.artifacts.adapters import LoraSlot, LoraSlots
from lockstep.artifacts.assembly import Assembly, BoundBlock, GraphFile, Layer, Uncut
from lockstep.artifacts.dtypes import HEAD_BITS, QUANTIZATIONS, ROW, has_8_bit_activations, is_fp8
from lockstep.artifacts.quantized import QuantizedTensors, data_name, order_name, scales_name, zero_points_name
from lockstep.artifacts.tensor_parallel import Shard, ShardedClass, TensorParallel
from lockstep.config.packing import MXFP4_GROUP
from lockstep.errors import InputError, note
from lockstep.onnx_tools import fp8_products, int8_rounding
from lockstep.onnx_tools.signature import ACTIVATIONS, signature_of
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, add_input, run_passes
from lockstep.onnx_tools.values import attribute, is_linear, is_transposed, required, sizes_of
from lockstep.weights.mxfp4 import e2m1_pairs, e8m0

_DOMAIN = "com.microsoft"
_LAYER_SLOT_PREFIXES = ("previous", "current.")  # of slots of a layer's weights in the blocks' graphs
Slots = Mapping[str, Sequence[str]]
Rewrite = Callable[[GraphFile, Mapping[str, int]], tuple[GraphFile, bytes]]


@dataclass(frozen=True)
class _SlotUse:
    """A weight slot of a block in one layer: what decides whether its tensors can be quantised.

    bits: None for full precision. columns: length of a row, the numbers that share a product. is_stack: several
    matrices. is_transposed: the checkpoint stores it as [in_features, out_features].
    """

    tensors: tuple[str, ...]
    bits: int | None
    columns: int
    is_head: bool
    is_stack: bool
    is_transposed: bool


def quantize(
    files: Mapping[str, bytes],
    assembly: Assembly,
    precision: str,
    group_size: int,
    prequantized: QuantizedTensors | None = None,
    head_bits: int = HEAD_BITS,
    activations: str | None = None,
) -> tuple[dict[str, bytes], Assembly]:
    """Return the files and the assembly of `precision`, rewritten from those in fp32.

    prequantized: the tensors that the checkpoint already quantised; no others are quantised then. head_bits: of the
    output head, and of an embedding that is tied to it. activations: their type in engines of a backend that computes
    in 16 bits; the graphs name it. Raises InputError where no weight of a layer can be quantised, or the rows of one
    are no multiple of `group_size`.
    """
    if is_fp8(precision):
        group_size = ROW
        head_bits = HEAD_BITS
    quantized = _choose_tensors(files, assembly, precision, group_size, prequantized, head_bits)
    # From here on all blocks of a class have the same slots quantised: one graph serves them.
    files, assembly = _split_classes_by_bits(files, assembly, quantized)
    rewritten = dict(files)
    classes = {}
    rounds_activations = has_8_bit_activations(precision)

    def rewrite(graph: GraphFile, bits: Mapping[str, int]) -> tuple[GraphFile, bytes]:
        return _rewrite_graph(graph, files[graph.file], bits, quantized, rounds_activations, activations)

    for name, graph in assembly.classes.items():
        bits = _slot_bits(_slots_of_class(assembly, name), quantized)
        classes[name], rewritten[graph.file] = rewrite(graph, bits)

    def rebind(block: BoundBlock) -> BoundBlock:
        return BoundBlock(block.graph, _bind_slots(block.slots, quantized))

    uncut = assembly.batchful
    if uncut is not None:
        bits = _slot_bits([uncut.tensors], quantized)
        graph, rewritten[uncut.file] = rewrite(uncut, bits)
        uncut = Uncut(graph.file, graph.sha256, graph.signature, _bind_slots(uncut.tensors, quantized))
    ranks = assembly.tensor_parallel
    if ranks is not None:
        ranks = _quantize_ranks(rewrite, assembly, ranks, quantized, rewritten)
    adapters = assembly.adapters and _rename_adapter_slots(assembly.adapters, classes)
    return rewritten, replace(
        assembly,
        precision=precision,
        classes=classes,
        embedding=rebind(assembly.embedding),
        layers=tuple(_map_blocks(layer, rebind) for layer in assembly.layers),
        batchful=uncut,
        tensor_parallel=ranks,
        quantization=quantized,
        adapters=adapters,
        activations=activations,
    )


def _map_blocks(layer: Layer, change: Callable[[BoundBlock], BoundBlock]) -> Layer:
    return replace(
        layer,
        block=change(layer.block),
        exit=layer.exit and change(layer.exit),
        later_exits=tuple(map(change, layer.later_exits)),
    )


def _split_classes_by_bits(
    files: Mapping[str, bytes], assembly: Assembly, quantized: QuantizedTensors
) -> tuple[Mapping[str, bytes], Assembly]:
    """Return files and assembly with a class for each choice of quantised slots among the blocks of one class.

    Checkpoints may leave layers or matrices in floating point. Raises InputError for such ones on several ranks.
    """
    class_names: dict[str, dict[frozenset[tuple[str, int]], str]] = {name: {} for name in assembly.classes}
    used_names = {*class_names, *assembly.mixers}

    def rename(block: BoundBlock) -> BoundBlock:
        names = class_names[block.graph]
        choice = frozenset(_slot_bits([block.slots], quantized).items())
        if choice not in names:
            name = block.graph
            if names:  # the first choice keeps the name of the class
                name = next(new for n in itertools.count(2) if (new := f"{block.graph}_{n}") not in used_names)
            names[choice] = name
            used_names.add(name)
        return replace(block, graph=names[choice])

    layers = tuple(_map_blocks(layer, rename) for layer in assembly.layers)
    original_names: dict[str, str] = {}  # {added class: the class that it is copied from}
    for original, names in class_names.items():
        original_names |= {name: original for name in names.values() if name != original}
    if not original_names:
        return files, assembly
    if assembly.tensor_parallel is not None:
        raise InputError(
            "tensor_parallel: expected 1 for a checkpoint of which some layers are quantised and others are not, found "
            f"{assembly.tensor_parallel.degree}; choose a precision in floating point"
        )
    copied_files = dict(files)
    classes = dict(assembly.classes)
    adapters = assembly.adapters
    for name, original in original_names.items():
        classes[name] = replace(assembly.classes[original], file=f"{name}.onnx")
        copied_files[f"{name}.onnx"] = files[assembly.classes[original].file]
        if adapters is not None and original in adapters.classes:
            adapters = replace(adapters, classes={**adapters.classes, name: adapters.classes[original]})
    return copied_files, replace(assembly, classes=classes, layers=layers, adapters=adapters)


def _rename_adapter_slots(adapters: LoraSlots, classes: Mapping[str, GraphFile]) -> LoraSlots:
    """Return the adapters' linear layers by the slots of the rewritten graphs."""
    renamed: dict[str, dict[str, LoraSlot]] = {}
    for name, layers in adapters.classes.items():
        slots = {slot.name for slot in classes[name].signature.slots}
        renamed[name] = {}
        for slot, layer in layers.items():
            if slot not in slots:  # the layer is quantised
                slot = data_name(slot)
            renamed[name][slot] = layer
    return replace(adapters, classes=renamed)


def _quantize_ranks(
    rewrite: Rewrite,
    assembly: Assembly,
    ranks: TensorParallel,
    quantized: QuantizedTensors,
    rewritten: dict[str, bytes],
) -> TensorParallel:
    """Return the ranks' quantised graphs and shards; the graphs' bytes are put into `rewritten`.

    A rank takes the same rows of a weight as in full precision, or the same columns where these are whole groups.
    Raises InputError where they are not.
    """
    if quantized.group_size == ROW:
        raise InputError(
            f"tensor_parallel: expected 1 in w8a8-fp8, whose activations have a scale a row, found {ranks.degree}; "
            "choose another precision"
        )
    if quantized.ordered:
        raise InputError(
            "tensor_parallel: expected 1 for weights with activation order (desc_act), whose groups lie across ranks, "
            f"found {ranks.degree}; choose a precision in floating point"
        )
    graphs: dict[str, GraphFile] = {}
    classes: dict[str, ShardedClass] = {}
    for name, sharded in ranks.classes.items():
        slots_of_class = _slots_of_class(assembly, name)
        bits = _slot_bits(slots_of_class, quantized)
        tensors: dict[str, str] = {}
        for slots in reversed(slots_of_class):
            tensors.update((slot, names[0]) for slot, names in slots.items())
        dims = {slot.name: len(slot.shape) for slot in assembly.classes[name].signature.slots}
        weights: dict[str, Shard] = {}
        for slot, shard in sharded.weights.items():
            if tensors[slot] in quantized.transposed:
                shard = replace(shard, axis=1 - shard.axis)
            if slot not in bits:
                weights[slot] = shard
                continue
            if shard.axis < dims[slot] - 1:  # whole rows
                weights |= dict.fromkeys(quantized.parts(slot), shard)
                continue
            group_shard = _shard_of_groups(shard, quantized.group_size, tensors[slot])
            weights[data_name(slot)] = group_shard
            weights[scales_name(slot)] = group_shard
            if quantized.zero_points:  # a byte has those of several groups
                groups_per_byte = 8 // bits[slot]
                zero_point_shard = _shard_of_groups(shard, quantized.group_size * groups_per_byte, tensors[slot])
                weights[zero_points_name(slot)] = zero_point_shard
        for piece in sharded.pieces:
            graph = ranks.graphs[piece.graph]
            bits_of_piece = {slot.name: bits[slot.name] for slot in graph.signature.slots if slot.name in bits}
            graphs[piece.graph], rewritten[graph.file] = rewrite(graph, bits_of_piece)
        classes[name] = replace(sharded, weights=weights)
    return replace(ranks, graphs=graphs, classes=classes)


def _shard_of_groups(shard: Shard, group_size: int, tensor: str) -> Shard:
    """Return the shard of a tensor with one element a group. Raises InputError where groups would be divided."""
    ranges = []
    for rank in shard.ranges:
        if any(low % group_size or high % group_size for low, high in rank):
            raise InputError(
                f"group_size: expected a size that divides the {shard.count} numbers of a row of {tensor} that each of "
                f"{len(shard.ranges)} ranks takes, found {group_size}; choose another one, or another tensor_parallel"
            )
        ranges.append(tuple((low // group_size, high // group_size) for low, high in rank))
    return replace(shard, ranges=tuple(ranges))


def _choose_tensors(
    files: Mapping[str, bytes],
    assembly: Assembly,
    precision: str,
    group_size: int,
    prequantized: QuantizedTensors | None,
    head_bits: int,
) -> QuantizedTensors:
    """Choose the tensors to quantise: those for which all slots that take them can be quantised, with all tensors."""
    if prequantized is not None and prequantized.ordered and has_8_bit_activations(precision):
        raise InputError(
            f"precision {precision}: expected weights whose groups are of neighbours, found a checkpoint with "
            "activation order (desc_act); choose a precision with activations of 16 bits"
        )
    is_mxfp4 = prequantized is not None and prequantized.mxfp4
    keeps_embeddings = is_fp8(precision)
    if prequantized is not None and (prequantized.zero_points or prequantized.ordered):
        keeps_embeddings = True
    uses = list(_slot_uses(files, assembly, precision, head_bits, keeps_embeddings, is_mxfp4))
    if prequantized is not None:
        uses = [replace(use, bits=_prequantized_bits(use, prequantized)) for use in uses]
    # A slot that stays in full precision keeps all its tensors so, and with them every other slot that takes one.
    full_precision: set[str] = set()
    num_before = -1
    while num_before < len(full_precision):
        num_before = len(full_precision)
        for use in uses:
            if use.bits is None or not full_precision.isdisjoint(use.tensors):
                full_precision.update(use.tensors)
    bits: dict[str, int] = {}
    for use in uses:
        if use.bits is not None:
            bits.update((name, use.bits) for name in use.tensors if name not in full_precision)
    stacks = sorted({use.tensors[0] for use in uses if use.is_stack and use.tensors[0] not in bits})
    if stacks:
        reason = "[out_features, in_features] each"
        if prequantized is not None:
            reason += " or are no integers of the checkpoint"
        names = stacks[0]
        if len(stacks) > 1:
            names += f" and {len(stacks) - 1} more"
        note(
            f"precision {precision}: experts stay in float32, for their weights are kept in another form than "
            f"{reason}: {names}"
        )
    quantized_uses = [use for use in uses if use.tensors[0] in bits]
    if all(use.is_head for use in quantized_uses):
        raise InputError(
            f"precision {precision}: expected linear weights that can be quantised, found none in a model of type "
            f"{assembly.model_type!r}; choose another precision"
        )
    for use in quantized_uses:
        if group_size != ROW and use.columns % group_size:
            raise InputError(
                f"group_size: expected a size that divides the {use.columns} numbers of a row of {use.tensors[0]}, "
                f"found {group_size}; choose another one, or another precision than {precision}"
            )
    if prequantized:
        return replace(prequantized, bits=bits)
    transposed = {use.tensors[0] for use in quantized_uses if use.is_transposed}
    return QuantizedTensors(group_size, bits, transposed=tuple(sorted(transposed)))


def _prequantized_bits(use: _SlotUse, prequantized: QuantizedTensors) -> int | None:
    """Return the bits of a slot in the checkpoint; None where it has none, or tensors that cannot share a slot."""
    if use.bits is None or use.is_transposed:
        return None
    if prequantized.ordered and len(use.tensors) > 1:  # tensors with an order each cannot share a product
        return None
    # Checkpoints of a bare decoder leave out the first part of the name ("transformer.").
    bits = {prequantized.bits.get(name) or prequantized.bits.get(name.partition(".")[2]) for name in use.tensors}
    if len(bits) > 1:
        return None
    return bits.pop()


def _slot_uses(
    files: Mapping[str, bytes],
    assembly: Assembly,
    precision: str,
    head_bits: int,
    keeps_embeddings: bool,
    is_mxfp4: bool,
) -> Iterator[_SlotUse]:
    """Yield the slots of all blocks.

    Embeddings, which can read a quantised weight as products do, do not decide and are left out, unless
    keeps_embeddings says that they must stay in full precision.
    """
    for name, graph in assembly.classes.items():
        columns = {slot.name: slot.sizes[-1] for slot in graph.signature.slots}
        model = ir.from_proto(onnx.ModelProto.FromString(files[graph.file])).graph
        gathered = {required(node.inputs[0]).name for node in model if node.op_type == "GatherND"}
        stacks = {slot.name for slot in graph.signature.slots if slot.name in gathered and len(slot.shape) == 3}
        expert_stacks = _expert_stacks(model, columns, is_mxfp4)
        if is_mxfp4:
            columns |= {slot: sizes_of(gather.inputs[0])[1] for slot, gather in expert_stacks.items()}
        products = _linear_products(model, columns)
        transposed = {slot for slot, nodes in products.items() if is_transposed(nodes[0])}
        columns |= {slot: sizes_of(products[slot][0].inputs[1])[0] for slot in transposed}
        quantizable = set(products) - _router_slots(model, products)
        if not is_fp8(precision):
            quantizable |= set(expert_stacks)
        embeddings = {} if keeps_embeddings else _embeddings(model, columns)
        for slots in _slots_of_class(assembly, name):
            for slot, tensors in slots.items():
                if slot in embeddings:
                    continue
                is_head = not slot.startswith(_LAYER_SLOT_PREFIXES)
                bits = None
                # Several tensors of a transposed weight lie side by side: their rows are not contiguous.
                if slot in quantizable and (len(tensors) == 1 or slot not in transposed):
                    bits = head_bits if is_head else QUANTIZATIONS[precision].bits
                yield _SlotUse(tuple(tensors), bits, columns[slot], is_head, slot in stacks, slot in transposed)


def _slots_of_class(assembly: Assembly, name: str) -> list[Slots]:
    blocks = [assembly.embedding]
    for layer in assembly.layers:
        blocks += layer.parts
    return [block.slots for block in blocks if block.graph == name]


def _slot_bits(slots_of_blocks: Sequence[Slots], quantized: QuantizedTensors) -> dict[str, int]:
    """Return {quantised slot: bits}; a slot's tensors are quantised all together, so the first stands for them."""
    first_tensors: dict[str, str] = {}
    for slots in slots_of_blocks:
        first_tensors.update((slot, tensors[0]) for slot, tensors in slots.items())
    return {slot: quantized.bits[name] for slot, name in first_tensors.items() if name in quantized.bits}


def _bind_slots(slots: Slots, quantized: QuantizedTensors) -> dict[str, list[str]]:
    bound: dict[str, list[str]] = {}
    for slot, tensors in slots.items():
        if tensors[0] not in quantized.bits:
            bound[slot] = list(tensors)
            continue
        parts_of_tensors = [quantized.parts(tensor) for tensor in tensors]
        for slot_part, *tensor_parts in zip(quantized.parts(slot), *parts_of_tensors, strict=True):
            bound[slot_part] = tensor_parts
    return bound


def _only_readers(graph: ir.Graph, slots: Collection[str], op_type: str, position: int) -> dict[str, ir.Node]:
    """Return {slot: node} of slots whose only reader is a node of this operator, as its input `position`."""
    nodes = {}
    for slot in _inputs(graph, slots):
        uses = [*slot.uses()]
        if len(uses) == 1 and uses[0].node.op_type == op_type and uses[0].idx == position:
            nodes[str(slot.name)] = uses[0].node
    return nodes


def _inputs(graph: ir.Graph, names: Collection[str]) -> list[ir.Value]:
    return [value for value in graph.inputs if value.name in names]


def _linear_products(graph: ir.Graph, slots: Collection[str]) -> dict[str, list[ir.Node]]:
    """Return {slot: its products} of matrices that only plain Gemms of one orientation read.

    The uncut graph has several of a slot where blocks compute the same.
    """
    products = {}
    for slot in _inputs(graph, slots):
        uses = slot.uses()
        for is_plain in (is_linear, is_transposed):
            if uses and all(is_plain(node) and index == 1 for node, index in uses):
                products[str(slot.name)] = [node for node, _ in uses]
    return products


def _router_slots(graph: ir.Graph, products: Mapping[str, Sequence[ir.Node]]) -> set[str]:
    """Return the slots of products whose results choose experts, without another product in between.

    Routers stay in full precision: a rounded score may choose another expert.
    """
    choosing = {node.inputs[0] for node in graph if node.op_type in ("ArgMax", "TopK")}
    for node in reversed(graph):
        if not choosing.isdisjoint(node.outputs) and node.op_type not in ("Gemm", "MatMul"):
            choosing.update(node.inputs)
    routers = set()
    for slot, nodes in products.items():
        if any(node.outputs[0] in choosing for node in nodes):
            routers.add(slot)
    return routers


def _expert_stacks(graph: ir.Graph, slots: Collection[str], transposed: bool) -> dict[str, ir.Node]:
    """Return {slot: its GatherND} of stacks of which each row takes a matrix. transposed: [in, out] features."""
    gathers = {}
    for slot, gather in _only_readers(graph, slots, "GatherND", 0).items():
        uses = [*gather.outputs[0].uses()]
        is_weight = len(uses) == 1 and uses[0].node.op_type == "MatMul" and uses[0].idx == int(transposed)
        if is_weight and len(sizes_of(gather.inputs[0])) == 3 and not attribute(gather, "batch_dims", 0):
            gathers[slot] = gather
    return gathers


def _embeddings(graph: ir.Graph, slots: Collection[str]) -> dict[str, ir.Node]:
    """Return {slot: its Gather} of weights `[vocab_size, hidden_size]` whose only reader is a Gather of rows."""
    gathers = {}
    for slot, gather in _only_readers(graph, slots, "Gather", 0).items():
        if not attribute(gather, "axis", 0) and len(sizes_of(gather.inputs[0])) == 2:
            gathers[slot] = gather
    return gathers


def _rewrite_graph(
    graph: GraphFile,
    data: bytes,
    bits: Mapping[str, int],
    quantized: QuantizedTensors,
    rounds_activations: bool,
    activations: str | None,
) -> tuple[GraphFile, bytes]:
    """Return a graph with quantised weights, and its bytes.

    rounds_activations: to 8 bits, before products. activations: as in `quantize`.
    """
    if not bits and activations is None:
        return graph, data
    model = run_passes(onnx.ModelProto.FromString(data), QuantizeWeights(bits, quantized, rounds_activations))
    if activations is not None:
        model.metadata_props.add(key=ACTIVATIONS, value=activations)
    serialized = model.SerializeToString(deterministic=True)
    names = {slot.name for slot in graph.signature.slots} - set(bits)
    for slot in bits:
        names.update(quantized.parts(slot))
    signature = signature_of(model.graph, names)
    return GraphFile(graph.file, hashlib.sha256(serialized).hexdigest(), signature), serialized


class QuantizeWeights(Pass):
    """Read quantised weights. bits: {slot: of its numbers}. rounds_activations: to 8 bits, before products."""

    def __init__(self, bits: Mapping[str, int], quantized: QuantizedTensors, rounds_activations: bool):
        self._bits = bits
        self._quantized = quantized
        self._rounds_activations = rounds_activations
        self._rounded: dict[ir.Value, Any] = {}  # {activation: what its products read}

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        products = _linear_products(graph, self._bits)
        stacks = _expert_stacks(graph, self._bits, self._quantized.mxfp4)
        readers = {**_embeddings(graph, self._bits), **stacks}
        slot_of_node = {node: slot for slot, node in readers.items()}
        for slot, nodes in products.items():
            slot_of_node.update((node, slot) for node in nodes)
        parts: dict[str, list[ir.Value]] = {}
        for node in [*graph]:
            if node not in slot_of_node:
                continue
            slot = slot_of_node[node]
            if slot in products:
                weight = required(node.inputs[1])
            else:  # a lookup, whose first input is the table
                weight = required(node.inputs[0])
            # rows: the sizes before the axis along which groups share a scale, which is in_features in any layout.
            *rows, columns = sizes_of(weight)
            if self._quantized.mxfp4 or is_transposed(node):  # [..., in_features, out_features]
                *rows, columns = [*rows[:-1], columns, rows[-1]]
            if slot not in parts:
                parts[slot] = self._add_parts(graph, weight, rows, columns)
            sizes = {"bits": self._bits[slot], "block_size": self._quantized.group_size}
            writer = GraphWriter(graph, str(node.outputs[0].name), before=node)
            if slot in products:
                self._product(writer, node, parts[slot], {**sizes, "K": columns, "N": rows[0]})
            elif self._quantized.mxfp4:
                _mxfp4_stack(writer, node, parts[slot], [rows[-1], columns])
            elif slot in stacks:
                _stack(writer, node, parts[slot], sizes, [*rows, columns * self._bits[slot] // 8])
            else:
                _embedding(writer, node, parts[slot], sizes, columns)
        if self._quantized.group_size != ROW:
            model.opset_imports[_DOMAIN] = 1
        return PassResult(model, True)

    def _add_parts(self, graph: ir.Graph, weight: ir.Value, rows: Sequence[int], columns: int) -> list[ir.Value]:
        slot = str(weight.name)
        names = self._quantized.parts(slot)
        types = _part_types(rows, columns, self._bits[slot], self._quantized)
        return [add_input(graph, name, *type_, before=weight) for name, type_ in zip(names, types, strict=True)]

    def _product(self, writer: GraphWriter, node: ir.Node, parts: Sequence[ir.Value], sizes: Mapping[str, Any]) -> None:
        """Replace a Gemm by a product that reads quantised weights, and an addition of its bias."""
        (out,) = node.outputs
        activation, _, *bias = map(required, node.inputs)
        settings: dict[str, Any] = {"replaces": out}
        if bias:
            settings = {"result": f"{out.name}/product"}
        size = sizes["block_size"]
        if size == ROW:
            if activation not in self._rounded:
                self._rounded[activation] = fp8_products.rounded(writer.graph, node, activation)
            data, scales = parts
            product = fp8_products.product(writer, self._rounded[activation], data, scales, node.name, **settings)
        else:
            if self._rounds_activations:
                if activation not in self._rounded:
                    rounded = int8_rounding.rounded(writer.graph, node, activation, sizes["K"], size)
                    self._rounded[activation] = rounded
                activation = self._rounded[activation]
            if str(parts[-1].name).endswith(order_name("")):
                *parts, order = parts
                activation = writer.op("Gather", activation, order, axis=1)
            product = writer.op("MatMulNBits", activation, *parts, name=node.name, domain=_DOMAIN, **sizes, **settings)
        if bias:
            writer.op("Add", product, *bias, replaces=out)


def _part_types(
    rows: Sequence[int], columns: int, bits: int, quantized: QuantizedTensors
) -> list[tuple[ir.DataType, list[int]]]:
    """Return element types and shapes of the slots that replace a weight's, in the order of `quantized.parts`."""
    element = ir.DataType
    size = quantized.group_size
    if size == ROW:
        return [(element.FLOAT8E4M3FN, [*rows, columns]), (element.FLOAT, [*rows])]
    groups = columns // size
    scale = element.UINT8 if quantized.mxfp4 else element.FLOAT
    types: list[tuple[ir.DataType, list[int]]] = [(element.UINT8, [*rows, groups, size * bits // 8])]
    types.append((scale, [*rows, groups]))
    if quantized.zero_points:
        types.append((element.UINT8, [*rows, (groups * bits + 7) // 8]))
    if quantized.ordered:
        types.append((element.INT64, [columns]))
    return types


_GATHERED_ROWS: dict[str, Any] = {"gather_axis": 0, "quantize_axis": 2, "domain": _DOMAIN}


def _stack(
    writer: GraphWriter, node: ir.Node, parts: Sequence[ir.Value], sizes: Mapping[str, Any], shape: Sequence[int]
) -> None:
    """Gather each row's expert; shape: of the integers, in bytes, without groups."""
    data, *scales = parts
    inputs = writer.op("Reshape", data, shape), writer.op("Reshape", node.inputs[1], [-1]), *scales
    settings = {**_GATHERED_ROWS, **sizes, "name": node.name, "replaces": node.outputs[0]}
    writer.op("GatherBlockQuantized", *inputs, **settings)


def _mxfp4_stack(writer: GraphWriter, node: ir.Node, parts: Sequence[ir.Value], shape: Sequence[int]) -> None:
    """Gather experts and turn codes into numbers; shape: [out_features, in_features]."""
    data, scales = parts
    rows, columns = shape

    def look_up(table: np.ndarray, slot: ir.Value) -> ir.Value:
        codes = writer.op("Cast", writer.op("GatherND", slot, node.inputs[1]), to=ir.DataType.INT32)
        return writer.op("Gather", table, codes)

    numbers = writer.op("Reshape", look_up(e2m1_pairs(), data), [-1, rows, columns // MXFP4_GROUP, MXFP4_GROUP])
    factors = writer.op("Unsqueeze", look_up(e8m0(), scales), [-1])
    weight = writer.op("Reshape", writer.op("Mul", numbers, factors), [-1, rows, columns])
    writer.op("Transpose", weight, name=node.name, perm=[0, 2, 1], replaces=node.outputs[0])


def _embedding(
    writer: GraphWriter, node: ir.Node, parts: Sequence[ir.Value], sizes: Mapping[str, Any], columns: int
) -> None:
    data, scales = parts
    inputs = data, node.inputs[1], writer.op("Unsqueeze", scales, [-1])
    groups = writer.op("GatherBlockQuantized", *inputs, name=node.name, **_GATHERED_ROWS, **sizes)
    writer.op("Reshape", groups, [-1, columns], replaces=node.outputs[0])
