"""The bounds that entries of several documents share.

Bundles are untrusted: they choose files, buffer sizes and bindings, and nothing downstream revalidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from lockstep.artifacts.document import Bound, integers, length, matching, one_of
from lockstep.artifacts.dtypes import COMPUTE_NAMES, GROUP_SIZES, ROW

REMEDY = "the file is damaged, or not one that a stage wrote: make it again, or take another bundle"

# The largest dimension: TensorRT counts in 32 bits.
LARGEST = 2**31 - 1
Size = Annotated[int, integers(1, LARGEST)]
Count = Annotated[int, integers(0, LARGEST)]
# Two of these can be added without overflowing 64 bits, as an offset and a length are.
Bytes = Annotated[int, integers(0, 2**62)]
Digest = Annotated[str, matching("[0-9a-f]{64}", "a sha256 in hexadecimal digits")]
# Names go into log lines and terminals: no control characters, and no half characters (surrogates).
Name = Annotated[str, matching(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,1000}", "a name")]
# 255 bytes is what file systems allow; no separator of any system, no drive, and no hidden file or `..`.
FileName = Annotated[
    str, matching(r"(?!\.)[^/\\:\x00-\x1f\x7f\ud800-\udfff]{1,255}", "the name of a file in its folder")
]
PlainPath = Annotated[str, Bound("a plain path inside its folder", lambda path: _is_plain(path))]
# The tensors of one slot: the experts of a stack are the most.
Names = Annotated[Sequence[Name], length(10_000, minimum=1)]
Precision = Annotated[str, one_of(*COMPUTE_NAMES)]
GroupSize = Annotated[int, one_of(ROW, *GROUP_SIZES)]


def _is_plain(path: str) -> bool:
    return path.isprintable() and not {":", "\\"} & set(path) and not {"", ".", ".."} & set(path.split("/"))
