"""The token mixer that each layer of a network was built for, and the page tables of the KV cache."""

from __future__ import annotations

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.attention.base import Attention, Buffer
from lockstep.gpu.attention.traced import TracedAttention
from lockstep.gpu.kernels.step_kernels import Kernels
from lockstep.gpu.state_mixers import StateMixers
from lockstep.step.kv_cache import LayerShape
from lockstep.step.network import LayerAttention, LayerState, Network
from lockstep.step.pages import PAGE_SIZE, PagePool, PageTables

# Bytes that a cache of no given size leaves for graphs and libraries, if that is no more than half of what is free: a
# shape of 8B for 256 rows takes 1.1 GB of them.
_LEFT = 5 << 28


def make_tables(network: Network, num_slots: int, max_seq_len: int, kv_bytes: float | None, free: int) -> PageTables:
    """Return the page tables of all slots, the same on each device.

    kv_bytes: memory of each device for keys and values of all slots, or below 1 the share of what is free; None: for
    the longest requests in all slots, or nine tenths of what is free, or less where that leaves little. free: bytes
    that the device with the least has free, of which states take some. Where some attention is traced, whose cache has
    no pages, each slot has room for the longest request. Raises CheckError where there is room for no page.
    """
    pages, (traced, fused, states) = num_slots * -(-max_seq_len // PAGE_SIZE), _by_kind(network)
    nbytes = PAGE_SIZE * sum(_token_nbytes(attention.cache, network) for attention in fused.values())
    if traced or not fused:
        return PageTables(PagePool(pages, nbytes), num_slots, shares=None if traced else True)
    free -= num_slots * sum(mixer.cache.nbytes for mixer in states.values())
    share = max(0.5, min(0.9, 1 - _LEFT / max(1, free))) if kv_bytes is None else kv_bytes
    room = min(pages * nbytes, int(free * share)) if share < 1 else int(share)
    if room < nbytes:
        raise CheckError(
            f"KV cache: expected room for a page of {PAGE_SIZE} tokens, {nbytes} bytes, found {room} "
            f"({'kv_bytes' if kv_bytes else f'of {free} free on the GPU'}); raise kv_bytes, or end what else uses it"
        )
    return PageTables(PagePool(room // nbytes, nbytes), num_slots)


def _token_nbytes(shape: LayerShape, network: Network) -> int:
    """Return the bytes of a token in a layer's pages, of fp8 with its scales."""
    if network.kv_cache_dtype is None:
        return shape.size * network.dtype.itemsize
    return shape.size + 2 * shape.num_kv_heads


def _by_kind(network: Network) -> tuple[dict[int, LayerAttention], dict[int, LayerAttention], dict[int, LayerState]]:
    """Return the layers, by number, whose attention is traced, whose attention is fused, and those with a state."""
    traced = dict[int, LayerAttention]()
    fused = dict[int, LayerAttention]()
    states = dict[int, LayerState]()
    for index, (_, mixer) in enumerate(network.layers):
        if isinstance(mixer, LayerState):
            states[index] = mixer
        else:
            (fused if "rotary" in mixer.engines else traced)[index] = mixer
    return traced, fused, states


def make_attention(
    network: Network,
    tables: PageTables,
    num_slots: int,
    max_seq_len: int,
    max_verify_tokens: int,
    largest_pass: int,
    kernels: Kernels,
    buffer: Buffer,
    stream: cuda.Stream,
) -> list[Attention]:
    """Return each layer's mixer on a device's stream: an object for each of the kinds that there are."""
    traced, fused, states = _by_kind(network)
    made: dict[int, Attention] = {}
    if traced:
        attention = TracedAttention(traced, network.dtype, num_slots, max_seq_len, kernels, buffer, stream)
        made |= dict.fromkeys(traced, attention)
    if fused:
        from lockstep.gpu.attention.fused import FusedAttention  # loads cuDNN

        sizes = num_slots, max_seq_len, max_verify_tokens, largest_pass
        fp8 = network.kv_cache_dtype is not None
        paged = FusedAttention(fused, network.dtype, fp8, tables, *sizes, bool(kernels.wide), buffer, stream)
        made |= dict.fromkeys(fused, paged)
    if states:
        made |= dict.fromkeys(states, StateMixers(states, num_slots, bool(kernels.wide), stream))
    return [made[index] for index in range(len(network.layers))]
