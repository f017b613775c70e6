"""The precisions that the CPU here computes in, found without loading the library."""

from __future__ import annotations

from lockstep.backends.cpu import describe_cpu

_BF16 = ("amx_bf16", "avx512_bf16", "bf16")  # the last on AArch64


def why_not(precision: str) -> str | None:
    if precision != "bf16":
        return None
    if not set(_BF16).isdisjoint(describe_cpu()["isa"]):
        return None
    return "needs bf16 in the CPU (avx512_bf16 or amx_bf16), found none"
