"""The attention that each layer of a network was built for, and the page tables of its cache."""

from __future__ import annotations

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.attention.base import Attention, Buffer
from lockstep.gpu.attention.traced import TracedAttention
from lockstep.gpu.kernels.step_kernels import Kernels
from lockstep.step.network import LayerAttention, Network
from lockstep.step.pages import PAGE_SIZE, PagePool, PageTables


def make_tables(network: Network, num_slots: int, max_seq_len: int, kv_bytes: float | None, free: int) -> PageTables:
    """Return the page tables of all slots, the same on each device.

    kv_bytes: memory of each device for keys and values of all slots, or below 1 the share of what is free; None: for
    the longest requests in all slots, or nine tenths of what is free. free: bytes that the device with the least has
    free. Where some attention is traced, whose cache has no pages, each slot has room for the longest request. Raises
    CheckError where there is room for no page.
    """
    pages, fused = num_slots * -(-max_seq_len // PAGE_SIZE), _fused(network)
    nbytes = PAGE_SIZE * network.dtype.itemsize * sum(network.attentions[index].cache.size for index in fused)
    if len(fused) < len(network.layers):
        return PageTables(PagePool(pages, nbytes), num_slots, shares=None)
    share = 0.9 if kv_bytes is None else kv_bytes
    room = min(pages * nbytes, int(free * share)) if share < 1 else int(share)
    if room < nbytes:
        raise CheckError(
            f"KV cache: expected room for a page of {PAGE_SIZE} tokens, {nbytes} bytes, found {room} "
            f"({'kv_bytes' if kv_bytes else f'of {free} free on the GPU'}); raise kv_bytes, or end what else uses it"
        )
    return PageTables(PagePool(room // nbytes, nbytes), num_slots)


def _fused(network: Network) -> list[int]:
    """Return the layers whose attention variant was built for fused attention."""
    return [index for index, layer_attention in enumerate(network.attentions) if "rotary" in layer_attention.engines]


def make_attention(
    network: Network,
    tables: PageTables,
    num_slots: int,
    max_seq_len: int,
    most_verified: int,
    largest_pass: int,
    kernels: Kernels,
    buffer: Buffer,
    stream: cuda.Stream,
) -> list[Attention]:
    """Return each layer's attention on a device's stream: one object of fused layers, one of traced ones."""
    fused, dtype = set(_fused(network)), network.dtype
    parts: list[dict[int, LayerAttention]] = [{}, {}]  # traced, fused
    for index, layer_attention in enumerate(network.attentions):
        parts[index in fused][index] = layer_attention
    made: dict[bool, Attention] = {}
    if parts[False]:
        made[False] = TracedAttention(parts[False], dtype, num_slots, max_seq_len, kernels, buffer, stream)
    if parts[True]:
        from lockstep.gpu.attention.fused import FusedAttention  # loads cuDNN

        sizes = num_slots, max_seq_len, most_verified, largest_pass
        made[True] = FusedAttention(parts[True], dtype, tables, *sizes, bool(kernels.wide), buffer, stream)
    return [made[index in fused] for index in range(len(network.layers))]
