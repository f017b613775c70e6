"""The kernels of fused regions, which TensorRT 8.6's inspector does not list.

They are read from the listing of each region that lies in the engine plan as text. In: a serialized engine. A region's
listing has a line for each kernel, between `main {` and `}`; here each with what it is:

    fully_connected={ name="gemm_0_matrix_multiply" ... kernel=sm80_xmma_gemm_... sk_factor=4 ...
                      layers="gemm_0_matrix_multiply" }
        a kernel of the library
    fusion={ name=__myl_... kernel=sm80_xmma_gemm_..._fused11 ...
           layers="gemm_4_matrix_multiply+logits' castToActType" }
        one that does more at its end
    function={ name=__myl_... grid = { 16 1 1 } block = { 128 1 1 } ... layers="add_0+mul_1" }
        one that is generated for the graph

Source: engine plans of TensorRT 8.6.0. The format is not documented.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from lockstep.backends.tensorrt.layers import ChosenLayer, Layer

_BEGIN, _END = b"\nmain {\n", b"\n}"
_STATEMENT = re.compile(r"^  (\w+)=\{ ")
_NO_KERNEL = ("signal", "wait")  # of one stream for another
_KERNEL = re.compile(r"\bkernel=(\S+)")
_PARTS = re.compile(r"\bsk_factor=(\d+)")
_LAUNCH = re.compile(r"\bgrid = \{ ([^}]*) \} block = \{ ([^}]*) \}")  # the first one: others stand in conditions
_LAYERS = re.compile(r'\blayers="([^"]*)"')
_COUNTED = re.compile(r"__mye\d+")  # names that the compiler numbers
_IN_REGION = "in a fused region"  # ends the kind of a layer that is a kernel of a region


def region_layers(plan: bytes) -> list[Layer]:
    """Return the kernels of all fused regions of an engine plan, in running order.

    Each is named by what it computes and has no inputs and outputs. Its tactic is the kernel of the library and into
    how many parts its sum is split, or the size of its launch where it is generated for the graph: what is in those,
    and how they accumulate, is not told. A statement of another format is a layer too, by as much as can be read of it.
    """
    return [_layer(kind, line) for line in _lines(plan) if (kind := _of(_STATEMENT, line)) and kind not in _NO_KERNEL]


def region_notes(layers: Sequence[Layer], reads_cache: bool, version: str) -> list[str]:
    """Return the notes of a build; reads_cache: whether TensorRT read what the cache says of fused regions."""
    notes, in_regions = [], _any_in_region(layers)
    if in_regions and not reads_cache:
        notes.append(
            f"TensorRT {version} does not read what the timing cache says of fused "
            f"regions: their kernels were chosen anew"
        )
    if any(layer.is_fused_region for layer in layers) and not in_regions:
        notes.append("fused regions whose kernels cannot be read: they are not held to the graph")
    return notes


def remedy(layers: Iterable[ChosenLayer]) -> str:
    """Return what to do where layers differ from a record; "" where none is a kernel of a fused region."""
    anew = (
        "; TensorRT 8.6 chooses the kernels of fused regions anew in each build: keep the engines "
        "that were built with the record"
    )
    return anew if _any_in_region(layers) else ""


def _any_in_region(layers: Iterable[Layer | ChosenLayer]) -> bool:
    return any(layer.kind.endswith(_IN_REGION) for layer in layers)


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
        _COUNTED.sub("*", _of(_LAYERS, line) or kind), f"{kind} {_IN_REGION}", ", ".join(filter(None, said)), (), ()
    )


def _of(pattern: re.Pattern, line: str) -> str | None:
    found = pattern.search(line)
    return found and found[1]
