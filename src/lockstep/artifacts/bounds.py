"""The bounds that entries of several documents share.

What a bundle from elsewhere says chooses files, sizes of buffers and what is bound to what; nothing behind a document
checks a type again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from lockstep.artifacts.document import Bound, integers, length, matching, one_of
from lockstep.artifacts.dtypes import COMPUTE_NAMES, GROUP_SIZES, ROW

REMEDY = "the file is damaged, or not one that a stage wrote: make it again, or take another bundle"

LARGEST = 2**31 - 1  # a dimension; TensorRT counts in 32 bits
Size = Annotated[int, integers(1, LARGEST)]
Count = Annotated[int, integers(0, LARGEST)]
Bytes = Annotated[int, integers(0, 2**62)]
Digest = Annotated[str, matching("[0-9a-f]{64}", "a sha256 in hexadecimal digits")]
Name = Annotated[str, matching(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,1000}", "a name")]
FileName = Annotated[
    str, matching(r"(?!\.)[^/\\:\x00-\x1f\x7f\ud800-\udfff]{1,255}", "the name of a file in its folder")
]
PlainPath = Annotated[str, Bound("a plain path inside its folder", lambda path: _is_plain(path))]
Names = Annotated[Sequence[Name], length(10_000, minimum=1)]
Precision = Annotated[str, one_of(*COMPUTE_NAMES)]
GroupSize = Annotated[int, one_of(ROW, *GROUP_SIZES)]


def _is_plain(path: str) -> bool:
    return path.isprintable() and not {":", "\\"} & set(path) and not {"", ".", ".."} & set(path.split("/"))
