"""Faults of experts: which of them a token takes, whose weights these have, and how much each counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from onnx import NodeProto

from faults.edit import Edit, Value
from faults.fault import ASSEMBLY, BEHIND, FLOATS, HOST, Fault, change

Assembly = dict[str, Any]


def gathers(edit: Edit, stack: str) -> list[NodeProto]:
    return [node for node in edit.nodes("GatherND") if stack in node.input[0]]


@change
def next_expert(edit: Edit, stack: str) -> None:
    """Each row takes the weights of the expert behind its own, the last those of the first."""
    for node in gathers(edit, stack):
        experts = next(value for value in edit.graph.input if value.name == node.input[0])
        count = edit.const(experts.type.tensor_type.shape.dim[0].dim_value, "int64")
        node.input[1] = edit.op("Mod", edit.op("Add", node.input[1], edit.const(1, "int64")), count)


@change
def shares(edit: Edit, other: Callable[[Edit, Value], Value]) -> None:
    """Have others in the place of what the experts of each token count, [num_tokens, experts of a token]."""
    for node in edit.nodes("TopK"):
        edit.replace(node.output[0], lambda value: other(edit, value))


def router_larger(edit: Edit) -> None:
    """The router's logits are 1.05 times as large: the same experts, which count other than they should."""
    for node in edit.nodes("Softmax"):
        edit.replace(node.input[0], lambda logits: edit.times(logits, 1.05), [node])


def reversed_order(edit: Edit, value: Value) -> Value:
    return edit.op("Gather", value, edit.ints(2, 1, 0), axis=1)


def all_alike(edit: Edit, value: Value) -> Value:
    return edit.op("Expand", edit.op("ReduceMean", value, edit.ints(1)), edit.op("Shape", value))


@change
def pairs(assembly: Assembly, slot: str, order: Callable[[list[str]], list[str]]) -> None:
    """Bind the second layer's stack, of which each expert has two tensors, in another order."""
    slots = assembly["layers"][1]["exit"]["slots"]
    name = next(name for name in slots if slot in name)
    slots[name] = order(slots[name])


def gate_for_up(names: list[str]) -> list[str]:
    return [names[place + 1 - 2 * (place % 2)] for place in range(len(names))]


def first_two_experts(names: list[str]) -> list[str]:
    return [*names[2:4], *names[:2], *names[4:]]


fault = partial(Fault, model="experts", backends=HOST)
# fmt: off
FAULTS = (
    fault("expert-next", "each token takes the experts behind its own", BEHIND, next_expert("experts."),
          precisions=FLOATS),
    fault("expert-down-next", "the down projection is the next expert's", BEHIND, next_expert("down_proj"),
          precisions=FLOATS),
    fault("expert-shares-reversed", "the first expert counts as the last", BEHIND, shares(reversed_order)),
    fault("expert-shares-alike", "all experts of a token count the same", BEHIND, shares(all_alike)),
    fault("router-1.05", "the router's logits times 1.05", BEHIND, router_larger),
    fault("expert-gate-up-swapped", "gate and up of all experts swapped", ASSEMBLY, pairs("gate_up", gate_for_up)),
    fault("expert-neighbour", "the first two experts of a layer swapped", ASSEMBLY,
          pairs("gate_up", first_two_experts)),
)
# fmt: on
