"""The library of CUDA kernels: *.cu, compiled one by one, and *.cuh, which they and the kernels of engines include.

NVRTC includes files from memory, so it gets the text of each with its name. Each file also compiles by itself
(`nvcc -std=c++17 -arch=sm_90a -c`): macros that the runtime passes, such as sizes, have defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}  # by NumPy's name: `KIND` of numbers.cuh


@functools.cache
def library() -> Mapping[str, str]:
    """Return the text of each file by its name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.cu*"))}


def including(*names: str) -> str:
    """Return a source that includes files of the library."""
    return "".join(f'#include "{name}"\n' for name in names)


def kind_options(dtype: str) -> tuple[str, ...]:
    """Return the options that compile a source for activations and weights of a type; float32 is of few sources."""
    return (f"-DKIND={KINDS[dtype]}",)
