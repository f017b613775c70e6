"""What fused regions are made of, which TensorRT 8.6's inspector does not tell: read from the listing of each region
that lies in the plan as text.

In: a serialized engine. A region's listing has a line for each kernel, between `main {` and `}`:

    fully_connected={ name="gemm_0_matrix_multiply" ... kernel=sm80_xmma_gemm_... sk_factor=4 ...
    layers="gemm_0_matrix_multiply" }      a kernel of the library fusion={ name=__myl_...
    kernel=sm80_xmma_gemm_..._fused11 ... layers="gemm_4_matrix_multiply+logits' castToActType" }                 one
    that does more at its end function={ name=__myl_... grid = { 16 1 1 } block = { 128 1 1 } ... layers="add_0+mul_1" }
    one that is made for the graph

Source: plans of TensorRT 8.6.0. The form is not documented.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.backends.tensorrt.layers import IN_REGION, Layer

_BEGIN, _END = b"\nmain {\n", b"\n}"
_STATEMENT = re.compile(r"^  (\w+)=\{ ")
_NO_KERNEL = ("signal", "wait")  # of one stream for another
_KERNEL = re.compile(r"\bkernel=(\S+)")
_PARTS = re.compile(r"\bsk_factor=(\d+)")
_LAUNCH = re.compile(r"\bgrid = \{ ([^}]*) \} block = \{ ([^}]*) \}")  # the first one: others stand in conditions
_LAYERS = re.compile(r'\blayers="([^"]*)"')
_COUNTED = re.compile(r"__mye\d+")  # names that the compiler counts up


def region_layers(plan: bytes) -> list[Layer]:
    """The kernels of all fused regions, in the order in which they run, without inputs and outputs. Each by what it
    computes; its tactic is the kernel of the library and into how many parts its sum is split, or the size of its
    launch where it is made for the graph: what is in those, and how they add up, is not told.

    A statement of another form is a layer too, by as much as can be read of it.
    """
    return [_layer(kind, line) for line in _lines(plan) if (kind := _of(_STATEMENT, line)) and kind not in _NO_KERNEL]


def _lines(plan: bytes) -> Iterator[str]:
    begin = plan.find(_BEGIN)
    while begin >= 0 and (end := plan.find(_END, begin + len(_BEGIN) - 1)) >= 0:
        yield from plan[begin + len(_BEGIN) : end].decode("utf-8", "replace").split("\n")
        begin = plan.find(_BEGIN, end)


def _layer(kind: str, line: str) -> Layer:
    kernel, parts, launch = _of(_KERNEL, line), _of(_PARTS, line), _LAUNCH.search(line)
    said = [
        kernel,
        parts and f"its sum in {parts} part{'s' * (parts != '1')}",
        None if kernel or not launch else f"grid {launch[1]}, block {launch[2]}",
    ]
    return Layer(
        _COUNTED.sub("*", _of(_LAYERS, line) or kind), f"{kind} {IN_REGION}", ", ".join(filter(None, said)), (), ()
    )


def _of(pattern: re.Pattern, line: str) -> str | None:
    found = pattern.search(line)
    return found and found[1]
