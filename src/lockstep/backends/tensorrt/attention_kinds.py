"""Which kinds the fused attention runs: an entry of the assembly in, yes or no out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ATTENTIONS = ("fused", "traced")


def can_fuse(kind: Mapping[str, Any], dtype: str) -> bool:
    """cuDNN's forward attention: fp16 and bf16, heads of up to 256 numbers in steps of 8, no soft cap. Windows and
    grouped heads are fine. Our own kernels, in front of it and for rows that decode: queries and keys of one type,
    which may be float32, and values of the graph's."""
    given = {io["name"]: io["dtype"] for io in kind["decode"]["inputs"]}
    if given["query"] != given["key"] or given["query"] not in (dtype, "float32") or given["value"] != dtype:
        return False
    dims = (kind["head_dim"], kind["value_head_dim"])
    return dtype in ("float16", "bfloat16") and all(dim % 8 == 0 and dim <= 256 for dim in dims) and not kind["softcap"]
