"""The attention variants that fused attention can run."""

from __future__ import annotations

from lockstep.artifacts.assembly import AttentionVariant

ATTENTIONS = ("fused", "traced")


def can_fuse(variant: AttentionVariant, dtype: str) -> bool:
    """Return whether fused attention can run an attention variant in this dtype.

    cuDNN's forward attention takes fp16 and bf16, heads of up to 256 numbers in steps of 8, no soft cap. Windows and
    grouped heads are fine. Our own kernels, in front of it and for rows that decode, take queries and keys of one
    dtype, which may be float32, and values of the graph's.
    """
    given = {io.name: io.dtype for io in variant.decode.signature.inputs}
    if given["query"] != given["key"] or given["query"] not in (dtype, "float32") or given["value"] != dtype:
        return False
    dims = (variant.head_dim, variant.value_head_dim)
    return dtype in ("float16", "bfloat16") and all(dim % 8 == 0 and dim <= 256 for dim in dims) and not variant.softcap
