"""CUDA kernels of the operators between GEMMs: residual additions, activation functions, norms.

In: a piece of a graph that was cut at its GEMMs (`onnx_tools.cut_products`), whose values are rows, one for each token
or request. Out: CUDA C++ of one kernel that computes the piece, with one block per row if something is accumulated over
the row, else several. Values are float32 in registers and rounded when they are stored. A value that two loops read is
loaded twice, from the cache: rows are a few kilobytes.

The source depends on the graph only: the same graph gives the same bytes anywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Kinds of arguments: see `RowKernel`.
ROWS = "rows"
INDEX = "index"
CHOICES = "choices"
WEIGHT = "weight"
INTEGERS = "integers"
SCALES = "scales"
OF_WEIGHTS = (WEIGHT, INTEGERS, SCALES)
SCALES_TIMES = 256.0  # kernels expect scales of quantized weights times this, to keep them out of fp16's subnormals
_WIDE = 8  # elements in 16 bytes
WAIT = "wait_for_previous();"


@dataclass(frozen=True)
class RowKernel:
    """A kernel of a piece, as CUDA C++, and its arguments.

    Attributes:
        arguments: (name, kind) of each input, in order. By kind the kernel takes
            ROWS: an array [rows, ...] of 16 bits, or float32 if `wide`, and the elements from one row to the next;
            INDEX: integers [rows], and whether they are 64 bits wide;
            CHOICES: int32 [rows, ...], and the elements from one row to the next;
            WEIGHT: an array of 16 bits, or float32 if `wide`;
            INTEGERS, SCALES: those of a quantized weight, as GEMMs read them.
        outputs: Names of the outputs, which follow as ROWS, or as CHOICES if they are integers.
        rows: The name of the dimension that is the number of rows.
        blocks: Thread blocks for each row.
        quantized: Outputs that the kernel also quantizes to e4m3. Codes uint8 [rows, ...] and scales float32 [rows] of
            each are the last arguments (e4m3.cuh).
        wide: Arguments and outputs that are float32.
    """

    name: str
    source: str
    arguments: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    rows: str
    blocks: int
    threads: int
    quantized: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

    def summing(self, name: str, width: int) -> str | None:
        """Return the source of a kernel that first all-reduces an argument of rows (sums.cuh); width: of its rows.

        Returns None if a block reads other rows than its own, or several blocks read one row.
        """
        number = [argument for argument, _ in self.arguments].index(name)
        uses = re.findall(rf"\bin{number}\b", self.source)
        row = f"in{number} + row * step{number}"
        # All uses must be the declaration and reads of the block's own row.
        if self.blocks > 1 or width % _WIDE or len(uses) != 1 + self.source.count(f"{row} + "):
            return None
        parameters = ", const void* peers, void* state, void* lost, int rank, int slot, int seconds"
        source = self.source.replace(") {", f"{parameters}) {{", 1)
        row_sum = f"RowSum<{width // _WIDE}, THREADS> sum({{peers, state, lost, rank, slot, seconds}}, {row}, row);"
        return source.replace(WAIT, f"{WAIT}\n    {row_sum}\n    in{number} = sum.numbers, step{number} = 0;", 1)
