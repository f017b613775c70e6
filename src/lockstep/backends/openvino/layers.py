"""The operators and layers of an OpenVINO model, as JSON."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any


def operators(model: Any) -> dict[str, Any]:
    """Return {"operators": how often each stands in the model}."""
    return {"operators": dict(sorted(Counter(node.get_type_name() for node in model.get_ordered_ops()).items()))}


def layers(model: Any) -> dict[str, Any]:
    """Return {"inputs", "outputs": name and type, "layers": operator, attributes, values and types by number}."""
    nodes = model.get_ordered_ops()
    numbers = {node.get_friendly_name(): number for number, node in enumerate(nodes)}
    return {
        "inputs": [f"{value.any_name} {_type(value)}" for value in model.inputs],
        "outputs": [f"{value.any_name} {_type(value)}" for value in model.outputs],
        "layers": [_layer(node, numbers) for node in nodes],
    }


def _layer(node: Any, numbers: dict[str, int]) -> dict[str, Any]:
    found = {
        "operator": node.get_type_name(),
        "attributes": {name: _json(value) for name, value in sorted(node.get_attributes().items())},
        "inputs": [
            [numbers[value.get_node().get_friendly_name()], value.get_index()]
            for value in (node.input_value(index) for index in range(node.get_input_size()))
        ],
        "outputs": [_type(value) for value in node.outputs()],
    }
    if node.get_type_name() == "Constant":
        found["sha256"] = hashlib.sha256(node.get_data().tobytes()).hexdigest()[:16]
    return found


def _type(value: Any) -> str:
    return f"{value.get_element_type().to_string()}{value.get_partial_shape()}"


def _json(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)
