"""Names of the weight inputs of engines that read each expert of a stack `[num_experts, ...]` by itself."""

from __future__ import annotations

from collections.abc import Container


def expert_slot(stack: str, number: int) -> str:
    return f"{stack}[{number}]"


def expert_slots(stack: str, inputs: Container[str]) -> list[str]:
    """Return the inputs of a stack's experts, in order; none where the stack is one input."""
    slots: list[str] = []
    while (slot := expert_slot(stack, len(slots))) in inputs:
        slots.append(slot)
    return slots
