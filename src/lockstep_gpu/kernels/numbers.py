"""The types of numbers that kernels compute with, and the start of their sources that knows them (numbers.cu)."""

from __future__ import annotations

from pathlib import Path

KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}  # by NumPy's name: how kernels are told the type of numbers
NUMBERS = Path(__file__).with_name("numbers.cu").read_text(encoding="utf-8")


def kind_options(dtype: str) -> tuple[str, ...]:
    """Return the options that compile a source for activations and weights of a type of 16 bits."""
    return (f"-DKIND={KINDS[dtype]}",)
