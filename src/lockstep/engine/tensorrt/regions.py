"""What fused regions are made of, which TensorRT 8.6's inspector does not tell: read from the listing of each region that lies in the plan as text.

In: a serialized engine. A region's listing has a line for each kernel, between `main {` and `}`:

    fully_connected={ name="gemm_0_matrix_multiply" ... kernel=sm80_xmma_gemm_... sk_factor=4 ... }      a kernel of the library
    function={ name=__myl_... grid = { 16 1 1 } block = { 128 1 1 } ... layers="add_0+mul_1" }           one that is made for the graph

Source: plans of TensorRT 8.6.0. The form is not documented: where it is another, nothing is found.
"""

from __future__ import annotations

import re

from lockstep.engine.tensorrt.layers import IN_REGION, Layer

_REGION = re.compile(rb"\nmain \{\n(.*?)\n\}", re.DOTALL)
_KERNEL = re.compile(r'^  (\w+)=\{ name="([^"]*)" .*\bkernel=(\S+) .*\bsk_factor=(\d+) ')
_FUNCTION = re.compile(r'^  function=\{ .* grid = \{ ([^}]*) \} block = \{ ([^}]*) \} .* layers="([^"]*)"')
_COUNTED = re.compile(r"__mye\d+")  # names that the compiler counts up


def region_layers(plan: bytes) -> list[Layer]:
    """The kernels of all fused regions, in the order in which they run, without inputs and outputs: a product by its name in the graph, its tactic the kernel and
    into how many parts its sum is split; other kernels by what they fuse, the tactic being the size of their launch."""
    found = []
    for region in _REGION.finditer(plan):
        for line in region[1].decode("utf-8", "replace").split("\n"):
            if product := _KERNEL.match(line):
                kind, name, kernel, parts = product.groups()
                found.append(Layer(name, f"{kind} {IN_REGION}", f"{kernel}, its sum in {parts} part{'s' * (parts != '1')}", (), ()))
            elif function := _FUNCTION.match(line):
                grid, block, fused = function.groups()
                found.append(Layer(_COUNTED.sub("*", fused), f"function {IN_REGION}", f"grid {grid}, block {block}", (), ()))
    return found
