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
    graph = onnx.GraphProto(name="batchful")
    constants: dict[tuple, str] = {}
    weights: dict[str, IO] = {}
    slots: dict[str, list[str]] = {}
    env: dict[str, str] = {}  # {value of a step: the name under which the last block that wrote it did so}
    inputs: dict[str, IO] = {}
    for index, block in enumerate(blocks):
        names = {}  # {name in the block: name in the uncut graph}
        for io in block.graph.signature.inputs:
            names[io.name] = env.setdefault(io.name, io.name)
            if env[io.name] == io.name:  # no block wrote it
                inputs.setdefault(io.name, io)
        for slot in block.graph.signature.slots:
            tensors = list(block.slots[slot.name])
            name = tensors[0]
            if len(tensors) > 1:
                name += f" and {len(tensors) - 1} more"
            names[slot.name] = name
            weights[name] = slot
            slots[name] = tensors
        proto = block.graph.proto.graph
        for initializer in proto.initializer:
            key = (initializer.data_type, tuple(initializer.dims), initializer.raw_data)
            if key not in constants:
                constants[key] = f"const_{len(constants)}"
                graph.initializer.add().CopyFrom(initializer)
                graph.initializer[-1].name = constants[key]
            names[initializer.name] = constants[key]
        names[""] = ""  # an absent optional input
        for node in proto.node:
            new = graph.node.add()
            new.CopyFrom(node)
            new.name = f"block_{index}/{node.name}"
            new.input[:] = [names[name] for name in node.input]
            names.update((output, f"block_{index}/{output}") for output in node.output if output)
            if block.variant is None and "logits" in node.output:
                names["logits"] = "logits"
            new.output[:] = [names[name] for name in node.output]
        for io in block.graph.signature.outputs:
            env[io.key] = names[io.name]
        if block.variant is not None:
            env.setdefault("position_ids", "position_ids")
            attention = f"layer_{index}/attention"
            call = [env[name] for name in _parameters(functions[block.variant])]
            graph.node.add(op_type=block.variant, domain=DOMAIN, name=attention, input=call, output=[attention])
            env["attention"] = attention
    inputs["position_ids"] = IO("position_ids", "int64", ("num_tokens",))
    for name in ("hidden", "position_ids", "logit_rows"):
        if name in inputs:
            graph.input.append(_value_info(inputs[name], name))
    graph.input.extend(_value_info(weights[name], name) for name in weights)
    graph.output.extend(_value_info(io, io.name) for io in blocks[-1].graph.signature.outputs)
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.ModelProto(ir_version=IR_VERSION, graph=graph, opset_import=opsets)
    model.functions.extend(_function(name, functions[name]) for name in sorted(functions))
    return model.SerializeToString(deterministic=True), slots


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
