"""Graphs of quantised weights, made of those in full precision.

In: an assembly in fp32 and its graphs. Out: those of a quantised precision.

Each plain `Gemm` with a weight of its own becomes ONNX Runtime's `MatMulNBits`, which reads the weight as integers
and a scale for each group of them: two slots, `<slot>.data` and `<slot>.scales`, in place of one, and of a checkpoint
that was quantised with zero points of its own a third, `<slot>.zero_points`; of one with activation order another,
`<slot>.order`, in which the product takes its activations. Where the product reads the weight as `[in_features,
out_features]`, as GPT-2's do, it is kept transposed. The activations stay as they are: `accuracy_level` is left
out, so what the graph says is a product with the dequantised weight. In w8a8 and w4a8 they are rounded to int8 first,
in the groups of the weight, by nodes of the graph (`onnx_tools.int8_rounding`); but not those of experts. An embedding
that is tied to such a weight, as a rule the output head, reads rows of it: its `Gather` becomes `GatherBlockQuantized`,
on the same two tensors. So does the `GatherND` of a stack `[num_experts, out_features, in_features]`, whose slots hold
the experts' integers and scales one after another. A stack of MXFP4, `[num_experts, in_features, out_features]`, is
gathered as the checkpoint's codes and shared exponents, which two tables of the graph turn into numbers.

In w8a8-fp8 weights and activations are e4m3 numbers (`onnx_tools.fp8_products`), but not experts, nor a head that is
tied to the embedding.

In full precision stay what is no such weight (other embeddings, norms, biases, convolutions), what a graph reads in
another way too, and routers, by which experts are chosen. A line tells of experts that do.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from lockstep.artifacts.adapters import LoraSlots
from lockstep.artifacts.assembly import Assembly, BoundBlock, GraphFile, Layer, Uncut
from lockstep.artifacts.dtypes import HEAD_BITS, QUANTIZATIONS, ROW, has_8_bit_activations, is_fp8
from lockstep.artifacts.quantized import QuantizedTensors, data_name, order_name, scales_name, zero_points_name
from lockstep.artifacts.tensor_parallel import Shard, ShardedClass, TensorParallel
from lockstep.config.packing import MXFP4_GROUP
from lockstep.errors import InputError, note
from lockstep.onnx_tools import fp8_products
from lockstep.onnx_tools.int8_rounding import rounding
from lockstep.onnx_tools.rewriter import Emitter, Rewriter, attributes_of, is_linear, is_transposed
from lockstep.onnx_tools.signature import signature_of
from lockstep.weights.mxfp4 import e2m1_pairs, e8m0

_DOMAIN = "com.microsoft"
_OF_LAYERS = ("previous", "current.")  # how slots of a layer's weights are called in the blocks' graphs
Slots = Mapping[str, Sequence[str]]
Rewrite = Callable[[GraphFile, Mapping[str, int]], tuple[GraphFile, bytes]]


@dataclass(frozen=True)
class _Use:
    """A weight slot of a block in one layer.

    bits: None for full precision. columns: of a row, numbers that share a product. is_stack: of several matrices.
    transposed: whether the checkpoint holds it as [in_features, out_features].
    """

    tensors: tuple[str, ...]
    bits: int | None
    columns: int
    is_head: bool
    is_stack: bool
    transposed: bool


def quantize(
    files: Mapping[str, bytes],
    assembly: Assembly,
    precision: str,
    group_size: int,
    already: QuantizedTensors | None = None,
    head_bits: int = HEAD_BITS,
) -> tuple[dict[str, bytes], Assembly]:
    """Return the files and the assembly of `precision`, made of those in fp32.

    already: what the checkpoint has quantised; then it is these tensors and no others. head_bits: of the output head,
    and of an embedding that is tied to it. Raises InputError where no weight of a layer can be quantised, or the rows
    of one are no multiple of `group_size`.
    """
    if is_fp8(precision):
        group_size = ROW
        head_bits = HEAD_BITS
    quantized = _choose(files, assembly, precision, group_size, already, head_bits)
    files, assembly = _by_bits(files, assembly, quantized)
    rewritten = dict(files)
    classes = {}
    rounds = has_8_bit_activations(precision)

    def rewrite(graph: GraphFile, bits: Mapping[str, int]) -> tuple[GraphFile, bytes]:
        return _rewritten(graph, files[graph.file], bits, quantized, rounds)

    for name, graph in assembly.classes.items():
        bits = _bits(_places(assembly, name), quantized)
        classes[name], rewritten[graph.file] = rewrite(graph, bits)

    def part(old: BoundBlock) -> BoundBlock:
        return BoundBlock(old.graph, _bound(old.slots, quantized))

    layers = tuple(
        Layer(part(layer.block), layer.variant, layer.exit and part(layer.exit), tuple(map(part, layer.later_exits)))
        for layer in assembly.layers
    )
    uncut = assembly.batchful
    if uncut is not None:
        bits = _bits([uncut.tensors], quantized)
        graph, rewritten[uncut.file] = rewrite(uncut, bits)
        uncut = Uncut(graph.file, graph.sha256, graph.signature, _bound(uncut.tensors, quantized))
    ranks = assembly.tensor_parallel
    if ranks is not None:
        ranks = _of_ranks(rewrite, assembly, ranks, quantized, rewritten)
    assembly = replace(
        assembly,
        precision=precision,
        classes=classes,
        embedding=part(assembly.embedding),
        layers=layers,
        batchful=uncut,
        tensor_parallel=ranks,
    )
    adapters = assembly.adapters and _adapters_of(assembly.adapters, classes)
    return rewritten, replace(assembly, quantization=quantized, adapters=adapters)


def _by_bits(
    files: Mapping[str, bytes], assembly: Assembly, quantized: QuantizedTensors
) -> tuple[Mapping[str, bytes], Assembly]:
    """Return files and assembly with a class for each choice of quantised slots among the blocks of one class.

    Checkpoints may leave layers or matrices in floating point. Raises InputError for such ones on several ranks.
    """
    names: dict[str, dict[frozenset[tuple[str, int]], str]] = {name: {} for name in assembly.classes}
    known = {*names, *assembly.mixers}

    def named(part: BoundBlock) -> BoundBlock:
        choices = names[part.graph]
        choice = frozenset(_bits([part.slots], quantized).items())
        if choice not in choices:
            numbers = itertools.count(2)
            choices[choice] = (
                part.graph
                if not choices
                else next(name for number in numbers if (name := f"{part.graph}_{number}") not in known)
            )
            known.add(choices[choice])
        return replace(part, graph=choices[choice])

    layers = tuple(
        replace(
            layer,
            block=named(layer.block),
            exit=layer.exit and named(layer.exit),
            later_exits=tuple(map(named, layer.later_exits)),
        )
        for layer in assembly.layers
    )
    others = {new: name for name, choices in names.items() for new in choices.values() if new != name}
    if not others:
        return files, assembly
    if assembly.tensor_parallel is not None:
        raise InputError(
            "tensor_parallel: expected 1 for a checkpoint of which some layers are quantised and others are not, found "
            f"{assembly.tensor_parallel.degree}; choose a precision in floating point"
        )
    graphs = {new: replace(assembly.classes[name], file=f"{new}.onnx") for new, name in others.items()}
    adapters = assembly.adapters
    if adapters is not None:
        copies = {new: adapters.classes[name] for new, name in others.items() if name in adapters.classes}
        adapters = replace(adapters, classes={**adapters.classes, **copies})
    copied = {graphs[new].file: files[assembly.classes[name].file] for new, name in others.items()}
    return {**files, **copied}, replace(
        assembly, classes={**assembly.classes, **graphs}, layers=layers, adapters=adapters
    )


def _adapters_of(slots: LoraSlots, classes: Mapping[str, GraphFile]) -> LoraSlots:
    """Return the adapters' linear layers, by the slots of the rewritten graphs."""
    names = {name: {slot.name for slot in graph.signature.slots} for name, graph in classes.items()}
    renamed = {
        name: {slot if slot in names[name] else data_name(slot): layer for slot, layer in layers.items()}
        for name, layers in slots.classes.items()
    }
    return replace(slots, classes=renamed)


def _of_ranks(
    rewrite: Rewrite,
    assembly: Assembly,
    ranks: TensorParallel,
    quantized: QuantizedTensors,
    rewritten: dict[str, bytes],
) -> TensorParallel:
    """Return what ranks run of the quantised weights; their graphs go to `rewritten`.

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
        tensors = {slot: used[0] for slots in reversed(_places(assembly, name)) for slot, used in slots.items()}
        bits = _bits(_places(assembly, name), quantized)
        size = quantized.group_size
        weights: dict[str, Shard] = {}
        dims = {slot.name: len(slot.shape) for slot in assembly.classes[name].signature.slots}
        for slot, shard in sharded.weights.items():
            if tensors[slot] in quantized.transposed:
                shard = replace(shard, axis=1 - shard.axis)
            if slot not in bits or shard.axis < dims[slot] - 1:  # whole rows
                weights |= dict.fromkeys(quantized.parts(slot) if slot in bits else [slot], shard)
                continue
            weights[data_name(slot)] = weights[scales_name(slot)] = _by_groups(shard, size, tensors[slot])
            if quantized.zero_points:  # of several groups in a byte
                weights[zero_points_name(slot)] = _by_groups(shard, size * 8 // bits[slot], tensors[slot])
        for piece in sharded.pieces:
            graph = ranks.graphs[piece.graph]
            of_piece = {slot.name: bits[slot.name] for slot in graph.signature.slots if slot.name in bits}
            graphs[piece.graph], rewritten[graph.file] = rewrite(graph, of_piece)
        classes[name] = replace(sharded, weights=weights)
    return replace(ranks, graphs=graphs, classes=classes)


def _by_groups(shard: Shard, group_size: int, tensor: str) -> Shard:
    """Return a rank's part of what has one element a group. Raises InputError where groups are divided."""
    if any(number % group_size for rank in shard.ranges for pair in rank for number in pair):
        raise InputError(
            f"group_size: expected a size that divides the {shard.count} numbers of a row of {tensor} that each of "
            f"{len(shard.ranges)} ranks takes, found {group_size}; choose another one, or another tensor_parallel"
        )
    parts = tuple(tuple((low // group_size, high // group_size) for low, high in rank) for rank in shard.ranges)
    return replace(shard, ranges=parts)


def _choose(
    files: Mapping[str, bytes],
    assembly: Assembly,
    precision: str,
    group_size: int,
    already: QuantizedTensors | None,
    head_bits: int,
) -> QuantizedTensors:
    """Choose the tensors that are quantised: where all slots that take one can be, with all their tensors."""
    if already is not None and already.ordered and has_8_bit_activations(precision):
        raise InputError(
            f"precision {precision}: expected weights whose groups are of neighbours, found a checkpoint with "
            "activation order (desc_act); choose a precision with activations of 16 bits"
        )
    fp8 = is_fp8(precision)
    is_mxfp4 = already is not None and already.mxfp4
    in_full = fp8 or already is not None and (already.zero_points or already.ordered)
    uses = list(_uses(files, assembly, precision, head_bits, in_full, is_mxfp4))
    if already is not None:
        uses = [replace(use, bits=_bits_already(use, already)) for use in uses]
    if fp8:
        uses = [replace(use, bits=None) if use.is_stack else use for use in uses]
    full = {tensor for use in uses if use.bits is None for tensor in use.tensors}
    while more := {name for use in uses if not full.isdisjoint(use.tensors) for name in use.tensors} - full:
        full |= more
    bits = {name: use.bits for use in uses for name in use.tensors if use.bits is not None and name not in full}
    if stacks := sorted({use.tensors[0] for use in uses if use.is_stack and use.tensors[0] not in bits}):
        note(
            f"precision {precision}: experts stay in float32, for their weights are kept in another form than "
            f"[out_features, in_features] each{'' if already is None else ' or are no integers of the checkpoint'}: "
            f"{stacks[0]}{f' and {len(stacks) - 1} more' if len(stacks) > 1 else ''}"
        )
    if not any(use.tensors[0] in bits and not use.is_head for use in uses):
        raise InputError(
            f"precision {precision}: expected linear weights that can be quantised, found none in a model of type "
            f"{assembly.model_type!r}; choose another precision"
        )
    for use in uses:
        if use.tensors[0] in bits and group_size != ROW and use.columns % group_size:
            raise InputError(
                f"group_size: expected a size that divides the {use.columns} numbers of a row of {use.tensors[0]}, "
                f"found {group_size}; choose another one, or another precision than {precision}"
            )
    if already:
        return replace(already, bits=bits)
    transposed = {use.tensors[0] for use in uses if use.transposed and use.tensors[0] in bits}
    return QuantizedTensors(group_size, bits, transposed=tuple(sorted(transposed)))


def _bits_already(use: _Use, already: QuantizedTensors) -> int | None:
    # Checkpoints of a bare decoder leave out the first part of the name ("transformer.").
    bits = {already.bits.get(name) or already.bits.get(name.partition(".")[2]) for name in use.tensors}
    one_order = not already.ordered or len(use.tensors) == 1
    able = use.bits is not None and not use.transposed
    return bits.pop() if able and len(bits) == 1 and one_order else None


def _uses(
    files: Mapping[str, bytes], assembly: Assembly, precision: str, head_bits: int, embeds_in_full: bool, is_mxfp4: bool
) -> Iterator[_Use]:
    """Yield the slots of all blocks; of embeddings, which read what products read as well as it is, only on request."""
    for name, graph in assembly.classes.items():
        columns = {slot.name: slot.sizes[-1] for slot in graph.signature.slots}
        rewriter = Rewriter(onnx.ModelProto.FromString(files[graph.file]))
        gathered = {node.input[0] for node in rewriter.nodes if node.op_type == "GatherND"}
        stacks = {slot.name for slot in graph.signature.slots if slot.name in gathered and len(slot.shape) == 3}
        found = _stacks(rewriter, columns, is_mxfp4)
        if is_mxfp4:
            columns |= {slot: rewriter.shape(slot)[1] for slot in found}
        products = _products(rewriter, columns)
        transposed = {slot for slot, nodes in products.items() if is_transposed(nodes[0])}
        columns |= {slot: rewriter.shape(slot)[0] for slot in transposed}
        able = {**products, **found}.keys() - _routers(rewriter, columns)
        follows = () if embeds_in_full else _embeddings(rewriter, columns)
        for slots in _places(assembly, name):
            for slot, tensors in slots.items():
                is_head = not slot.startswith(_OF_LAYERS)
                bits = head_bits if is_head else QUANTIZATIONS[precision].bits
                is_whole = len(tensors) == 1 or slot not in transposed  # else its columns lie one behind the other
                taken = bits if slot in able and is_whole else None
                if slot not in follows:
                    yield _Use(tuple(tensors), taken, columns[slot], is_head, slot in stacks, slot in transposed)


def _places(assembly: Assembly, name: str) -> list[Slots]:
    """Return the slots of each block of the model that has the graph `name`."""
    parts = [assembly.embedding, *(part for layer in assembly.layers for part in layer.parts)]
    return [part.slots for part in parts if part.graph == name]


def _bits(places: Sequence[Slots], quantized: QuantizedTensors) -> dict[str, int]:
    """Return {slot: bits} of the slots of a graph that are quantised."""
    taken = {slot: tensors[0] for slots in places for slot, tensors in slots.items()}
    return {slot: quantized.bits[name] for slot, name in taken.items() if name in quantized.bits}


def _bound(slots: Slots, quantized: QuantizedTensors) -> dict[str, list[str]]:
    """Return {slot: tensors} of the rewritten graph."""
    bound: dict[str, list[str]] = {}
    for slot, tensors in slots.items():
        if tensors[0] in quantized.bits:
            parts = zip(quantized.parts(slot), *(quantized.parts(tensor) for tensor in tensors), strict=True)
            bound |= {part: names for part, *names in parts}
        else:
            bound[slot] = list(tensors)
    return bound


def _readers(graph: Rewriter, slots: Collection[str], op_type: str, position: int) -> dict[str, onnx.NodeProto]:
    """Return {slot: the node of this operator that alone reads it, as this input}."""
    nodes = {slot: graph.consumers[slot][0] for slot in slots if len(graph.consumers.get(slot, ())) == 1}
    return {slot: node for slot, node in nodes.items() if node.op_type == op_type and node.input[position] == slot}


def _products(graph: Rewriter, slots: Collection[str]) -> dict[str, list[onnx.NodeProto]]:
    """Return {slot: its products} of matrices that plain Gemms of one orientation alone read.

    These are several in the uncut graph, where blocks that are cut apart compute the same.
    """
    products = {}
    for slot in slots:
        nodes = graph.consumers.get(slot, [])
        for plain in (is_linear, is_transposed):
            if nodes and all(plain(node) and node.input[1] == slot for node in nodes):
                products[slot] = nodes
    return products


def _routers(graph: Rewriter, slots: Collection[str]) -> set[str]:
    """Return the slots of products by whose results experts are chosen, without another product in between."""
    chosen = {name for node in graph.nodes if node.op_type in ("ArgMax", "TopK") for name in node.input[:1]}
    for node in reversed(graph.nodes):
        if not chosen.isdisjoint(node.output) and node.op_type not in ("Gemm", "MatMul"):
            chosen.update(node.input)
    products = _products(graph, slots).items()
    return {slot for slot, nodes in products if any(node.output[0] in chosen for node in nodes)}


def _stacks(graph: Rewriter, slots: Collection[str], transposed: bool) -> dict[str, onnx.NodeProto]:
    """Return {slot: its GatherND} of stacks of which rows take a matrix. transposed: of [in, out] features."""
    found = {}
    for slot, gather in _readers(graph, slots, "GatherND", 0).items():
        products = graph.consumers.get(gather.output[0], [])
        is_product = len(products) == 1 and products[0].op_type == "MatMul"
        is_factor = is_product and products[0].input[int(transposed)] == gather.output[0]
        if is_factor and len(graph.shape(slot)) == 3 and not attributes_of(gather).get("batch_dims", 0):
            found[slot] = gather
    return found


def _embeddings(graph: Rewriter, slots: Collection[str]) -> dict[str, onnx.NodeProto]:
    """Return {slot: its Gather} of weights `[vocab_size, hidden_size]` of which one Gather alone reads rows."""
    gathers = _readers(graph, slots, "Gather", 0).items()
    return {
        slot: node for slot, node in gathers if not attributes_of(node).get("axis", 0) and len(graph.shape(slot)) == 2
    }


def _rewritten(
    graph: GraphFile, data: bytes, bits: Mapping[str, int], quantized: QuantizedTensors, rounds: bool
) -> tuple[GraphFile, bytes]:
    """Return a graph with quantised weights, and its bytes. rounds: they multiply activations of 8 bits."""
    if not bits:
        return graph, data
    rewriter = Rewriter(onnx.ModelProto.FromString(data))
    size = quantized.group_size
    products = _products(rewriter, bits)
    embeddings = _embeddings(rewriter, bits)
    stacks = _stacks(rewriter, bits, quantized.mxfp4)
    slots = {id(node): slot for slot, node in {**stacks, **embeddings}.items()}
    slots |= {id(node): slot for slot, nodes in products.items() for node in nodes}
    shapes = {slot: rewriter.shape(slot) for slot in slots.values()}
    rounded: dict[str, str] = {}  # by activation
    for node in rewriter.nodes:
        if (slot := slots.get(id(node))) is None:
            continue
        *rows, columns = shapes[slot]
        if quantized.mxfp4 or is_transposed(node):
            rows[-1], columns = columns, rows[-1]
        parts = quantized.parts(slot)
        types = _types(rows, columns, bits[slot], quantized)
        inputs = [helper.make_tensor_value_info(part, *type_) for part, type_ in zip(parts, types, strict=True)]
        rewriter.replace_input(slot, *inputs)
        sizes: dict[str, Any] = {"bits": bits[slot], "block_size": size}
        if slot in products:
            activation = node.input[0]
            nodes = list[onnx.NodeProto]()
            if rounds and activation not in rounded:
                is_fp8 = size == ROW
                nodes = (
                    fp8_products.rounding(rewriter, activation)
                    if is_fp8
                    else rounding(rewriter, activation, columns, size)
                )
                rounded[activation] = activation if is_fp8 else nodes[-1].output[0]  # which its products know
            node.input[0] = rounded.get(activation, activation)
            rewriter.replace(node, *nodes, *_product(rewriter, node, parts, {**sizes, "K": columns, "N": rows[0]}))
        elif quantized.mxfp4:
            rewriter.replace(node, *_mxfp4_stack(rewriter, node, parts, [rows[-1], columns]))
        elif slot in stacks:
            rewriter.replace(node, *_stack(rewriter, node, parts, sizes, [*rows, columns * bits[slot] // 8]))
        else:
            rewriter.replace(node, *_embedding(rewriter, node, parts, sizes, columns))
    if size != ROW:
        rewriter.model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    model = rewriter.finish()
    written = model.SerializeToString(deterministic=True)
    names = {part for slot in bits for part in quantized.parts(slot)}
    names |= {slot.name for slot in graph.signature.slots} - set(bits)
    return GraphFile(graph.file, hashlib.sha256(written).hexdigest(), signature_of(model.graph, names)), written


def _types(rows: Sequence[int], columns: int, bits: int, quantized: QuantizedTensors) -> list[tuple[int, list[int]]]:
    """Return element types and shapes of the slots in place of a weight's."""
    types = onnx.TensorProto
    size = quantized.group_size
    if size == ROW:
        return [(types.FLOAT8E4M3FN, [*rows, columns]), (types.FLOAT, [*rows])]
    groups = columns // size
    return [
        (types.UINT8, [*rows, groups, size * bits // 8]),
        (types.UINT8 if quantized.mxfp4 else types.FLOAT, [*rows, groups]),
        *([(types.UINT8, [*rows, (groups * bits + 7) // 8])] if quantized.zero_points else []),
        *([(types.INT64, [columns])] if quantized.ordered else []),
    ]


def _product(
    graph: Rewriter, node: onnx.NodeProto, parts: Sequence[str], sizes: Mapping[str, Any]
) -> list[onnx.NodeProto]:
    (out,), (activation, _, *bias), emit = node.output, node.input, Emitter(graph, node.output[0])
    product = f"{out}/product" if bias else out
    if sizes["block_size"] == ROW:
        data, scales = parts
        fp8_products.product(emit, activation, data, scales, product, node.name)
    else:
        if parts[-1].endswith(order_name("")):
            *parts, order = parts
            activation = emit("Gather", activation, order, axis=1)
        emit("MatMulNBits", activation, *parts, result=product, name=node.name, domain=_DOMAIN, **sizes)
    if bias:
        emit("Add", product, *bias, result=out)
    return emit.nodes


def _stack(
    graph: Rewriter, node: onnx.NodeProto, parts: Sequence[str], sizes: Mapping[str, Any], shape: Sequence[int]
) -> list[onnx.NodeProto]:
    """Return the nodes that gather the experts of rows; shape: of the integers, in bytes, without groups."""
    (out,), (data, *others), emit = node.output, parts, Emitter(graph, node.output[0])
    inputs = emit("Reshape", data, shape), emit("Reshape", node.input[1], [-1]), *others
    emit("GatherBlockQuantized", *inputs, result=out, name=node.name, domain=_DOMAIN, **_OF_ROWS, **sizes)
    return emit.nodes


_OF_ROWS: dict[str, Any] = {"gather_axis": 0, "quantize_axis": 2}


def _mxfp4_stack(
    graph: Rewriter, node: onnx.NodeProto, parts: Sequence[str], shape: Sequence[int]
) -> list[onnx.NodeProto]:
    """Return the nodes that gather experts and turn codes into numbers; shape: [out_features, in_features]."""
    (out,), (data, scales), (rows, columns), emit = node.output, parts, shape, Emitter(graph, node.output[0])

    def looked_up(table: np.ndarray, slot: str) -> str:
        places = emit("Cast", emit("GatherND", slot, node.input[1]), to=onnx.TensorProto.INT32)
        return emit("Gather", table, places)

    numbers = emit("Reshape", looked_up(e2m1_pairs(), data), [-1, rows, columns // MXFP4_GROUP, MXFP4_GROUP])
    factors = emit("Unsqueeze", looked_up(e8m0(), scales), [-1])
    weight = emit("Reshape", emit("Mul", numbers, factors), [-1, rows, columns])
    emit("Transpose", weight, result=out, name=node.name, perm=[0, 2, 1])
    return emit.nodes


def _embedding(
    graph: Rewriter, node: onnx.NodeProto, parts: Sequence[str], sizes: Mapping[str, Any], columns: int
) -> list[onnx.NodeProto]:
    (out,), (data, scales), emit = node.output, parts, Emitter(graph, node.output[0])
    inputs = data, node.input[1], emit("Unsqueeze", scales, [-1])
    groups = emit("GatherBlockQuantized", *inputs, name=node.name, domain=_DOMAIN, **_OF_ROWS, **sizes)
    emit("Reshape", groups, [-1, columns], result=out)
    return emit.nodes
