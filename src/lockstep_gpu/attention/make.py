"""Create the token mixers of a network's layers, and the page tables of the KV cache."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.errors import CheckError
from lockstep.step.kv_cache import LayerShape
from lockstep.step.network import LayerAttention, LayerState, Network
from lockstep.step.pages import PAGE_SIZE, PagePool, PageTables
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import Attention, Buffer
from lockstep_gpu.attention.traced import TracedAttention
from lockstep_gpu.kernels.step_kernels import Kernels
from lockstep_gpu.plan import StepLimits
from lockstep_gpu.state_mixers import StateMixers

# Bytes that a cache of default size leaves for CUDA graphs and libraries, up to half of the free memory: an 8B model
# with 256 rows takes 1.1 GB of them.
OTHER_NBYTES = 5 << 28


def make_tables(network: Network, num_slots: int, max_seq_len: int, kv_bytes: float | None, free: int) -> PageTables:
    """Return the page tables of all slots, which all devices share.

    If some attention is traced, whose cache has no pages, each slot has room for the longest request.

    Args:
        kv_bytes: Bytes of keys and values on each device; below 1: the share of the free memory. None: room for the
            longest requests in all slots, but at most 0.9 of the free memory, less `OTHER_NBYTES`.
        free: Free bytes of the device that has the least, before recurrent states are allocated.

    Raises CheckError if there is no room for a page.
    """
    mixers = _by_kind(network)
    max_pages = num_slots * -(-max_seq_len // PAGE_SIZE)
    page_nbytes = PAGE_SIZE * sum(_token_nbytes(attention.cache, network) for attention in mixers.fused.values())
    if mixers.traced:
        return PageTables(PagePool(max_pages, page_nbytes), num_slots, shares=None)
    if not mixers.fused:
        return PageTables(PagePool(max_pages, page_nbytes), num_slots, shares=True)
    free -= num_slots * sum(mixer.cache.nbytes for mixer in mixers.recurrent.values())
    if kv_bytes is None:
        kv_bytes = max(0.5, min(0.9, 1 - OTHER_NBYTES / max(1, free)))
        budget = f"of {free} free on the GPU"
    else:
        budget = "kv_bytes"
    if kv_bytes < 1:
        nbytes = min(max_pages * page_nbytes, int(free * kv_bytes))
    else:
        nbytes = int(kv_bytes)
    if nbytes < page_nbytes:
        raise CheckError(
            f"KV cache: expected room for a page of {PAGE_SIZE} tokens, {page_nbytes} bytes, found {nbytes} "
            f"({budget}); raise kv_bytes, or end what else uses it"
        )
    return PageTables(PagePool(nbytes // page_nbytes, page_nbytes), num_slots)


def _token_nbytes(shape: LayerShape, network: Network) -> int:
    """Return the bytes of a token in a layer's pages; an fp8 cache has an fp16 scale for each head."""
    if network.kv_cache_dtype is None:
        return shape.size * network.dtype.itemsize
    return shape.size + 2 * shape.num_kv_heads


class _Mixers(NamedTuple):
    """The mixers of a network's layers, by layer number."""

    traced: dict[int, LayerAttention]
    fused: dict[int, LayerAttention]
    recurrent: dict[int, LayerState]


def _by_kind(network: Network) -> _Mixers:
    mixers = _Mixers({}, {}, {})
    for index, (_, mixer) in enumerate(network.layers):
        if isinstance(mixer, LayerState):
            mixers.recurrent[index] = mixer
        elif "rotary" in mixer.engines:
            mixers.fused[index] = mixer
        else:
            mixers.traced[index] = mixer
    return mixers


def make_attention(
    network: Network, tables: PageTables, limits: StepLimits, kernels: Kernels, buffer: Buffer, stream: cuda.Stream
) -> list[Attention]:
    """Return each layer's mixer, on a device's stream. Layers of the same kind share one object."""
    traced, fused, recurrent = _by_kind(network)
    num_slots = limits.num_slots
    by_layer: dict[int, Attention] = {}
    if traced:
        attention = TracedAttention(traced, network.dtype, num_slots, limits.max_seq_len, kernels, buffer, stream)
        by_layer |= dict.fromkeys(traced, attention)
    if fused:
        from lockstep_gpu.attention.fused import FusedAttention  # loads cuDNN

        fp8 = network.kv_cache_dtype is not None
        paged = FusedAttention(fused, network.dtype, fp8, tables, limits, bool(kernels.wide), buffer, stream)
        by_layer |= dict.fromkeys(fused, paged)
    if recurrent:
        by_layer |= dict.fromkeys(recurrent, StateMixers(recurrent, num_slots, bool(kernels.wide), stream))
    return [by_layer[index] for index in range(len(network.layers))]
