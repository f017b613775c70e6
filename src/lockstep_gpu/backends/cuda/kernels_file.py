"""The engine file of a block: its kernels and its products, in the order in which they run.

JSON. It has `inputs` and `outputs` {name: [dtype, shape]} of all but weights, `inner` {name: shape} of the values
between two steps (of `dtype`, or float32 where kernels say so), and `steps`: a kernel (`gpu.kernels.row_kernels`), or
products of one input (`onnx_tools.cut_products`). The same graph gives the same bytes anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.products import Product
from lockstep_gpu.kernels.row_kernels import RowKernel

Shape = tuple[int | str, ...]
Group = tuple[Product, ...]  # products of one input


@dataclass(frozen=True)
class BlockStep:
    kernel: RowKernel | None = None
    products: tuple[Product, ...] = ()


@dataclass(frozen=True)
class KernelsFile(Document):
    """A block's kernels and products.

    inputs, outputs: {name: (dtype, shape)} of all but weights; a dimension is a number or a name. inner: {name: shape}
    of the values between two steps. dtype: of `inner` but for the kernels' `wide`, and of weights as products read
    them.
    """

    FORMAT: ClassVar[str] = formats.KERNELS
    inputs: Mapping[str, tuple[str, Shape]]
    outputs: Mapping[str, tuple[str, Shape]]
    inner: Mapping[str, Shape]
    steps: tuple[BlockStep, ...]
    dtype: str = "float16"

    def to_bytes(self) -> bytes:
        """Return the engine's bytes, which do not hold their digest: it is the manifest's."""
        return json.dumps(self.to_json(), sort_keys=True, indent=1).encode()

    @classmethod
    def load(cls, path: str | os.PathLike) -> KernelsFile:
        """Read an engine file. Raises CheckError for one that is damaged or of another version."""
        try:
            return super().load(path)
        except InputError as error:
            raise CheckError(f"{str(error).partition(';')[0]}; build it again") from None
