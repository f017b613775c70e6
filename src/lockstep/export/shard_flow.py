"""Which weights of a block may be split over ranks, and where their partial sums are added: decided by data flow.

In: a canonical block, or the rotary part of an attention, and what a rank holds of its inputs and outputs. Out: for
each value and each weight what a rank holds of it. A product whose weight is split by its outputs (column parallel)
gives a rank its columns; such a value may only meet element-wise operators, operators within a head, data movement, or
a product over just these numbers (row parallel), which gives a partial sum. Partial sums pass through linear
operators, and are added over the ranks where something else reads them. Reference: Megatron-LM, Shoeybi et al. 2019.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lockstep.errors import InputError

_UNARY = {
    "Abs", "Cast", "Cos", "Erf", "Exp", "Gelu", "Identity", "Log", "Neg", "Not", "Reciprocal", "Relu", "Sigmoid", "Sin",
    "Softplus", "Sqrt", "Tanh", "Elu", "LeakyRelu", "HardSigmoid", "Floor",
}  # fmt: skip
_BROADCAST = {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Greater", "Less", "And", "Or", "Clip"}
_WITHIN = {"ReduceMean", "ReduceSum", "ReduceMax", "Softmax", "LayerNormalization"}  # of whole vectors along an axis
_LINEAR_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Neg"}


@dataclass(frozen=True)
class Held:
    """What ranks hold of a tensor: `indices[rank]` along `axis`, [ranks, held] int64, ascending within a section."""

    axis: int
    indices: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.axis == other.axis and np.array_equal(self.indices, other.indices)

    __hash__ = None  # type: ignore[assignment]

    @property
    def count(self) -> int:
        return self.indices.shape[1]

    def at(self, axis: int, indices: np.ndarray | None = None) -> Held:
        return Held(axis, self.indices if indices is None else indices)


def even(axis: int, size: int, ranks: int, unit: int = 1) -> Held | None:
    """Successive parts of `size` numbers, in whole units; where there are fewer units than ranks, successive ranks hold
    the same unit. None where that does not come out even."""
    units = size // unit
    if units % ranks == 0:
        whole = np.arange(units).reshape(ranks, -1)
    elif ranks % units == 0:
        whole = np.repeat(np.arange(units), ranks // units)[:, None]
    else:
        return None
    return Held(axis, (whole[:, :, None] * unit + np.arange(unit)).reshape(ranks, -1))


class NotSplit(Exception):
    """This part cannot be split, for the reason given."""


class Uneven(NotSplit):
    """It could be split, but its size does not divide by the ranks: left whole, each rank would do all the work."""


@dataclass
class Flow:
    """The result: what ranks hold of values and weights. Values and weights that are not named are whole at each.

    rows: weights of row-parallel products. first: weights that only the first rank adds, the others zeros. partial:
    values that are partial sums. summed: those of them that are added over the ranks. whole: {value: why it is whole,
    though a split one was asked for}.
    """

    held: dict[str, Held] = field(default_factory=dict)
    weights: dict[str, Held] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    first: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    summed: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, list[int | str]] = field(default_factory=dict)


def find_flow(
    model: onnx.ModelProto, slots: Iterable[str], given: Mapping[str, Held], wanted: Mapping[str, Held], ranks: int
) -> Flow:
    """given: what ranks hold of inputs; those that are not named are whole. wanted: of outputs, where it can be had;
    other outputs must be whole. Raises NotSplit where an input that is split cannot be used."""
    return _Finder(model, set(slots), dict(given), dict(wanted), ranks).find()


@dataclass(frozen=True)
class _Product:
    """value x weight: axes that the sum runs over, and the axes of result and weight that are the same."""

    node: onnx.NodeProto
    value: str
    value_axis: int
    weight: str
    weight_axis: int
    result_axis: int
    weight_result_axis: int


class _Finder:
    def __init__(
        self, model: onnx.ModelProto, slots: set[str], given: dict[str, Held], wanted: dict[str, Held], ranks: int
    ):
        self.graph, self.slots, self.given, self.wanted, self.ranks = model.graph, slots, given, wanted, ranks
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.graph.initializer}
        self.shapes = shapes_of(model)
        self.producer = {output: node for node in self.graph.node for output in node.output if output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                self.readers[name].append(node)
        self.outputs = [value.name for value in self.graph.output]
        self.stacks = {  # a stack of weights of which each token takes some: its experts
            node.output[0]: node.input[0]
            for node in self.graph.node
            if node.op_type == "GatherND" and node.input[0] in slots
        }
        self.products = {node.output[0]: made for node in self.graph.node if (made := self._product(node)) is not None}
        self.flow = Flow(shapes=self.shapes)

    def find(self) -> Flow:
        groups = self._groups()
        for group in groups:
            self._split(group)
        for name in self.given:
            if name not in self.flow.held:
                raise NotSplit(self.flow.whole.get(name, f"{name} is read as a whole"))
        self._partial_sums()
        return self.flow

    # -- groups of values that are split together, or not at all

    def _product(self, node: onnx.NodeProto) -> _Product | None:
        if node.op_type == "Gemm" and node.input[1] in self.slots:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1 or attributes.get("beta", 1.0) != 1:
                return None
            inner, outer = (1, 0) if attributes.get("transB", 0) else (0, 1)
            return _Product(node, node.input[0], 1, node.input[1], inner, 1, outer)
        if node.op_type == "MatMul":
            left, right = node.input
            rank = len(self.shapes[node.output[0]])
            if left in self.stacks and right not in self.stacks:
                return _Product(node, right, rank - 2, left, rank - 1, rank - 2, rank - 2)
            if right in self.stacks | dict.fromkeys(self.slots):
                last = len(self.shapes[right])
                return _Product(node, left, rank - 1, right, last - 2, rank - 1, last - 1)
        return None

    def _groups(self) -> list[list[str]]:
        """Values that operators other than products link, in the order of their first."""
        parent: dict[str, str] = {}

        def root(name: str) -> str:
            while parent.setdefault(name, name) != name:
                name = parent[name]
            return name

        for value in (*self.graph.input, *self.graph.output):
            if value.name not in self.slots:
                root(value.name)
        for node in self.graph.node:
            if node.output[0] in self.products or node.output[0] in self.stacks:
                for name in node.output:
                    root(name)
                continue
            given = node.input[:1] if node.op_type in ("Gather", "GatherND") else node.input
            linked = [name for name in given if name and self._is_value(name) and self._is_wide(name, node)]
            first = root(node.output[0])
            for name in (*linked, *(output for output in node.output if output)):
                parent[root(name)] = first
        found: dict[str, list[str]] = defaultdict(list)
        for name in parent:
            if self._is_value(name):
                found[root(name)].append(name)
        return list(found.values())

    def _is_value(self, name: str) -> bool:
        return name not in self.slots and name not in self.constants and name not in self.stacks

    def _is_wide(self, name: str, node: onnx.NodeProto) -> bool:
        """Not just one number a token, which any rank can know, beside values that are wider."""
        if node.op_type not in _BROADCAST:
            return True
        sizes = lambda name: [size for size in self.shapes[name] if isinstance(size, int)]
        return math.prod(sizes(name)) > 1 or math.prod(sizes(node.output[0])) == 1

    def _split(self, group: list[str]) -> None:
        members = set(group)
        reads = [product for product in self.products.values() if product.value in members]
        outputs = [name for name in self.outputs if name in members]
        inputs = [value.name for value in self.graph.input if value.name in members]
        asked = [name for name in outputs if name in self.wanted]
        if not (reads or asked) or (
            not asked
            and not any(name in self.given for name in inputs)
            and not all(self._reaches_residual(product) for product in reads)
        ):
            return
        try:
            held, weights = self._propagate(members, reads, outputs, inputs)
        except Uneven:
            raise
        except NotSplit as reason:
            for name in (*asked, *(name for name in inputs if name in self.given)):
                self.flow.whole[name] = str(reason)
            return
        self.flow.held |= held
        self.flow.weights |= weights

    def _reaches_residual(self, product: _Product) -> bool:
        """Whether the result of a product is added to what goes through all layers, behind linear operators alone:
        where a norm or another product follows, a sum over the ranks would buy little."""
        seen: set[str] = set()
        stack = [product.node.output[0]]
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.outputs and name not in self.wanted:
                return True
            for node in self.readers[name]:
                if node.op_type == "Add" and not set(node.input) & (self.slots | set(self.constants)):
                    return True
                if node.op_type in _LINEAR_MOVES | {"Mul", "Div", "ReduceSum", "Add"}:
                    stack += node.output
        return False

    def _propagate(
        self, members: set[str], reads: Sequence[_Product], outputs: Sequence[str], inputs: Sequence[str]
    ) -> tuple[dict[str, Held], dict[str, Held]]:
        """Go from what is asked for back to where the values of the group come from."""
        wants: dict[str, list[Held]] = defaultdict(list)
        for name in outputs:
            if name not in self.wanted:
                raise NotSplit(f"{name} is needed whole")
            wants[name].append(self.wanted[name])
        reading = {product.node.output[0]: product for product in reads}
        held: dict[str, Held] = {}
        weights: dict[str, Held] = {}
        uneven: Uneven | None = None  # said once nothing else is in the way
        for node in reversed(self.graph.node):
            product = reading.get(node.output[0])
            if product is not None:
                size = self._size(product.value, product.value_axis)
                given = self._given_for(product.value, members)
                part = given or even(product.value_axis, size, self.ranks)
                if part is None or (given is None and part.indices.size != size):
                    uneven = Uneven(f"{product.weight}: {size} inputs do not divide by {self.ranks} ranks")
                    part = Held(product.value_axis, np.tile(np.arange(size), (self.ranks, 1)))
                wants[product.value].append(part)
            made = [name for name in node.output if name in members]
            if not made:
                continue
            for name in made:
                if name in wants:
                    held[name] = self._merged(name, wants[name])
            found = {name: held[name] for name in made if name in held}
            if not found:
                continue  # whole: each rank computes it, such as the angles of rotary encoding
            for name, part in self._back(node, found):
                if name in self.slots or name in self.stacks:
                    weight = self.stacks.get(name, name)
                    if weights.setdefault(weight, part) != part:
                        raise NotSplit(f"{weight} is needed in two ways")
                elif name in members:
                    wants[name].append(part)
        for name in inputs:
            if name in wants:
                held[name] = self._merged(name, wants[name])
            if name not in self.given or name not in held:
                raise NotSplit(f"{name} comes whole")
            if held[name] != self.given[name]:
                raise NotSplit(f"{name} is needed in other parts than those that ranks hold")
        for name in held:
            for reader in self.readers[name]:
                if reader.output[0] not in held and reader.output[0] not in reading:
                    raise NotSplit(f"{name} is read as a whole by {reader.op_type}")
        if uneven is not None:
            raise uneven
        return held, weights

    def _given_for(self, name: str, members: set[str]) -> Held | None:
        """What an input that comes split means for the product that reads it, through movement alone."""
        for given, part in self.given.items():
            if given in members:
                if name == given:
                    return part
                node = self.producer.get(name)
                if node is not None and node.op_type == "Gather" and node.input[0] == given:
                    return part
        return None

    def _size(self, name: str, axis: int) -> int:
        size = self.shapes[name][axis]
        if not isinstance(size, int):
            raise NotSplit(f"{name} has no fixed size along axis {axis}")
        return size

    def _merged(self, name: str, wants: Sequence[Held]) -> Held:
        """One part for all readers: the same, or those of sections of it, one after another."""
        if all(want == wants[0] for want in wants):
            return wants[0]
        if len({want.axis for want in wants}) > 1:
            raise NotSplit(f"{name} is read along different axes")
        distinct: list[Held] = []
        for want in wants:
            if not any(want == other for other in distinct):
                distinct.append(want)
        ordered = sorted(distinct, key=lambda want: int(want.indices.min()))
        for one, other in zip(ordered, ordered[1:]):
            if one.indices.max() >= other.indices.min():
                raise NotSplit(f"{name} is read in parts that overlap")
        return Held(ordered[0].axis, np.concatenate([want.indices for want in ordered], axis=1))

    # -- one operator, backwards: what it needs of its inputs for what is wanted of its outputs

    def _back(self, node: onnx.NodeProto, found: Mapping[str, Held]) -> list[tuple[str, Held]]:
        name, part = next(iter(found.items()))
        product = self.products.get(node.output[0])
        if product is not None:
            return self._back_product(node, product, part)
        if node.op_type in _UNARY:
            return [(node.input[0], part)]
        if node.op_type in _BROADCAST:
            return self._back_broadcast(node, name, part)
        step: Callable[..., list[tuple[str, Held]]] | None = getattr(self, f"_back_{node.op_type.lower()}", None)
        if step is None and node.op_type in _WITHIN:
            step = self._back_within
        if step is None:
            raise NotSplit(f"{node.op_type} is not known to be split")
        return step(node, found) if node.op_type in ("Split",) else step(node, name, part)

    def _back_product(self, node: onnx.NodeProto, product: _Product, part: Held) -> list[tuple[str, Held]]:
        if part.axis != product.result_axis:
            raise NotSplit(f"{node.output[0]} is needed along axis {part.axis}")
        found = [(product.weight, part.at(product.weight_result_axis))]
        if node.op_type == "Gemm" and len(node.input) == 3 and node.input[2]:
            found.append((node.input[2], part.at(len(self.shapes[node.input[2]]) - 1)))
        return found

    def _back_broadcast(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        rank, found = len(self.shapes[name]), []
        for given in node.input:
            if not given:
                continue
            shape = self.shapes[given]
            axis = part.axis - (rank - len(shape))
            if axis < 0 or shape[axis] == 1:
                continue
            if given in self.constants:
                self._check_constant(given, axis, part)
                continue
            found.append((given, part.at(axis)))
        return found

    def _check_constant(self, name: str, axis: int, part: Held) -> None:
        """Engines are the same at all ranks, so a constant must look the same to each."""
        taken = [np.take(self.constants[name], indices, axis) for indices in part.indices]
        if any(not np.array_equal(each, taken[0]) for each in taken):
            raise NotSplit(f"a constant of {self.constants[name].shape} differs between the ranks' parts")

    def _back_within(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        given = node.input[0]
        rank = len(self.shapes[given])
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type in ("Softmax", "LayerNormalization"):
            start = attributes.get("axis", -1) % rank
            axes = [start] if node.op_type == "Softmax" else list(range(start, rank))
        else:
            taken = self.constants[node.input[1]].tolist() if len(node.input) > 1 else attributes.get("axes", [])
            axes = [axis % rank for axis in taken]
        axis = part.axis
        if not attributes.get("keepdims", 1) and node.op_type.startswith("Reduce"):
            left = [index for index in range(rank) if index not in axes]
            axis = left[part.axis]
        if axis in axes or not axes:
            raise NotSplit(f"{node.op_type} goes over all of what would be split")
        # Gains and biases lie along the axes that are whole.
        return [(given, part.at(axis))]

    def _back_reshape(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        given = node.input[0]
        return [(given, reshaped(self.shapes[name], self.shapes[given], part))]

    def _back_transpose(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        (order,) = [helper.get_attribute_value(a) for a in node.attribute if a.name == "perm"]
        return [(node.input[0], part.at(order[part.axis]))]

    def _back_unsqueeze(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        rank = len(self.shapes[name])
        added = {axis % rank for axis in self.constants[node.input[1]].tolist()}
        if part.axis in added:
            raise NotSplit("an axis of one number is needed in parts")
        return [(node.input[0], part.at(part.axis - sum(axis < part.axis for axis in added)))]

    def _back_squeeze(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        rank = len(self.shapes[node.input[0]])
        taken = {axis % rank for axis in self.constants[node.input[1]].tolist()}
        left = [axis for axis in range(rank) if axis not in taken]
        return [(node.input[0], part.at(left[part.axis]))]

    def _back_expand(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        given = node.input[0]
        axis = part.axis - (len(self.shapes[name]) - len(self.shapes[given]))
        if axis < 0 or self.shapes[given][axis] == 1:
            raise NotSplit("copies of a value are needed in parts")
        return [(given, part.at(axis))]

    def _back_gather(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), 0)
        if axis != 0 or part.axis == 0 or len(self.shapes[node.input[1]]) != 1:
            raise NotSplit("Gather takes from what would be split")
        return [(node.input[0], part)]

    def _back_slice(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        given = node.input[0]
        starts, _, axes, steps = (self.constants[each].tolist() for each in node.input[1:5])
        rank = len(self.shapes[given])
        for start, axis, step in zip(starts, axes, steps, strict=True):
            if axis % rank == part.axis:
                if step != 1:
                    raise NotSplit("every other number of what would be split is taken")
                begin = start if start >= 0 else start + self._size(given, part.axis)
                return [(given, part.at(part.axis, part.indices + begin))]
        return [(given, part)]

    def _back_split(self, node: onnx.NodeProto, found: Mapping[str, Held]) -> list[tuple[str, Held]]:
        axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), 0)
        given = node.input[0]
        axis %= len(self.shapes[given])
        wants, offset = [], 0
        for name in node.output:
            if name not in found:
                raise NotSplit(f"{name} is not read")
            part = found[name]
            wants.append(part.at(axis, part.indices + offset) if part.axis == axis else part)
            offset += self._size(name, axis)
        return [(given, self._merged(given, wants))]

    def _back_concat(self, node: onnx.NodeProto, name: str, part: Held) -> list[tuple[str, Held]]:
        (axis,) = [helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"]
        if axis % len(self.shapes[name]) != part.axis:
            return [(given, part) for given in node.input]
        found, offset = [], 0
        for given in node.input:
            size = self._size(given, part.axis)
            inside = (part.indices >= offset) & (part.indices < offset + size)
            counts = inside.sum(axis=1)
            if counts.min() != counts.max() or not counts.min():
                raise NotSplit("ranks hold different numbers of what is joined")
            found.append((given, part.at(part.axis, part.indices[inside].reshape(self.ranks, -1) - offset)))
            offset += size
        return found

    # -- partial sums

    def _partial_sums(self) -> None:
        """Which values are partial sums, and which of them are added up: all that something reads which is not linear,
        or which is whole."""
        flow = self.flow
        rows = {p.node.output[0]: p for p in self.products.values() if p.value in flow.held}
        for product in rows.values():
            weight = self.stacks.get(product.weight, product.weight)
            part = flow.held[product.value].at(product.weight_axis)
            if weight in flow.weights:
                raise NotSplit(f"{weight} would be split twice")
            flow.weights[weight] = part
            flow.rows.add(weight)
        summed: set[str] = set()
        while True:
            partial: set[str] = set()
            for node in self.graph.node:
                if node.output[0] in rows or self._keeps_partial(node, partial - summed):
                    partial.add(node.output[0])
            read = lambda name: any(reader.output[0] not in partial for reader in self.readers[name])
            found = {name for name in partial if name in self.outputs or read(name)}
            if found <= summed:
                break
            summed |= found
        flow.partial, flow.summed = (
            partial,
            [name for node in self.graph.node for name in node.output if name in summed & partial],
        )
        for node in self.graph.node:
            if node.output[0] in partial and (node.output[0] in rows or node.op_type == "Add"):
                operands = node.input[2:] if node.output[0] in rows else node.input
                flow.first |= {given for given in operands if given in self.slots}

    def _keeps_partial(self, node: onnx.NodeProto, partial: Collection[str]) -> bool:
        """Whether the sum over ranks of what the node makes of partial sums is what it makes of their sum."""
        found = [given for given in node.input if given in partial]
        if not found:
            return False
        if node.op_type in _LINEAR_MOVES:
            return True
        if node.op_type in ("ReduceSum", "Div"):
            return found == [node.input[0]]
        if node.op_type == "Mul":
            return len(found) == 1
        if node.op_type == "Add":
            return all(given in partial or given in self.slots for given in node.input)
        return False


def reshaped(before: Sequence[int | str], after: Sequence[int | str], part: Held) -> Held:
    """What is held of a value of shape `before`, once it has the shape `after`. Sizes that are names stand for a number
    of tokens, which no axis is joined with. Raises NotSplit where it is no part along one axis."""
    for old, new in _axes_kept(before, after):
        if part.axis not in old:
            continue
        sizes = [_number(before[axis]) for axis in old]
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        targets = [_number(after[axis]) for axis in new]
        taken = [np.take(numbers, indices, old.index(part.axis)).reshape(-1) for indices in part.indices]
        for position, axis in enumerate(new):
            rows = [np.unravel_index(each, targets)[position] for each in taken]
            kept = [rows_of[np.sort(np.unique(rows_of, return_index=True)[1])] for rows_of in rows]
            if len({len(each) for each in kept}) > 1:
                continue
            whole = np.arange(math.prod(targets)).reshape(targets)
            if all(
                np.array_equal(np.take(whole, indices, position).reshape(-1), each)
                for indices, each in zip(kept, taken, strict=True)
            ):
                return Held(axis, np.stack(kept))
    raise NotSplit(f"a reshape of {list(before)} to {list(after)} does not keep the ranks' parts together")


def _number(size: int | str) -> int:
    if not isinstance(size, int):
        raise NotSplit(f"a reshape joins {size} with what would be split")
    return size


def _axes_kept(before: Sequence[int | str], after: Sequence[int | str]) -> list[tuple[list[int], list[int]]]:
    """Axes of the one and of the other shape that hold the same numbers, group by group."""
    groups, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        old, new = [i], [j]
        i, j = i + 1, j + 1
        if not (isinstance(before[old[0]], int) and isinstance(after[new[0]], int)):
            if isinstance(before[old[0]], int) or isinstance(after[new[0]], int):
                raise NotSplit(f"a reshape of {list(before)} to {list(after)} joins axes of tokens")
            groups.append((old, new))
            continue
        sizes = lambda shape, axes: math.prod(_number(shape[axis]) for axis in axes)
        while sizes(before, old) != sizes(after, new):
            if sizes(before, old) < sizes(after, new):
                if i == len(before):
                    raise NotSplit("a reshape that does not come out even")
                old.append(i)
                i += 1
            else:
                if j == len(after):
                    raise NotSplit("a reshape that does not come out even")
                new.append(j)
                j += 1
        groups.append((old, new))
    for axis in range(i, len(before)):
        groups.append(([axis], []))
    for axis in range(j, len(after)):
        groups.append(([], [axis]))
    return groups


def shapes_of(model: onnx.ModelProto) -> dict[str, list[int | str]]:
    """The shape of each value, weight and constant; unknown sizes are "?". Raises InputError where there is none."""
    inferred = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True).graph
    found: dict[str, list[int | str]] = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        found[value.name] = [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
            for dim in value.type.tensor_type.shape.dim
        ]
    for node in inferred.node:
        for name in node.output:
            if name and name not in found:
                raise InputError(f"tensor_parallel: the shape of {name} ({node.op_type}) is not known")
    return found
