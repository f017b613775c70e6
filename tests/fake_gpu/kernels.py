"""Lockstep's kernels in NumPy, by name: inputs, outputs and rejected arguments of each."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.resources import files
from types import SimpleNamespace

import ml_dtypes
import numpy as np

import fp8_pages
from fake_gpu.device import Fault, Gpu, Waits
from lockstep.step import logits_pipeline
from lockstep.step.logits_pipeline import Sampler
from lockstep.step.sampling import Sampling
from lockstep.weights import e4m3
from lockstep.weights.groups import dequantize as dequantize_weight
from lockstep.weights.mxfp4 import mxfp4_numbers
from lockstep_gpu.logits_tables import BIASED, LOGPROBS, MASKED, PARAMETERS, PENALIZED
from lockstep_gpu.state_kernels import StateKernelSpec

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
EMPTY = 0xFFFFFFFF
NUMBERS = {0: np.dtype("f4"), 1: np.dtype("f2"), 2: np.dtype(ml_dtypes.bfloat16)}


def _integers(gpu: Gpu, address: int, wide: int, count: int) -> np.ndarray:
    return gpu.array(address, (count,), "i8" if wide else "i4")


def write_cache(gpu: Gpu, tokens: int, k: SimpleNamespace, unit: int) -> None:
    rows = gpu.array(k.rows, (tokens,), "i4")
    positions = _integers(gpu, k.positions, k.wide, tokens)
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
        if row < 0:
            continue
        if not 0 <= position < k.capacity:
            raise Fault(f"write_cache: position {position} in a cache of {k.capacity}")
        for head in range(k.heads):
            place = (row * k.heads + head) * k.capacity + position
            start = token * k.heads + head
            for source, to, size in ((k.key, k.keys, k.key_size * unit), (k.value, k.values, k.value_size * unit)):
                gpu.bytes(to + place * size, size)[:] = gpu.bytes(source + start * size, size)


def adapter_mask(gpu: Gpu, tokens: int, k: SimpleNamespace) -> None:
    ids = _integers(gpu, k.ids, k.wide, tokens)
    mask = gpu.array(k.mask, (tokens, k.columns), NUMBERS[k.kind])
    mask[:] = ids[:, None] == np.arange(k.columns) // k.rank


def _with_rope(gpu: Gpu, k: SimpleNamespace, x: np.ndarray, positions: np.ndarray, is_key: bool) -> np.ndarray:
    """Heads [tokens, heads, DIM] float32 at positions, by the tables that kernels take, of KIND."""
    tables = 2 if k.SEPARATE else 1
    number = int(is_key) if k.SEPARATE else 0
    partner = gpu.array(k.partner, (tables, tables, k.DIM), "i4")[number]
    first, second = partner if k.SEPARATE else (np.arange(k.DIM), partner[0])
    low = int(positions.min())
    shape = (int(positions.max()) - low + 1, tables, k.DIM)
    first_weight, other = (
        gpu.array(table + low * tables * k.DIM * 4, shape, "f4")[positions - low][:, number, None]
        for table in (k.first_weight, k.second_weight)
    )
    return (x[:, :, first] * first_weight + x[:, :, second] * other).astype(NUMBERS[k.KIND])


def apply_rope(gpu: Gpu, tokens: int, k: SimpleNamespace) -> None:
    """What RopeKernel.launch says."""
    rows = gpu.array(k.rows, (tokens,), "i4")
    positions = _integers(gpu, k.positions, k.WIDE, tokens)
    dtype = NUMBERS[k.QK_KIND]
    kind = NUMBERS[k.KIND]
    heads = k.KV_HEADS * k.GROUP
    if (
        any(address % 16 for address in (k.q, k.k, k.v, k.q_out, k.k_cache, k.v_cache, k.first_weight, k.second_weight))
        or k.DIM % 8
        or k.VALUE_DIM % 8
    ):
        raise Fault("apply_rope: arrays or heads that are not made of 16 bytes")
    query, key = (
        gpu.array(address, (tokens, count, dim), dtype)[..., : k.DIM].astype(np.float32)
        for address, count, dim in ((k.q, heads, k.DIM + k.SINKS), (k.k, k.KV_HEADS, k.DIM))
    )
    value = gpu.array(k.v, (tokens, k.KV_HEADS, k.VALUE_DIM), kind)
    out = gpu.array(k.q_out, (tokens, heads, k.DIM), kind)
    out[:] = _with_rope(gpu, k, query, positions, False)
    with_rope = _with_rope(gpu, k, key, positions, True)
    if not k.FP8:  # whose cache `write_pages` writes
        _write_pages(gpu, k, rows, positions, with_rope, value)


def add_sinks(gpu: Gpu, tokens: int, k: SimpleNamespace) -> None:
    """What attention_sinks.cu says."""
    heads = k.KV_HEADS * k.GROUP
    width = heads * k.VALUE_DIM
    chunks = k.grid[1]
    log_sums = gpu.array(k.log_sums, (chunks, heads, tokens), "f4")
    offsets = gpu.array(k.out_offsets, (chunks,), "i4") // width
    for chunk, count in enumerate(gpu.array(k.new_tokens, (chunks,), "i4").tolist()):
        end = int(offsets[chunk]) + count
        sinks = gpu.array(k.q, (end, heads, k.DIM + 1), NUMBERS[k.QK_KIND])[-count:, :, -1].astype(np.float32)
        out = gpu.array(k.out, (end, heads, k.VALUE_DIM), NUMBERS[k.KIND])[-count:]
        shares = 1 / (1 + np.exp(sinks - log_sums[chunk, :, :count].T))
        out[:] = out.astype(np.float32) * shares[..., None]


def _write_pages(
    gpu: Gpu, k: SimpleNamespace, rows: np.ndarray, positions: np.ndarray, keys_of: np.ndarray, values_of: np.ndarray
) -> None:
    """Put keys with RoPE and values [tokens, heads, numbers] into pages."""

    @functools.cache
    def pages_at(place: int) -> tuple[Page, Page]:
        page = int(gpu.array(k.page_table + place * 4, (1,), "i4")[0])
        return Page(gpu, k, k.k_cache, page, k.DIM), Page(gpu, k, k.v_cache, page, k.VALUE_DIM)

    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
        if row < 0:
            continue
        if position // k.PAGE >= k.pages_per_row:
            raise Fault(f"apply_rope: position {position} in a row of {k.pages_per_row} pages")
        keys, values = pages_at(row * k.pages_per_row + position // k.PAGE)
        keys.put(position % k.PAGE, keys_of[token])
        values.put(position % k.PAGE, values_of[token])


class Page:
    """A page of a cache, [heads, tokens, numbers] of KIND, or of e4m3 as fp8_heads.cuh says."""

    def __init__(self, gpu: Gpu, k: SimpleNamespace, cache: int, page: int, dim: int):
        self.fp8 = k.FP8
        self.kind = NUMBERS[k.KIND]
        numbers = k.PAGE * dim
        if not k.FP8:
            place = cache + page * k.KV_HEADS * numbers * self.kind.itemsize
            self.numbers = gpu.array(place, (k.KV_HEADS, k.PAGE, dim), self.kind)
            return
        size = k.KV_HEADS * (numbers + k.PAGE)
        data = gpu.array(cache + page * size, (k.KV_HEADS, numbers + k.PAGE), "u1")
        self.codes = data[:, :numbers].reshape(k.KV_HEADS, k.PAGE, dim)
        self.scales = data[:, numbers:]

    def put(self, token: int, heads: np.ndarray) -> None:
        if self.fp8:
            self.codes[:, token], self.scales[:, token] = fp8_pages.encode(heads)
        else:
            self.numbers[:, token] = heads

    def get(self) -> np.ndarray:
        """Numbers as float32."""
        return fp8_pages.decode(self.codes, self.scales) if self.fp8 else self.numbers.astype(np.float32)


def write_pages(gpu: Gpu, blocks: int, k: SimpleNamespace) -> None:
    """What Fp8Pages.write says."""
    tokens = blocks // -(-2 * k.KV_HEADS // 4)
    dtype = NUMBERS[k.QK_KIND]
    rows = gpu.array(k.rows, (tokens,), "i4")
    positions = _integers(gpu, k.positions, k.WIDE, tokens)
    key = gpu.array(k.k, (tokens, k.KV_HEADS, k.DIM), dtype).astype(np.float32)
    value = gpu.array(k.v, (tokens, k.KV_HEADS, k.VALUE_DIM), NUMBERS[k.KIND])
    _write_pages(gpu, k, rows, positions, _with_rope(gpu, k, key, positions, True), value)


def read_pages(gpu: Gpu, blocks: int, k: SimpleNamespace) -> None:
    """What Fp8Pages.read says."""
    requests = blocks // k.KV_HEADS // k.pages_per_row
    kind = NUMBERS[k.KIND]
    table = gpu.array(k.page_table, (requests, k.pages_per_row), "i4")
    lengths = gpu.array(k.lengths, (requests,), "i4")
    for cache, out, dim in ((k.k_cache, k.k_out, k.DIM), (k.v_cache, k.v_out, k.VALUE_DIM)):
        pages = gpu.array(out, (requests, k.pages_per_row, k.KV_HEADS, k.PAGE, dim), kind)
        for request, tokens in enumerate(lengths.tolist()):
            for number in range(-(-tokens // k.PAGE)):
                head = Page(gpu, k, cache, int(table[request, number]), dim).get()
                pages[request, number] = np.where(np.arange(k.PAGE)[:, None] < tokens - number * k.PAGE, head, 0)


def decode_attention(gpu: Gpu, shares: int, k: SimpleNamespace) -> None:
    """What DecodeAttention.launch says. Its scratch is spoiled, as far as it may be touched; its counters must be 0."""
    _, blocks, requests = k.grid
    rows = gpu.array(k.rows, (requests,), "i4")
    positions = _integers(gpu, k.positions, k.WIDE, requests)
    table = gpu.array(k.page_table, (max(rows.max() + 1, 1) if k.BY_ROW else requests, k.pages_per_row), "i4")
    dtype = NUMBERS[k.QK_KIND]
    kind = NUMBERS[k.KIND]
    heads = k.KV_HEADS * k.GROUP
    if blocks != k.KV_HEADS * -(-k.GROUP // k.HEADS) or shares not in (1, 2, 4, 8, 16):
        raise Fault(f"decode_attention: a grid of {k.grid}")
    if any(address % 16 for address in (k.v, k.out, k.k_cache, k.v_cache, k.partials)):
        raise Fault("decode_attention: an array that is not aligned to 16 bytes")
    parts = requests * blocks * 16 * k.HEADS if shares > 1 else 1
    gpu.array(k.partials, (parts * k.VALUE_DIM,), "f4")[:] = gpu.array(k.stats, (parts * 2,), "f4")[:] = np.nan
    if gpu.array(k.counters, (requests * blocks,), "i4").any():
        raise Fault("decode_attention: counters that are not 0")
    query, key = (
        gpu.array(address, (requests, count, dim), dtype).astype(np.float32)
        for address, count, dim in ((k.q, heads, k.DIM + k.SINKS), (k.k, k.KV_HEADS, k.DIM))
    )
    sinks = query[..., k.DIM :].reshape(requests, k.KV_HEADS, k.GROUP, k.SINKS)
    query = query[..., : k.DIM]
    value = gpu.array(k.v, (requests, k.KV_HEADS, k.VALUE_DIM), kind)
    out = gpu.array(k.out, (requests, heads, k.VALUE_DIM), kind)
    out[:] = 0
    for request, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
        if row < 0:
            continue
        if (row != request and not k.BY_ROW) or not 0 <= position < k.pages_per_row * k.PAGE:
            raise Fault(
                f"decode_attention: request {request} of row {row}, position {position} in a row of "
                f"{k.pages_per_row} pages"
            )
        at = positions[request : request + 1]
        with_rope = [
            _with_rope(gpu, k, x[request : request + 1], at, is_key)[0] for x, is_key in ((query, False), (key, True))
        ]
        cached = []
        for new, cache, dim in ((with_rope[1], k.k_cache, k.DIM), (value[request], k.v_cache, k.VALUE_DIM)):
            pages = [Page(gpu, k, cache, page, dim) for page in table[row, : position // k.PAGE + 1].tolist()]
            pages[-1].put(position % k.PAGE, new)
            # with a window of 0: all
            numbers = np.concatenate([page.get() for page in pages], axis=1)
            cached.append(numbers[:, : position + 1][:, -k.WINDOW :])
        scores = (
            np.einsum("kgd,ktd->kgt", with_rope[0].astype(np.float32).reshape(k.KV_HEADS, k.GROUP, k.DIM), cached[0])
            * k.scale
        )
        if k.SOFTCAP:
            cap = np.uint32(k.SOFTCAP).view(np.float32) * np.float32(np.log2(np.e))
            scores = cap * np.tanh(scores / cap)
        scores = np.concatenate([scores, sinks[request] * np.float32(np.log2(np.e))], axis=2)
        shares = np.exp2(scores - scores.max(axis=2, keepdims=True))
        shares = (shares / shares.sum(axis=2, keepdims=True))[:, :, : cached[1].shape[1]]
        out[request] = np.einsum("kgt,ktd->kgd", shares, cached[1]).reshape(heads, k.VALUE_DIM)


def advance(gpu: Gpu, count: int, k: SimpleNamespace) -> None:
    """What Kernels.advance says, by the host's definition. Slots are read one by one, so that each array is touched
    just where it may be."""
    slots = gpu.array(k.slots, (count,), "i4").copy()
    positions = _integers(gpu, k.input_positions, k.wide, count).copy()
    logits = gpu.array(k.logits, (count, k.size), NUMBERS[k.kind])
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        with np.errstate(invalid="ignore"):
            best = logits[row].max()
        token = int(logits[row].argmax()) if np.isfinite(best) else -1
        terms = gpu.array(k.samplings, (slot + 1,), PARAMETERS)[slot]
        if terms["changes"] & PENALIZED:
            _count_input(gpu, k, row, slot, int(positions[row]), int(terms["num_prompt_tokens"]), count)
        if token >= 0 and any(terms[name] for name in ("temperature", "changes", "num_logprobs")):
            token = _processed(gpu, k, row, slot, terms, logits[row].astype(np.float32), int(positions[row]) + 1)
        _set_next(gpu, k, slot, token, int(positions[row]))


def _count_input(gpu: Gpu, k: SimpleNamespace, row: int, slot: int, position: int, num_prompt: int, rows: int) -> None:
    packed = int(_integers(gpu, k.logit_rows, k.wide, rows)[row])
    token = int(_integers(gpu, k.input_tokens, k.wide, packed + 1)[packed])
    counted = gpu.array(k.counted, (slot + 1, 2), "i4")[slot]
    counts = gpu.array(k.counts, (slot + 1, k.size), "i4")[slot]
    if position >= max(num_prompt, counted[0]):
        if position == counted[0]:
            counts[counted[1]] -= 1
        counts[token] += 1
        counted[:] = position, token


def _processed(
    gpu: Gpu, k: SimpleNamespace, row: int, slot: int, terms: np.ndarray, logits: np.ndarray, position: int
) -> int:
    names = ["temperature"]
    if terms["temperature"]:  # else the others are 0 where nothing but a mask makes a row other than greedy
        names += ["top_k", "top_p", "min_p", "seed"]
    penalties = {}
    allowed = None
    forbidden: np.ndarray = np.zeros(0, np.int64)
    counts = np.zeros(k.size, np.int32)
    if terms["changes"] & PENALIZED:
        names += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
        counts = gpu.array(k.counts, (slot + 1, k.size), "i4")[slot]
    if terms["changes"] & BIASED:
        biases = gpu.array(k.biases, (slot + 1, k.size), "f4")[slot]
        penalties["logit_bias"] = {int(token): float(biases[token]) for token in np.flatnonzero(biases)}
    if terms["changes"] & MASKED:
        words = gpu.array(k.masks, (slot + 1, 2, -(-k.size // 32)), "u4")[slot]
        allowed, unforbidden = np.unpackbits(words.view("u1"), axis=1, bitorder="little")[:, : k.size].astype(bool)
        forbidden = np.flatnonzero(~unforbidden)
    if terms["num_logprobs"]:
        penalties["logprobs"] = int(terms["num_logprobs"]) - 1
    fields = {name: terms[name].item() for name in names}
    sampler = Sampler(Sampling(**fields, **penalties, bad_words=tuple((int(token),) for token in forbidden)))
    sampler.choice = int(terms["choice"])
    sampler.prompt_ids = np.flatnonzero(counts < 0)
    counts = counts & 0x7FFFFFFF
    sampler.counts = Counter({token: int(counts[token]) for token in np.flatnonzero(counts).tolist()})
    if terms["changes"]:
        gpu.array(k.processed + 4 * row * k.size, (k.size,), "f4")[:] = sampler.process(logits, allowed, ())
    sampled = sampler(logits, position, allowed)
    if sampled.logprobs is not None:
        record = gpu.array(k.logprobs, (slot + 1,), LOGPROBS)[slot : slot + 1]
        top = sampled.logprobs.top
        total = float(logits[sampled.token]) - sampled.logprobs.chosen
        record["total"] = total
        record["chosen"] = logits[sampled.token]
        record["tokens"][0, : len(top)] = [token for token, _ in top]
        record["logits"][0, : len(top)] = [logits[token] for token, _ in top]
    return sampled.token


def _set_next(gpu: Gpu, k: SimpleNamespace, slot: int, token: int, position: int) -> None:
    if not 0 <= position < k.limit:
        raise Fault(f"position {position} of slot {slot}, at most {k.limit - 1} expected")
    gpu.array(k.next_tokens, (slot + 1,), "i4")[slot] = token
    _integers(gpu, k.tokens, k.wide, slot + 1)[slot] = max(token, 0)
    _integers(gpu, k.positions, k.wide, slot + 1)[slot] = (position + 1) % k.limit


def largest(gpu: Gpu, count: int, k: SimpleNamespace) -> None:
    """What Kernels.largest says, by the host's definition."""
    slots = gpu.array(k.slots, (count,), "i4")
    part = gpu.array(k.part, (count, k.size), NUMBERS[k.kind])
    for row in np.flatnonzero(slots >= 0).tolist():
        (token,), (logit,) = logits_pipeline.most_likely_of_shard(part[row : row + 1], k.first)
        record = k.argmax + 8 * row
        gpu.array(record, (1,), "f4")[0] = logit
        gpu.array(record + 4, (1,), "i4")[0] = token


def choose(gpu: Gpu, count: int, k: SimpleNamespace) -> None:
    """What Kernels.choose says, by the host's definition."""
    slots = gpu.array(k.slots, (count,), "i4").copy()
    positions = _integers(gpu, k.input_positions, k.wide, count).copy()
    records = gpu.array(k.argmax, (count, k.ranks), "i8").copy().view("i4").reshape(count, k.ranks, 2)
    tokens = logits_pipeline.most_likely_of_ranks(
        [(records[:, rank, 1], records[:, rank, 0].view("f4")) for rank in range(k.ranks)]
    )
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            _set_next(gpu, k, slot, int(tokens[row]), int(positions[row]))


def words(gpu: Gpu, blocks: int, k: SimpleNamespace) -> None:
    """Noise, by a kernel that a test compiles behind ours: 32 threads a block, 4 words a thread."""
    key = gpu.array(k.key, (2,), "u8").copy()
    counter = np.array([0, k.position, 0, 0], np.uint64)
    gpu.array(k.out, (128 * blocks,), "u8")[:] = np.random.Philox(key=key, counter=counter).random_raw(128 * blocks)


def _exchange(gpu: Gpu, k: SimpleNamespace, phase: int, launch: int) -> None:
    """Raise this rank's flags of one block; go on once all others have raised theirs."""
    addresses = gpu.array(k.peers, (4, k.WORLD), "u8")[1].tolist()
    flags = [gpu.array(address, (2, k.WORLD, 128), "u4")[phase, :, 0] for address in addresses]
    for rank in range(k.WORLD):
        flags[rank][k.rank] = launch
    if (flags[k.rank].astype(np.int64) < launch).any() and not gpu.host(k.lost, 4).view("u4")[0]:
        raise Waits


def _terms(gpu: Gpu, k: SimpleNamespace, at: int, launch: int) -> np.ndarray:
    """Terms of each rank at one."""
    place = int(gpu.array(k.peers, (4, k.WORLD), "u8")[3, at])
    return gpu.array(place, (3, k.WORLD, k.ROOM, 4), "u4")[launch % 3]


def _empty(gpu: Gpu, k: SimpleNamespace, launch: int) -> None:
    """Empty the terms that came in the last launch."""
    _terms(gpu, k, k.rank, launch - 1)[:, : gpu.array(k.state, (4,), "u4")[3]] = EMPTY


def _exchange_terms(gpu: Gpu, k: SimpleNamespace, launch: int, mine: np.ndarray) -> np.ndarray:
    """Send terms, once; return all ranks' [ranks, units, 16] once they have come."""
    if (k.rank, -launch) not in gpu.sums:
        gpu.sums.add((k.rank, -launch))
        sent = np.where(mine.view("u4") == EMPTY, 0x7FFF7FFF, mine.view("u4"))
        for other in range(k.WORLD):
            _terms(gpu, k, other, launch)[k.rank, : k.units] = sent
        _empty(gpu, k, launch)
    came = _terms(gpu, k, k.rank, launch)[:, : k.units]
    if (came == EMPTY).any() and not gpu.host(k.lost, 4).view("u4")[0]:
        raise Waits
    gpu.sums.discard((k.rank, -launch))
    return came.view("u1")


def _place(gpu: Gpu, k: SimpleNamespace, at: int, sender: int, launch: int, units: int) -> np.ndarray:
    """Where a sender's units are in the inbox of a rank, [units, 16] bytes."""
    if units > k.slot:
        raise Fault(f"{units} units in a place of {k.slot}")
    inbox = int(gpu.array(k.peers, (4, k.WORLD), "u8")[0, at])
    return gpu.bytes(inbox + (launch % 2 * k.WORLD + sender) * k.slot * 16, units * 16).reshape(units, 16)


def all_reduce(gpu: Gpu, blocks: int, k: SimpleNamespace) -> None:
    """What all_reduce.cu says, of one block; it begins again until all ranks have come."""
    kind = NUMBERS[k.kind]
    state = gpu.array(k.state, (4,), "u4")
    mine = gpu.bytes(k.values, k.units * 16).reshape(-1, 16)
    other_ranks = [item for item in range(k.WORLD) if item != k.rank]
    launch = int(state[0]) + 1
    part = -(-k.units // k.WORLD)
    if k.shots == 1:
        _accumulate(mine, _exchange_terms(gpu, k, launch, mine), kind)
        state[0] = launch
        state[3] = k.units
        return
    parts = [slice(min(k.units, rank * part), min(k.units, (rank + 1) * part)) for rank in range(k.WORLD)]
    own_part = parts[k.rank]
    if (k.rank, launch) not in gpu.sums:
        tables = [
            gpu.array(address, (k.WORLD, 128), "u8") for address in gpu.array(k.peers, (4, k.WORLD), "u8")[2].tolist()
        ]
        for other in other_ranks:
            sent = mine[parts[other]]
            _place(gpu, k, other, k.rank, launch, len(sent))[:] = sent
            tables[other][k.rank, 0] = k.values
        _exchange(gpu, k, 0, launch)
        _empty(gpu, k, launch)
        units = own_part.stop - own_part.start
        terms = {rank: _place(gpu, k, k.rank, rank, launch, units) for rank in other_ranks}
        terms[k.rank] = mine[own_part]
        _accumulate(mine[own_part], [terms[rank] for rank in range(k.WORLD)], kind)
        for other in other_ranks:
            values = gpu.bytes(int(tables[k.rank][other, 0]), k.units * 16)
            values.reshape(-1, 16)[own_part] = mine[own_part]
        gpu.sums.add((k.rank, launch))
    _exchange(gpu, k, 1, launch)
    gpu.sums.discard((k.rank, launch))
    state[0] = launch
    state[3] = 0


def _accumulate(out: np.ndarray, terms: Iterable[np.ndarray], kind: np.dtype) -> None:
    total = np.float32(0)
    for term in terms:
        total = total + term.view(kind).astype(np.float32)
    with np.errstate(over="ignore"):
        out[:] = total.astype(kind).view(np.uint8)


def all_gather(gpu: Gpu, blocks: int, k: SimpleNamespace) -> None:
    """What all_reduce.cu says, of one block; it begins again until all ranks have come."""
    state = gpu.array(k.state, (4,), "u4")
    mine = gpu.bytes(k.part, k.units * 16).reshape(-1, 16)
    launch = int(state[0]) + 1
    for other in range(k.WORLD):
        if other != k.rank:
            _place(gpu, k, other, k.rank, launch, k.units)[:] = mine
    _exchange(gpu, k, 0, launch)
    parts = [mine if rank == k.rank else _place(gpu, k, k.rank, rank, launch, k.units) for rank in range(k.WORLD)]
    nbytes = k.rows * k.columns * k.size
    rows = [part.reshape(-1)[:nbytes].reshape(k.rows, k.columns * k.size) for part in parts]
    gpu.bytes(k.whole, k.WORLD * nbytes).reshape(k.rows, -1)[:] = np.concatenate(rows, axis=1)
    _empty(gpu, k, launch)
    state[0] = launch
    state[3] = 0


def _weight(gpu: Gpu, k: SimpleNamespace, bits: int) -> np.ndarray:
    """[out_features, in_features] float32 of small_weights.cu's forms, `2^8` times as large."""
    data = gpu.bytes(k.weight, k.out_features * k.in_features * bits // 8).reshape(k.out_features, -1)
    numbers = data if bits == 8 else np.stack([data & 15, data >> 4], -1).reshape(k.out_features, -1)
    scales = gpu.array(k.scales, (k.out_features, k.in_features // k.group_size), "f2").astype(np.float32)
    groups = numbers.reshape(*scales.shape, -1).astype(np.float32) - (1 << bits - 1)
    return (groups * scales[..., None]).reshape(k.out_features, k.in_features)


def gemv(gpu: Gpu, blocks: int, k: SimpleNamespace, bits: int, outputs: int, max_rows: int) -> None:
    """What small_weights.cu says."""
    columns = 128 // bits
    if blocks != -(-k.out_features // outputs) or not 1 <= k.rows <= max_rows:
        raise Fault(f"gemv: {blocks} blocks for {k.rows} rows of {k.out_features} outputs")
    if k.in_features % columns or k.group_size % columns or k.weight % 16 or k.x % 16:
        raise Fault(f"gemv: rows of {k.in_features} numbers in groups of {k.group_size}, {bits} bits")
    x = gpu.array(k.x, (k.rows, k.in_features), "f2").astype(np.float32)
    _store(gpu, k, x @ _weight(gpu, k, bits).astype(np.float16).astype(np.float32).T / 256)


def few_rows(gpu: Gpu, blocks: int, k: SimpleNamespace, max_rows: int) -> None:
    """few_rows.cu in float64, as the library: so rounding does not depend on the order."""
    if blocks != -(-k.out_features // 32) * -(-k.rows // max_rows) or k.shared != 4 * (32 + max_rows) * 256 * 2:
        raise Fault(f"few_rows: {blocks} blocks with {k.shared} bytes for {k.rows} rows of {k.out_features} outputs")
    if k.in_features % 8 or k.weight % 16 or k.x % 16:
        raise Fault(f"few_rows: rows of {k.in_features} numbers")
    x, weight = (
        gpu.array(address, (rows, k.in_features), NUMBERS[k.KIND]).astype(np.float64)
        for address, rows in ((k.x, k.rows), (k.weight, k.out_features))
    )
    _store(gpu, k, x @ weight.T)


def quantize_rows(gpu: Gpu, rows: int, k: SimpleNamespace) -> None:
    """What fp8_products.cu says."""
    if k.in_features % 16 or k.x % 16 or k.codes % 16:
        raise Fault(f"quantize_rows: rows of {k.in_features} numbers")
    x = gpu.array(k.x, (rows, k.in_features), NUMBERS[k.KIND]).astype(np.float32)
    codes, steps = e4m3.rounded(x)
    gpu.array(k.codes, (rows, k.in_features), E4M3)[:] = codes.astype(E4M3)
    gpu.array(k.steps, (rows, 1), "f4")[:] = steps


def sort_by_expert(gpu: Gpu, blocks: int, k: SimpleNamespace) -> None:
    """What expert_products.cu says."""
    ids, order = (gpu.array(address, (k.rows,), "i4") for address in (k.ids, k.order))
    if blocks != 1 or not 0 <= ids.min() <= ids.max() < k.experts:
        raise Fault(f"sort_by_expert: {blocks} blocks, experts {ids.min()} to {ids.max()} of {k.experts}")
    some = min(k.experts, k.rows)
    tiles = gpu.array(k.tiles, (some + (k.rows - some) // k.tile_rows, 4), "i4")
    order[:] = np.argsort(ids, kind="stable")
    tiles[:] = 0
    first = 0
    at = 0
    for expert, count in enumerate(np.bincount(ids, minlength=k.experts)):
        for low in range(0, count, k.tile_rows):
            tiles[at] = expert, first + low, min(k.tile_rows, count - low), 0
            at += 1
        first += count


def expert_products(gpu: Gpu, blocks: int, k: SimpleNamespace, name: str, form: str) -> None:
    """What expert_products.cu, expert_small_weights.cu and float32_products.cu say of experts, in float64."""
    kind = name.rpartition("_")[0]
    bits = {"small_8": 8, "small_4": 4, "e2m1": 4}.get(kind, 16)
    rows, outputs, columns, stages = map(int, form.split(",")[bits < 16 :][:4])
    kind_of_rows = NUMBERS[k.KIND]
    shared = max(stages * (rows * 16 + outputs * bits) * columns // 8, rows * (outputs + 8) * 2) if k.KIND else 0
    if k.output_blocks != -(-k.out_features // outputs) or blocks % k.output_blocks or k.shared != shared:
        raise Fault(f"{name}: {blocks} blocks with {k.shared} bytes for {k.out_features} outputs")
    if k.in_features % (8 if bits == 16 else 32) or k.out_features % 8 or any(at % 16 for at in (k.weight, k.x, k.out)):
        raise Fault(f"{name}: {k.out_features} rows of {k.in_features} numbers")
    for expert, first, count, _ in gpu.array(k.tiles, (blocks // k.output_blocks, 4), "i4").tolist():
        if not 0 <= count <= rows:
            raise Fault(f"{name}: a tile of {count} rows")
        if not count:
            continue
        weight = _of_expert(gpu, k, kind, bits, expert)
        for row in gpu.array(k.order + 4 * first, (count,), "i4").tolist():
            size = kind_of_rows.itemsize
            x = gpu.array(k.x + row // k.rows_per_input * k.in_features * size, (k.in_features,), kind_of_rows)
            out = gpu.array(k.out + row * k.out_features * size, (k.out_features,), kind_of_rows)
            out[:] = x.astype(np.float64) @ weight


def dense_products(gpu: Gpu, blocks: int, k: SimpleNamespace, name: str, form: str) -> None:
    """What expert_small_weights.cu says of DENSE, in float64."""
    bits = int(name.split("_")[1])
    rows, outputs, columns, stages = map(int, form.split(",")[1:5])
    shared = max(stages * (rows * 16 + outputs * bits) * columns // 8, rows * (outputs + 8) * 2)
    if k.output_blocks != -(-k.out_features // outputs) or blocks != k.output_blocks * -(-k.rows // rows):
        raise Fault(f"{name}: {blocks} blocks for {k.rows} rows of {k.out_features} outputs")
    if k.shared != shared or k.KIND != 2:
        raise Fault(f"{name}: {k.shared} bytes of shared memory, numbers of kind {k.KIND}")
    if k.in_features % 32 or k.out_features % 8 or k.group_size % 32 or any(at % 16 for at in (k.weight, k.x, k.out)):
        raise Fault(f"{name}: {k.out_features} rows of {k.in_features} numbers in groups of {k.group_size}")
    x = gpu.array(k.x, (k.rows, k.in_features), NUMBERS[2]).astype(np.float64)
    gpu.array(k.out, (k.rows, k.out_features), NUMBERS[2])[:] = x @ _weight(gpu, k, bits).T.astype(np.float64) / 256


def float32_products(gpu: Gpu, blocks: int, k: SimpleNamespace, name: str, form: str) -> None:
    """What float32_products.cu says of all rows and one weight, in float64."""
    rows, outputs, _ = map(int, form.split(","))
    if k.output_blocks != -(-k.out_features // outputs) or blocks != k.output_blocks * -(-k.rows // rows):
        raise Fault(f"{name}: {blocks} blocks for {k.rows} rows of {k.out_features} outputs")
    x = gpu.array(k.x, (k.rows, k.in_features), NUMBERS[k.KIND]).astype(np.float64)
    weight = gpu.array(k.weight, (k.out_features, k.in_features), "f4").astype(np.float64)
    gpu.array(k.out, (k.rows, k.out_features), "f4")[:] = x @ weight.T


def _of_expert(gpu: Gpu, k: SimpleNamespace, kind: str, bits: int, expert: int) -> np.ndarray:
    """Return an expert's weight [in_features, out_features]."""
    count = k.out_features * k.in_features
    outs = k.out_features
    ins = k.in_features
    at = k.weight + expert * count * (NUMBERS[k.KIND].itemsize * 8 if bits == 16 else bits) // 8
    if bits == 16:
        weight = gpu.array(at, (count,), NUMBERS[k.KIND]).astype(np.float64)
        return weight.reshape(outs, ins).T if kind == "experts" else weight.reshape(ins, outs)
    groups = ins // k.group_size
    unit = 1 if kind == "e2m1" else 2
    data = gpu.array(at, (outs, groups, k.group_size * bits // 8), "u1")
    scales = gpu.array(k.scales + expert * outs * groups * unit, (outs, groups), f"{'u1' if unit == 1 else 'f2'}")
    if kind == "e2m1":
        return mxfp4_numbers(data, scales).astype(np.float64).T
    return dequantize_weight(data, scales.astype(np.float32) / 256, k.group_size).astype(np.float64).T


def few_rows_fp8(gpu: Gpu, blocks: int, k: SimpleNamespace, max_rows: int) -> None:
    """What fp8_products.cu says, in float64."""
    if blocks != -(-k.out_features // 32) or not 1 <= k.rows <= max_rows or k.shared != 4 * (32 + max_rows) * 512:
        raise Fault(
            f"few_rows_fp8: {blocks} blocks with {k.shared} bytes for {k.rows} rows of {k.out_features} outputs"
        )
    if k.in_features % 16 or k.weight % 16 or k.x % 16:
        raise Fault(f"few_rows_fp8: rows of {k.in_features} numbers")
    x, weight = (
        gpu.array(address, (rows, k.in_features), E4M3).astype(np.float64)
        for address, rows in ((k.x, k.rows), (k.weight, k.out_features))
    )
    scales = gpu.array(k.row_scales, (k.rows, 1), "f4") * gpu.array(k.weight_scales, (k.out_features,), "f4")
    _store(gpu, k, x @ weight.T * scales)


def wgmma_fp8(gpu: Gpu, blocks: int, k: SimpleNamespace, pair: int, split: int) -> None:
    """What fp8_wgmma.cu says, in float64."""
    shared = 1024 + (4 if split > 1 else 3) * (128 + 64) * 128 + (64 * 132 * 4 if split == 1 else 0)
    needed = -(-k.out_features // 128) * -(-k.rows // (64 * pair)) * split * pair
    if not (0 < blocks <= needed if split == 1 else blocks == needed) or blocks % pair or k.shared != shared:
        raise Fault(f"wgmma_fp8: {blocks} blocks with {k.shared} bytes for {k.rows} rows of {k.out_features} outputs")
    if k.in_features % 16 or k.out_features % 4 or k.first_end % 4 or k.second_end % 4:
        raise Fault(
            f"wgmma_fp8: rows of {k.in_features} numbers, {k.first_end}, {k.second_end}, {k.out_features} outputs"
        )
    if k.loaded < min(k.rows, 64):
        raise Fault(f"wgmma_fp8: {k.loaded} of {k.rows} rows brought")
    for (_, width, height, *box), rows, limit in ((k.weight, 128 // pair, k.out_features), (k.x, k.loaded, k.rows)):
        if width != k.in_features or height < limit or box[:2] != [128, rows]:
            raise Fault(f"wgmma_fp8: boxes {box[:2]} of {[height, width]}")
    x, weight = (
        gpu.array(map_[0], (rows, k.in_features), E4M3).astype(np.float64)
        for map_, rows in ((k.x, k.rows), (k.weight, k.out_features))
    )
    scales = gpu.array(k.row_scales, (k.rows, 1), "f4") * gpu.array(k.weight_scales, (k.out_features,), "f4")
    _store(gpu, k, x @ weight.T * scales)


def _store(gpu: Gpu, k: SimpleNamespace, result: np.ndarray) -> None:
    """Round [rows, out_features], into up to three outputs."""
    ends = [0, k.first_end, k.second_end, k.out_features]
    for low, high, out in zip(ends, ends[1:], (k.first_out, k.second_out, k.third_out)):
        gpu.array(out, (k.rows, high - low), NUMBERS[k.KIND])[:] = result[:, low:high].astype(NUMBERS[k.KIND])


def dequantize(gpu: Gpu, blocks: int, k: SimpleNamespace, bits: int) -> None:
    """What small_weights.cu says."""
    if blocks * 256 < k.out_features * k.in_features // 8:
        raise Fault(f"dequantize: {blocks} blocks for [{k.out_features}, {k.in_features}]")
    gpu.array(k.out, (k.out_features, k.in_features), NUMBERS[k.KIND])[:] = _weight(gpu, k, bits) / 256


def state_mixer(gpu: Gpu, blocks: int, k: SimpleNamespace, name: str) -> None:
    """What state_mixers.cu says, by the definition that graphs are checked against when engines are built."""
    if k.WIDTH:
        sizes = {"value": k.SIZE}
        state = (k.WIDTH - 1, k.SIZE)
        width = k.WIDTH * k.SIZE
    else:
        columns = k.VALUE_HEADS * k.VALUE_DIM
        keys = k.KEY_HEADS * k.KEY_DIM
        state = (k.VALUE_HEADS, k.KEY_DIM, k.VALUE_DIM)
        sizes = {"query": keys, "key": keys, "value": columns, "decay": k.VALUE_HEADS}
        width = columns
        sizes |= {"beta": k.VALUE_HEADS} if k.BETA else {}
    shapes = {name: (1, size) for name, size in sizes.items()} | {"past_state": (1, *state)}
    element = NUMBERS[k.KIND]
    spec = StateKernelSpec.of_sizes(shapes, "fake")
    if spec.kernel != name or blocks % spec.blocks:
        raise Fault(f"{name}: {blocks} blocks of {spec}")
    requests = blocks // spec.blocks
    bounds = [(at, at + 1) for at in range(requests)] if k.single else gpu.array(k.bounds, (requests, 2), "i4").tolist()
    for low, high in bounds:
        row = int(gpu.array(k.rows + 4 * low, (1,), "i4")[0])
        if row < 0:
            continue
        position = int(_integers(gpu, k.positions, k.WIDE, low + 1)[low])
        place = gpu.array(k.states, (row + 1, *state), "f4")[row]
        past = place[None] * 1 if position else np.zeros((1, *state), np.float32)
        out = gpu.array(k.out, (high, width), element)
        for token in range(low, high):
            inputs = {
                name: gpu.array(getattr(k, name), (high, size), element)[token : token + 1]
                for name, size in sizes.items()
            }
            (out[token],), past = spec.advance(inputs, past)
        place[:] = past[0]


KERNELS: dict[str, Callable] = {
    "token_window": functools.partial(state_mixer, name="token_window"),
    "recurrence": functools.partial(state_mixer, name="recurrence"), "adapter_mask": adapter_mask,
    "all_reduce": all_reduce, "all_gather": all_gather, "apply_rope": apply_rope, "decode_attention": decode_attention,
    "add_sinks": add_sinks,
    "write_pages": write_pages, "read_pages": read_pages, "advance": advance, "largest": largest, "choose": choose,
    "words": words, "quantize_rows": quantize_rows, "sort_by_expert": sort_by_expert,
}  # fmt: skip
for _unit in (2, 16):
    KERNELS[f"write_cache_{_unit}"] = functools.partial(write_cache, unit=_unit)
for _name in re.findall(r"^GEMV\((\w+)", (files("lockstep_gpu.kernels") / "small_weights.cu").read_text(), re.M):
    _bits, _outputs, _, _max_rows = map(int, _name.split("_")[1:])
    KERNELS[_name] = functools.partial(gemv, bits=_bits, outputs=_outputs, max_rows=_max_rows)
_text = (files("lockstep_gpu.kernels") / "few_rows.cu").read_text()
for _name, _max_rows in re.findall(r"^FEW_ROWS\((\w+), (\d+)", _text, re.M):
    KERNELS[_name] = functools.partial(few_rows, max_rows=int(_max_rows))
for _max_rows in (8, 16):
    KERNELS[f"few_rows_fp8_{_max_rows}"] = functools.partial(few_rows_fp8, max_rows=_max_rows)
for _pair in (1, 2):
    for _split in (1, 2, 4):
        KERNELS[f"wgmma_fp8_{_pair}_{_split}"] = functools.partial(wgmma_fp8, pair=_pair, split=_split)
for _bits in (4, 8):
    KERNELS[f"dequantize_{_bits}"] = functools.partial(dequantize, bits=_bits)
for _source in ("expert_products.cu", "expert_small_weights.cu"):
    _text = (files("lockstep_gpu.kernels") / _source).read_text()
    for _name, _form in re.findall(r"^EXPERTS\((\w+),(.*)\)", _text, re.M):
        KERNELS[_name] = functools.partial(expert_products, name=_name, form=_form)
    for _name, _form in re.findall(r"^PRODUCTS\((\w+),(.*)\)", _text, re.M):
        KERNELS[_name] = functools.partial(dense_products, name=_name, form=_form)
_text = (files("lockstep_gpu.kernels") / "float32_products.cu").read_text()
for _name, _form in re.findall(r"^PRODUCTS\((\w+), (.*)\)", _text, re.M):
    KERNELS[_name] = functools.partial(float32_products, name=_name, form=_form)
