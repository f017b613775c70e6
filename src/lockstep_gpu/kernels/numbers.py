"""The types of numbers that kernels compute with (numbers.cuh)."""

from __future__ import annotations

KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}  # by NumPy's name: how kernels are told the type of numbers


def kind_options(dtype: str) -> tuple[str, ...]:
    """Return the options that compile a source for activations and weights of a type; float32 is of few sources."""
    return (f"-DKIND={KINDS[dtype]}",)
