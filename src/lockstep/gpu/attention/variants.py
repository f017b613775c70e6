"""The attention variants that fused attention runs."""

from __future__ import annotations

from lockstep.artifacts.assembly import AttentionVariant


def why_not_fused(variant: AttentionVariant, dtype: str) -> str | None:
    """Return why fused attention does not run an attention variant in this dtype, None where it does.

    cuDNN's forward attention takes fp16 and bf16, heads of up to 256 numbers in steps of 8 and no soft cap. Windows and
    grouped heads are fine, and sinks too, which are for our own kernels. These, in front of it and for rows that
    decode, take queries and keys of one dtype, which may be float32, and values of the graph's.
    """
    given = {io.name: io.dtype for io in variant.decode.signature.inputs}
    dims = (variant.head_dim, variant.value_head_dim)
    if dtype not in ("float16", "bfloat16"):
        return dtype
    if given["query"] != given["key"] or given["query"] not in (dtype, "float32") or given["value"] != dtype:
        return f"queries of {given['query']}, keys of {given['key']} and values of {given['value']}"
    if not all(dim % 8 == 0 and dim <= 256 for dim in dims):
        return f"heads of {' and '.join(str(dim) for dim in dict.fromkeys(dims))} numbers"
    return f"a soft cap of {variant.softcap:g}" if variant.softcap else None
