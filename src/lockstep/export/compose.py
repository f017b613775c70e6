"""Join the blocks to the uncut `batchful.onnx`.

In: the blocks of all layers with the tensors of their slots, and each layer's attention without a cache. Out: one graph
`hidden, position_ids, logit_rows` and every weight (named as in the checkpoint) -> `logits`, in which attention is an
ONNX local function of the domain "lockstep". The split must equal it, and tools that want one file can read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from lockstep.artifacts.signature import IO
from lockstep.export.canonical import IR_VERSION, OPSET, Graph
from lockstep.export.markers import DOMAIN


@dataclass(frozen=True)
class ComposedBlock:
    """A block; slots: {slot: checkpoint tensors}; variant: the token mixer after it, None after the exit."""

    graph: Graph
    slots: Mapping[str, Sequence[str]]
    variant: str | None


def compose(blocks: Sequence[ComposedBlock], functions: Mapping[str, Graph]) -> tuple[bytes, dict[str, list[str]]]:
    """Return the uncut model's bytes, and {weight input: tensors}. functions: by variant, without cache or state."""
    uncut = _UncutGraph()
    for index, block in enumerate(blocks):
        uncut.add_block(index, block)
        if block.variant is not None:
            uncut.add_mixer(index, block.variant, functions[block.variant])
    graph = uncut.finish(blocks[-1])
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.ModelProto(ir_version=IR_VERSION, graph=graph, opset_import=opsets)
    model.functions.extend(_function(name, functions[name]) for name in sorted(functions))
    return model.SerializeToString(deterministic=True), uncut.slots


class _UncutGraph:
    """The uncut graph while blocks are appended to it."""

    def __init__(self) -> None:
        self.slots: dict[str, list[str]] = {}  # {weight input: tensors}
        self._graph = onnx.GraphProto(name="batchful")
        self._constants: dict[tuple, str] = {}  # by content: blocks share most of theirs
        self._weights: dict[str, IO] = {}
        self._inputs: dict[str, IO] = {}
        # {value that passes between blocks: its name in the graph}. Each block writes a new `hidden`, for example.
        self._values: dict[str, str] = {}

    def add_block(self, index: int, block: ComposedBlock) -> None:
        """Append the nodes of a block, which reads the values that earlier blocks wrote last."""
        names = self._input_names(block)
        names.update(self._constant_names(block.graph.proto.graph))
        for node in block.graph.proto.graph.node:
            copied = self._graph.node.add()
            copied.CopyFrom(node)
            copied.name = f"block_{index}/{node.name}"
            copied.input[:] = [names[name] for name in node.input]
            names.update((output, f"block_{index}/{output}") for output in node.output if output)
            if block.variant is None and "logits" in node.output:  # of the last block: the graph's output
                names["logits"] = "logits"
            copied.output[:] = [names[name] for name in node.output]
        for io in block.graph.signature.outputs:
            self._values[io.key] = names[io.name]

    def add_mixer(self, index: int, variant: str, mixer: Graph) -> None:
        """Append a call of a token mixer's function."""
        self._values.setdefault("position_ids", "position_ids")
        attention = f"layer_{index}/attention"
        operands = [self._values[name] for name in _parameters(mixer)]
        self._graph.node.add(op_type=variant, domain=DOMAIN, name=attention, input=operands, output=[attention])
        self._values["attention"] = attention

    def finish(self, last: ComposedBlock) -> onnx.GraphProto:
        """Declare the inputs and outputs; return the graph."""
        graph = self._graph
        self._inputs["position_ids"] = IO("position_ids", "int64", ("num_tokens",))
        for name in ("hidden", "position_ids", "logit_rows"):
            if name in self._inputs:
                graph.input.append(_value_info(self._inputs[name], name))
        graph.input.extend(_value_info(weight, name) for name, weight in self._weights.items())
        graph.output.extend(_value_info(io, io.name) for io in last.graph.signature.outputs)
        return graph

    def _input_names(self, block: ComposedBlock) -> dict[str, str]:
        """Return {input of a block: its name in the graph}; an input that no block wrote is one of the graph."""
        names = {"": ""}  # an absent optional input
        for io in block.graph.signature.inputs:
            names[io.name] = self._values.setdefault(io.name, io.name)
            if names[io.name] == io.name:
                self._inputs.setdefault(io.name, io)
        for slot in block.graph.signature.slots:
            tensors = list(block.slots[slot.name])
            name = tensors[0]
            if len(tensors) > 1:
                name += f" and {len(tensors) - 1} more"
            names[slot.name] = name
            self._weights[name] = slot
            self.slots[name] = tensors
        return names

    def _constant_names(self, block: onnx.GraphProto) -> dict[str, str]:
        names = {}
        for initializer in block.initializer:
            key = (initializer.data_type, tuple(initializer.dims), initializer.raw_data)
            if key not in self._constants:
                self._constants[key] = f"const_{len(self._constants)}"
                self._graph.initializer.add().CopyFrom(initializer)
                self._graph.initializer[-1].name = self._constants[key]
            names[initializer.name] = self._constants[key]
        return names


_ATTENTION_INPUTS = ("query", "key", "value", "position_ids")


def _parameters(mixer: Graph) -> tuple[str, ...]:
    """Return the inputs of a mixer's function; those of attention are always the same, whether it uses them or not."""
    names = tuple(io.name for io in mixer.signature.inputs)
    is_attention = "query" in names and set(names) <= set(_ATTENTION_INPUTS)
    return _ATTENTION_INPUTS if is_attention else names


def _function(name: str, attention: Graph) -> onnx.FunctionProto:
    source = attention.proto.graph
    constants = [
        onnx.helper.make_node("Constant", [], [tensor.name], name=tensor.name, value=tensor)
        for tensor in source.initializer
    ]
    nodes = [*constants, *source.node]
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    return onnx.helper.make_function(DOMAIN, name, list(_parameters(attention)), ["attention"], nodes, opsets)


def _value_info(io: IO, name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(
        name, onnx.helper.np_dtype_to_tensor_dtype(io.numpy_dtype), list(io.shape)
    )
