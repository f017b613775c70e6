"""The attention variants that fused attention runs."""

from __future__ import annotations

from lockstep.artifacts.assembly import AttentionVariant

LARGEST_HEAD = 512  # Gemma 4's; the decode kernel's shared memory has room for no larger one


def why_not_fused(variant: AttentionVariant, dtype: str) -> str | None:
    """Return why fused attention doesn't support an attention variant in this dtype; None if it does.

    cuDNN's forward attention takes fp16 and bf16, head dimensions up to 256 that are multiples of 8, windows and
    grouped heads. Sinks, soft caps, larger heads and float32 are left to our own kernels. Those take queries and keys
    of one dtype, `dtype` or float32, and values of `dtype`.
    """
    dtypes = {io.name: io.dtype for io in variant.decode.signature.inputs}
    dims = (variant.head_dim, variant.value_head_dim)
    query_dtype = dtypes["query"]
    if query_dtype != dtypes["key"] or query_dtype not in (dtype, "float32") or dtypes["value"] != dtype:
        return f"queries of {dtypes['query']}, keys of {dtypes['key']} and values of {dtypes['value']}"
    if not all(dim % 8 == 0 and dim <= LARGEST_HEAD for dim in dims):
        return f"heads of {' and '.join(map(str, dict.fromkeys(dims)))} numbers"
    return None
