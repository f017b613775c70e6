"""Lockstep's kernels on a GPU: they write the right numbers, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8_pages import heads_of, pages_of
from lockstep.step.sampling import Sampling
from lockstep_gpu.logits_tables import MASKED
from next_token_cases import CASES, SAMPLING, ProcessedMix, check_draws, logits_of_ranks, record, rows_of

# Other types of the same code: `make test` runs these tests on a fake GPU (tests/unit/gpu/test_gpu_tests.py).
long = pytest.mark.long
POSITIONS = 200
HEADS = 4
KV_HEADS = 2
DIM = 16
PAGE = 64
# the second token belongs to nobody; row 1 goes over to its second page
ROWS = np.array([0, -1, 2, 1, 1, 1, 1, 1, 1], np.int32)
AT = np.array([5, 0, 130, 61, 62, 63, 64, 65, 66])
PAGES = np.array([[3, 1, 0, 2], [4, 5, 6, 7], [8, 9, 10, 11]], np.int32)


class OnDevice:
    """Host arrays on the device, and back."""

    def __init__(self):
        from lockstep_gpu import cuda

        self.cuda = cuda
        self.stream = cuda.Stream()
        self._held = []  # a kernel that was launched may still read them

    def up(self, host: np.ndarray):
        host = np.ascontiguousarray(host)
        array = self.cuda.empty(host.shape, host.dtype)
        self._held.append(array)
        self.stream.upload(array, host)
        self.stream.synchronize()
        return array

    def down(self, array) -> np.ndarray:
        host = np.empty(array.shape, array.dtype)
        self.stream.download(host, array)
        self.stream.synchronize()
        return host


def cached(array: np.ndarray, wide: bool) -> list[np.ndarray]:
    """What the cache holds of each token that has a row; `array` is emptied of it."""
    results = []
    for row, at in zip(ROWS, AT):
        if row >= 0:
            place = (PAGES[row, at // PAGE], slice(None), at % PAGE) if wide else (row, slice(None), at)
            results.append(array[place].copy())
            array[place] = 0
    return results


@pytest.mark.parametrize(("query_dtype", "wide"), [("float16", False), ("float32", True)])
def test_queries_and_keys_get_rope_and_are_cached_in_pages(query_dtype, wide):
    from lockstep_gpu.attention.kernel_spec import AttentionKernelSpec, DeviceRopeTables, PagedTokens
    from lockstep_gpu.attention.page_kernels import RopeKernel

    device = OnDevice()
    random = np.random.default_rng(0)
    first_weight, other = (random.standard_normal((POSITIONS, DIM), np.float32) for _ in range(2))
    partner = np.array([*range(4, 8), *range(4), *range(8, 16)], np.int32)
    query, key = (
        random.standard_normal((len(AT), heads, DIM), np.float32).astype(np.float16).astype(query_dtype)
        for heads in (HEADS, KV_HEADS)
    )
    value = random.standard_normal((len(AT), KV_HEADS, DIM), np.float32).astype(np.float16)
    out, keys, values = (
        device.up(np.zeros(shape, np.float16)) for shape in (query.shape, *[(PAGES.size, KV_HEADS, PAGE, DIM)] * 2)
    )
    positions = device.up(AT.astype(np.int64 if wide else np.int32))
    RopeKernel(AttentionKernelSpec("float16", query_dtype, wide, HEADS, KV_HEADS, DIM, DIM, 0)).launch(
        device.stream,
        PagedTokens(
            *(device.up(query), device.up(key), device.up(value), keys, values),
            DeviceRopeTables(device.up(first_weight), device.up(other), device.up(partner)),
            *(device.up(ROWS), positions, device.up(PAGES)),
        ),
        out,
    )
    with_rope = [
        x.astype(np.float32) * first_weight[AT, None] + x[:, :, partner].astype(np.float32) * other[AT, None]
        for x in (query, key)
    ]
    # Computed in fp32, and rounded to fp16 once, a little behind where NumPy does: one unit in the last place.
    np.testing.assert_allclose(device.down(out), with_rope[0], rtol=2**-10, atol=2**-13)
    results = {name: device.down(array) for name, array in (("keys", keys), ("values", values))}
    np.testing.assert_allclose(cached(results["keys"], True), with_rope[1][ROWS >= 0], rtol=2**-10, atol=2**-13)
    assert np.array_equal(cached(results["values"], True), value[ROWS >= 0])
    assert not results["keys"].any() and not results["values"].any()


# 16 bytes at a time, 2 at a time
@pytest.mark.parametrize(("dtype", "dim"), [("float16", 16), ("float16", 12), ("float32", 16)])
def test_keys_and_values_are_cached_in_rows(dtype, dim):
    from lockstep_gpu.kernels.step_kernels import Kernels

    device = OnDevice()
    random = np.random.default_rng(0)
    key, value = (random.standard_normal((len(AT), KV_HEADS, dim), np.float32).astype(dtype) for _ in range(2))
    keys, values = (device.up(np.zeros((3, KV_HEADS, POSITIONS, dim), dtype)) for _ in range(2))
    Kernels(False).write_cache(
        device.stream, device.up(key), device.up(value), keys, values, device.up(ROWS), device.up(AT.astype(np.int32))
    )
    for expected, array in ((key, device.down(keys)), (value, device.down(values))):
        assert np.array_equal(cached(array, False), expected[ROWS >= 0]) and not array.any()


def numbers(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class Rows:
    """Rows of a spec, each with a cache of the same numbers and NaN after them; one token of each is new."""

    SCALE = 0.11

    def __init__(self, spec, rows: int, pages_per_row: int):
        self.spec = spec
        random = np.random.default_rng(0)
        self.pages_per_row = pages_per_row

        def normal(*shape: int, of: str = spec.dtype) -> np.ndarray:
            return np.asarray(random.standard_normal(shape, np.float32), numbers(of))

        self.query = normal(rows, spec.heads, spec.head_dim + spec.sinks, of=spec.query_dtype)
        self.key = normal(rows, spec.kv_heads, spec.head_dim, of=spec.query_dtype)
        self.query[:, :, spec.head_dim :] *= 3  # a sink may be larger than all scores, or next to nothing
        self.value = normal(rows, spec.kv_heads, spec.value_dim)
        self.table = (
            random.permutation(rows * pages_per_row + 3)[: rows * pages_per_row]
            .reshape(rows, pages_per_row)
            .astype(np.int32)
        )
        self.full = [
            normal(rows * pages_per_row + 3, spec.kv_heads, PAGE, dim) for dim in (spec.head_dim, spec.value_dim)
        ]
        order = random.permutation(spec.head_dim)
        half = spec.head_dim // 2 - 2  # pairs; the rest stays alone
        self.partner = np.arange(spec.head_dim, dtype=np.int32)
        first, second = order[: 2 * half].reshape(2, half)
        self.partner[first] = second
        self.partner[second] = first
        shape = (pages_per_row * PAGE, spec.head_dim)
        if spec.separate_rope:
            permutations = np.stack([random.permutation(spec.head_dim) for _ in range(4)])
            self.partner = permutations.reshape(2, 2, spec.head_dim).astype(np.int32)
            shape = (pages_per_row * PAGE, 2, spec.head_dim)
        self.own, self.other = (random.standard_normal(shape, np.float32) for _ in range(2))

    def with_rope(self, heads: np.ndarray, positions: np.ndarray, is_key: bool) -> np.ndarray:
        """Heads [rows, heads, head_dim or more] at their positions, in float32."""
        x = heads[..., : self.spec.head_dim].astype(np.float32)
        if not self.spec.separate_rope:
            return x * self.own[positions][:, None] + x[..., self.partner] * self.other[positions][:, None]
        first, second = self.partner[int(is_key)]
        first_weight, other = (table[positions][:, int(is_key), None] for table in (self.own, self.other))
        return x[..., first] * first_weight + x[..., second] * other

    def caches(self, lengths: list[int]) -> list[np.ndarray]:
        """Keys and values before the new tokens."""
        is_cached = np.zeros((len(self.full[0]), PAGE), bool)
        for pages, length in zip(self.table, lengths):
            is_cached[pages] |= (np.arange(self.pages_per_row * PAGE) < length - 1).reshape(-1, PAGE)
        caches = [np.where(is_cached[:, None, :, None], cache, np.array(np.nan, cache.dtype)) for cache in self.full]
        return [pages_of(cache) for cache in caches] if self.spec.fp8 else caches

    def expected(
        self, lengths: list[int], query: np.ndarray, caches: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """From queries with RoPE and caches with the new token: attention in float64 [rows, heads, value_dim], 0 for
        rows of no length; and the largest allowed error. Weights and results are rounded to the cache's type. 1e-4 is
        for fp16 weights below the smallest normal number, and fp32 sums."""
        spec = self.spec
        unit = {"float32": 2**-20, "float16": 2**-11, "bfloat16": 2**-8}[self.spec.dtype]
        out, allowed = (
            np.zeros((len(lengths), spec.kv_heads, spec.heads // spec.kv_heads, spec.value_dim)) for _ in range(2)
        )
        for row, length in enumerate(lengths):
            tokens = np.arange(max(0, length - spec.window) if spec.window else 0, length)
            if length:
                keys, values = (
                    cache[self.table[row, tokens // PAGE], :, tokens % PAGE].astype(np.float64) for cache in caches
                )
                scores = (
                    np.einsum(
                        "kgd,tkd->kgt", query[row].astype(np.float64).reshape(spec.kv_heads, -1, spec.head_dim), keys
                    )
                    * self.SCALE
                )
                if spec.softcap:
                    scores = spec.softcap * np.tanh(scores / spec.softcap)
                sinks = self.query[row, :, spec.head_dim :].reshape(*scores.shape[:2], int(spec.sinks))
                scores = np.concatenate([scores, sinks.astype(np.float64)], axis=2)
                shares = np.exp(scores - scores.max(axis=2, keepdims=True))
                shares = (shares / shares.sum(axis=2, keepdims=True))[:, :, : len(tokens)]
                out[row], size = (np.einsum("kgt,tkd->kgd", shares, numbers) for numbers in (values, np.abs(values)))
                allowed[row] = unit * (size + np.abs(out[row])) + 1e-4
        return (array.reshape(len(lengths), spec.heads, spec.value_dim) for array in (out, allowed))


def decoding(dtype="float16", query_dtype=None, group=1, kv_heads=2, dim=128, value_dim=None, **options):
    return {
        "dtype": dtype, "query_dtype": query_dtype or dtype, "heads": group * kv_heads, "kv_heads": kv_heads,
        "head_dim": dim, "value_dim": value_dim or dim, "wide": False, "window": 0, "softcap": 0.0,
        "separate_rope": False, **options,
    }  # fmt: skip


LENGTHS = [1, 63, 0, 64, 65, 500], [500, 2, 129, 0, 16, 17]  # 0: the row does not decode
LONG = [4400, 1, 4097], [70, 4352, 0]  # more pages than a warp knows at a time
# multiprocessors that ask for them
TWO_SPLITS = 1
SIXTEEN_SPLITS = 10**6


@pytest.mark.parametrize(
    ("spec", "lengths", "multiprocessors"),
    [
        (decoding(), LENGTHS, TWO_SPLITS),
        (decoding(), LENGTHS, SIXTEEN_SPLITS),
        (decoding(), LENGTHS, 24),  # four
        (decoding(query_dtype="float32", wide=True, group=4), LENGTHS, SIXTEEN_SPLITS),
        (decoding("bfloat16", group=12, value_dim=64, window=64), LENGTHS, TWO_SPLITS),
        (
            decoding("bfloat16", query_dtype="float32", group=4, kv_heads=1, dim=256, window=100),
            LENGTHS,
            SIXTEEN_SPLITS,
        ),
        (decoding(group=5, kv_heads=1, dim=256), LENGTHS, TWO_SPLITS),
        (decoding("bfloat16", group=5, kv_heads=1, dim=512), LENGTHS, TWO_SPLITS),
        (decoding(group=2, kv_heads=4, dim=512), LENGTHS, SIXTEEN_SPLITS),
        (decoding("bfloat16", wide=True, dim=96, window=20), LENGTHS, TWO_SPLITS),
        (decoding(group=5, dim=80, value_dim=256, window=1), LENGTHS, SIXTEEN_SPLITS),
        (decoding(group=8, dim=64, value_dim=40), LENGTHS, SIXTEEN_SPLITS),
        (decoding(group=8, dim=64, sinks=True, softcap=2.0), LENGTHS, SIXTEEN_SPLITS),
        (decoding(query_dtype="float32", group=8, dim=64, window=128, sinks=True), LENGTHS, TWO_SPLITS),
        (decoding(kv_heads=1, dim=64), LONG, TWO_SPLITS),
        (decoding(kv_heads=1, dim=64, window=4200), LONG, TWO_SPLITS),
        (decoding(group=4, fp8=True), LENGTHS, TWO_SPLITS),
        (decoding(query_dtype="float32", wide=True, group=4, fp8=True), LENGTHS, SIXTEEN_SPLITS),
        (decoding(group=8, dim=64, window=100, sinks=True, fp8=True), LENGTHS, SIXTEEN_SPLITS),
        (decoding(group=5, kv_heads=1, dim=256, fp8=True), LENGTHS, TWO_SPLITS),
        (decoding(group=3, dim=40, value_dim=24, fp8=True), LENGTHS, TWO_SPLITS),
        (decoding(group=12, dim=80, value_dim=96, fp8=True), LENGTHS, SIXTEEN_SPLITS),
        (decoding(kv_heads=1, dim=64, fp8=True), LONG, TWO_SPLITS),
        (decoding("bfloat16", dim=192, value_dim=128, separate_rope=True), LENGTHS, TWO_SPLITS),
        (decoding("float32", group=12, dim=96, value_dim=64), LENGTHS, TWO_SPLITS),
        (decoding("float32", group=5, kv_heads=1, dim=512, window=70, softcap=2.0), LENGTHS, SIXTEEN_SPLITS),
        (decoding("float32", group=3, dim=40, wide=True, sinks=True, separate_rope=True), LENGTHS, TWO_SPLITS),
        (decoding(query_dtype="float32", group=3, dim=40, fp8=True, separate_rope=True), LENGTHS, SIXTEEN_SPLITS),
    ],
)
def test_rows_that_decode_get_rope_and_are_cached_and_attended_to(monkeypatch, spec, lengths, multiprocessors):
    """Captured once, and launched for other lengths too."""
    from lockstep_gpu import cuda
    from lockstep_gpu.attention.kernel_spec import AttentionKernelSpec, DeviceRopeTables, PagedTokens
    from lockstep_gpu.attention.page_kernels import RopeKernel
    from lockstep_gpu.attention.paged_decode import DecodeAttention, Scratch

    monkeypatch.setattr(cuda, "multiprocessors", lambda number: multiprocessors)
    device = OnDevice()
    spec = AttentionKernelSpec(**spec)
    count = len(lengths[0])
    paged = Rows(spec, count, -(-max(lengths[0]) // PAGE))
    kernel = DecodeAttention(spec)
    rope = RopeKernel(spec)
    scratch = Scratch([spec], count)
    tables = DeviceRopeTables(*(device.up(array) for array in (paged.own, paged.other, paged.partner)))
    query, key, value = (device.up(array) for array in (paged.query, paged.key, paged.value))
    caches = [device.up(cache) for cache in paged.caches(lengths[0])]
    rope_caches = [device.up(cache) for cache in paged.caches(lengths[0])]
    keys, values = caches
    rope_keys, rope_values = rope_caches
    rows = device.up(np.zeros(count, np.int32))
    positions = device.up(np.zeros(count, np.int64 if spec.wide else np.int32))
    table = device.up(paged.table)
    query_out = device.up(np.zeros((count, spec.heads, spec.head_dim), numbers(spec.dtype)))
    outs = [device.up(np.zeros((count, spec.heads, spec.value_dim), numbers(spec.dtype))) for _ in range(2)]
    outs.append(device.up(np.zeros_like(paged.value, shape=(count, spec.heads, spec.value_dim))))
    by_row = DecodeAttention(spec, by_row=True)
    with device.stream.capture() as graph:
        for out in outs[:2]:
            tokens = PagedTokens(query, key, value, keys, values, tables, rows, positions, table)
            kernel.launch(device.stream, tokens, out, paged.SCALE, scratch)
    for row_lengths in lengths:
        before = paged.caches(row_lengths)
        host = (
            np.where(np.array(row_lengths) > 0, np.arange(count), -1).astype(np.int32),
            np.maximum(0, np.array(row_lengths) - 1).astype(positions.dtype),
        )
        for array, query_dtype in (
            (rows, host[0]),
            (positions, host[1]),
            *zip(caches, before),
            *zip(rope_caches, before),
        ):
            device.stream.upload(array, query_dtype)
        device.stream.synchronize()
        tokens = PagedTokens(query, key, value, rope_keys, rope_values, tables, rows, positions, table)
        rope.launch(device.stream, tokens, query_out)
        after = [device.down(cache) for cache in rope_caches]
        graph.launch(device.stream)
        for cache, exact in zip(caches, after):
            assert device.down(cache).tobytes() == exact.tobytes()
        tokens = PagedTokens(query, key, value, keys, values, tables, rows, positions, table)
        by_row.launch(device.stream, tokens, outs[2], paged.SCALE, scratch)
        assert device.down(outs[2]).tobytes() == device.down(outs[0]).tobytes()
        numbers_of = [heads_of(cache) for cache in after] if spec.fp8 else after
        expected, allowed = paged.expected(row_lengths, device.down(query_out), numbers_of)
        for out in outs:  # the second launch in a row finds the scratch that the first has left
            error = np.abs(device.down(out).astype(np.float64) - expected)
            assert (error <= allowed).all(), f"{np.nanmax(error - allowed)} more than allowed"
        assert not device.down(scratch.counters).any()


# Fewer logits than a block's threads, as many, more.
@pytest.mark.parametrize(
    ("wide", "dtype", "size"),
    [(False, "float32", 7), (True, "float16", 1024), (False, "bfloat16", 32003), (True, "float32", 32003)],
)
def test_the_first_of_the_largest_logits_is_the_next_token(wide, dtype, size):
    import ml_dtypes

    from lockstep_gpu.kernels.step_kernels import Kernels
    from lockstep_gpu.logits_tables import LogitsTables

    device = OnDevice()
    random = np.random.default_rng(0)
    logits = random.uniform(-5, 5, (10, size)).astype(np.float32)
    logits[0, [size // 2, size - 1]] = 9  # as large: the first
    logits[2] = -3  # all
    logits[3] = -np.inf
    logits[4, size - 1] = 9
    logits[5, 0] = 9
    logits[7, size // 2] = np.nan
    logits[8, 1] = np.inf
    logits[9, -1] = np.nan
    slots = np.array([3, -1, 0, 11, 4, 7, -1, 2, 10, 9], np.int32)
    positions = np.array([5, 0, 9999, 3000, 41, 7, 0, 9998, 0, 8000])
    limit = 10000
    before = {"found": np.arange(12), "tokens": np.arange(100, 112), "positions": np.arange(12) * 500}
    logits = logits.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    integer = np.int64 if wide else np.int32
    on_device = [device.up(array.astype(np.int32 if name == "found" else integer)) for name, array in before.items()]
    row_logits, row_slots, lengths = (device.up(array) for array in (logits, slots, positions.astype(integer)))
    inputs = lengths, lengths, device.up(np.zeros(12, SAMPLING)), LogitsTables(12, logits.shape[1]).arrays
    Kernels(wide).advance(device.stream, row_logits, row_slots, lengths, limit, *inputs, *on_device)
    best = np.where(np.isfinite(logits.astype(np.float32).max(axis=1)), logits.astype(np.float32).argmax(axis=1), -1)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before["found"][slot] = best[row]
            before["tokens"][slot] = max(best[row], 0)
            before["positions"][slot] = (positions[row] + 1) % limit
    for array, expected in zip(on_device, before.values()):
        assert device.down(array).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("wide", "dtype", "ranks", "columns"),
    [(False, "float32", 2, 7), (True, "float16", 2, 16001), (False, "bfloat16", 4, 8000)],
)
def test_what_ranks_tell_of_their_logits_is_what_one_rank_finds(wide, dtype, ranks, columns):
    """As `advance` of the whole logits, to the bit: equals across ranks, NaN, infinity, rows without a slot."""
    from lockstep_gpu.kernels.step_kernels import Kernels
    from lockstep_gpu.logits_tables import LogitsTables

    device = OnDevice()
    kernels = Kernels(wide)
    logits, slots = logits_of_ranks(ranks, columns)
    logits = logits.astype(numbers(dtype))
    integer = np.int64 if wide else np.int32
    positions_held = (np.arange(9) % 7).astype(integer)
    limit = 7
    records = np.zeros((9, ranks, 2), np.float32)
    row_slots, lengths = (device.up(array) for array in (slots, positions_held))
    for rank in range(ranks):
        part = device.up(np.ascontiguousarray(logits[:, rank * columns : (rank + 1) * columns]))
        record = device.up(np.zeros((9, 2), np.float32))
        kernels.largest(device.stream, part, rank * columns, row_slots, record)
        records[:, rank] = device.down(record)

    def outputs() -> list[Any]:
        return [device.up(np.full(9, 77, kind)) for kind in (np.int32, integer, integer)]

    of_ranks = outputs()
    of_one = outputs()
    stream = device.stream
    kernels.choose(stream, device.up(records.reshape(9, -1)), row_slots, lengths, limit, *of_ranks)
    inputs = lengths, lengths, device.up(np.zeros(9, SAMPLING)), LogitsTables(9, logits.shape[1]).arrays
    kernels.advance(stream, device.up(logits), row_slots, lengths, limit, *inputs, *of_one)
    first = [device.down(array).tolist() for array in of_ranks]
    assert first == [device.down(array).tolist() for array in of_one]
    assert first[0][8] == 3 and first[0][0] == ranks * columns - 3 and first[0][2:5] == [-1, -1, -1]


class Drawing:
    """Rows of logits on the device, row i of slot i, and the tokens that the kernel draws."""

    def __init__(self, logits: np.ndarray, dtype: str, records: np.ndarray, positions: np.ndarray):
        from lockstep_gpu.kernels.step_kernels import Kernels
        from lockstep_gpu.logits_tables import LogitsTables

        self.device = OnDevice()
        self.tables = LogitsTables(*logits.shape)
        self.inputs = self.device.up(np.zeros(len(logits), np.int32))  # the input tokens, which penalties count
        self._rows = self.device.up(np.arange(len(logits), dtype=np.int32))
        self.count = len(logits)
        self.limit = int(positions.max()) + 1
        self._kernels = Kernels(False)
        zeros = np.zeros(self.count, np.int32)
        slots = np.arange(self.count, dtype=np.int32)
        input_positions = (positions - 1).astype(np.int32)
        self._logits, self._slots, self._held = (
            self.device.up(array) for array in (logits.astype(numbers(dtype)), slots, input_positions)
        )
        self._samplings, self._found, self._tokens, self._positions = (
            self.device.up(array) for array in (records, zeros, zeros, zeros)
        )

    def found(self) -> np.ndarray:
        self._kernels.advance(
            *(self.device.stream, self._logits, self._slots, self._held, self.limit),
            *(self.inputs, self._rows, self._samplings, self.tables.arrays),
            *(self._found, self._tokens, self._positions),
        )
        return self.device.down(self._found)


# tests/unit/gpu/test_next_token_kernel.py has all cases.
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[long] * (n % 6 > 0)) for n, case in enumerate(CASES)]
)
@pytest.mark.parametrize("dtype", ["float16", *(pytest.param(item, marks=long) for item in ("float32", "bfloat16"))])
def test_drawn_tokens_are_those_of_the_definition(dtype, case):
    """And the same each time: sums are of integers, whatever order they are added in."""
    logits, samplings, choices, positions = rows_of(case, 16)
    rounded = logits.astype(numbers(dtype)).astype(np.float32)
    drawing = Drawing(rounded, dtype, record(samplings, choices), positions)
    tokens = drawing.found()
    check_draws(tokens, rounded, samplings, choices, positions)
    assert all(np.array_equal(drawing.found(), tokens) for _ in range(2))


def test_rows_that_do_not_sample_or_are_not_finite_stand_beside_those_that_do():
    logits = np.random.default_rng(0).standard_normal((6, 32000)).astype(np.float32)
    logits[1, [3, 900]] = 9
    logits[2, 1] = np.nan
    logits[3, 2] = np.inf
    logits[4] = -np.inf
    samplings = [Sampling(), Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5), Sampling(1.0), Sampling(1.0, top_k=1)]
    tokens = Drawing(logits, "float32", record(samplings, [0] * 6), np.arange(1, 7)).found()
    assert tokens.tolist() == [int(logits[0].argmax()), 3, -1, -1, -1, int(logits[5].argmax())]


def test_bits_of_the_noise_are_numpys():
    from lockstep_gpu import cuda
    from lockstep_gpu.kernels.library import including

    device = OnDevice()
    blocks = 4000
    position = 2**31 - 1
    seed = 2**63 + 5
    choice = 255
    source = (
        including("next_token.cu")
        + """
extern "C" __global__ void words(u64* out, const u64* key, int position) {
    const int block = blockIdx.x * blockDim.x + threadIdx.x;
    philox(*(u64(*)[4])(out + 4 * block), block + 1, position, key[0], key[1]);
}
"""
    )
    out = device.up(np.zeros(4 * blocks, np.uint64))
    key = device.up(np.array([seed, choice], np.uint64))
    cuda.compile_kernels(source)["words"].launch(device.stream, blocks // 32, 32, out, key, position)
    counter = np.array([0, position, 0, 0], np.uint64)
    bits = np.random.Philox(key=np.array([seed, choice], np.uint64), counter=counter).random_raw(4 * blocks)
    assert np.array_equal(device.down(out), bits)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, "float16") for form in ("floats", "across", "8 bits", "4 bits", "mxfp4")),
        ("floats", "bfloat16"),
        *((form, "bfloat16") for form in ("8 bits", "4 bits", "mxfp4")),
        *((form, "float32") for form in ("floats", "across")),
    ],
)
def test_rows_of_experts_have_the_same_bits_in_tiles_of_any_size(monkeypatch, form, dtype):
    """Experts without rows, with some and with most; against a product in float32."""
    from lockstep.onnx_tools.products import ExpertWeight
    from lockstep.weights.groups import dequantize
    from lockstep.weights.mxfp4 import mxfp4_numbers
    from lockstep_gpu.kernels import expert_products

    device = OnDevice()
    random = np.random.default_rng(0)
    tokens = 150
    experts = 16
    per_token = 4
    ins = 1120
    outs = 200
    ids = random.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :per_token].astype(np.int32)
    ids[ids == 3] = 5
    ids[: tokens // 2, 0] = 1
    kind = "floats"
    bits = 16
    group = 0
    scales = None
    if form in ("floats", "across"):
        weight = (random.standard_normal((experts, outs, ins)) / 32).astype(numbers(dtype))
        data = weight if form == "floats" else weight.swapaxes(1, 2)
    elif form == "mxfp4":
        kind = "mxfp4"
        bits = 4
        group = 32
        data = random.integers(0, 256, (experts, outs, ins // group, group // 2), np.uint8)
        scales = random.integers(120, 124, data.shape[:3], np.uint8)
        weight = mxfp4_numbers(data, scales)
    else:
        kind = "integers"
        bits = int(form[0])
        group = 32
        data = random.integers(0, 256, (experts, outs, ins // group, group * bits // 8), np.uint8)
        scales = (random.standard_normal(data.shape[:3]) * 8 / 2**bits).astype(np.float16)  # 256 times as large
        weight = dequantize(data, scales.astype(np.float32) / 256, group)
    x = random.standard_normal((tokens, ins)).astype(numbers(dtype))
    stack = expert_products.ExpertStack(
        device.up(data), None if scales is None else device.up(scales),
        ExpertWeight((), experts, ins, outs, bits, group, kind, form != "across"),
    )  # fmt: skip
    rows = device.up(x)
    of_each = device.up(np.repeat(x, per_token, axis=0).reshape(tokens, -1))
    order = expert_products.ExpertOrder(
        device.stream, device.up(ids), experts, device.up(np.zeros(ids.size, np.int32)),
        device.up(np.zeros((ids.size, 4), np.int32)), expert_products.largest_tile([stack.form], x.dtype),
    )  # fmt: skip
    results = []
    for tile in expert_products.TILES[: 4 if bits == 16 and dtype != "float32" else 3]:
        monkeypatch.setattr(expert_products, "tile_for", lambda *_, tile=tile: tile)
        for shared, count in ((True, tokens), (False, tokens), (True, 1), (True, 13)):
            out = device.up(np.full((tokens, per_token * outs), 7, numbers(dtype)))
            order.sort(count)
            multiply = expert_products.bind(device.stream, stack, rows if shared else of_each, out, order, shared)
            multiply(count)
            results.append(device.down(out))
            assert (results[-1][count:] == 7).all()
            np.testing.assert_array_equal(results[-1][:count], results[0][:count], err_msg=f"{tile}, {count} tokens")
    products = np.stack([x.astype(np.float32) @ item.T.astype(np.float32) for item in weight])
    products = products[ids, np.arange(tokens)[:, None]]
    # What the results are rounded to, and the order of sums.
    allowed = {"float16": 2e-3, "bfloat16": 8e-3, "float32": 1e-5}[dtype]
    rows_found = results[0].reshape(products.shape).astype(np.float32)
    np.testing.assert_allclose(rows_found, products, rtol=allowed, atol=allowed * products.std())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [((80, 80), 48), ((48,), 80), ((4, 24, 24), 48), ((48,), 24), ((288,), 64), ((12, 1, 96, 96), 768)],
    ids=str,
)  # the last: a router, a gate and an expert (Qwen3-Next)
def test_products_of_few_columns_have_the_same_bits_for_any_number_of_rows(sizes, dtype):
    """Of numbers that nearly cancel each other, whose sums another order would change."""
    from lockstep_gpu.kernels.gemm import Gemm, trial_factors

    device = OnDevice()
    outs, columns = sizes
    weight, x = (np.resize(item, (300, columns)) for item in trial_factors(columns, numbers(dtype)))
    results = [device.up(np.zeros((len(x), size), numbers(dtype))) for size in outs]
    multiply = Gemm(device.stream, numbers(dtype)).bind(device.up(weight[: sum(outs)]), device.up(x), results)
    products = []
    for rows in (1, 9, 17, 33, 40, 62, 100, 128, 129, 300):
        multiply(rows)
        products.append(np.concatenate([device.down(result) for result in results], axis=1)[:rows])
    for part in products:
        np.testing.assert_array_equal(part, products[-1][: len(part)], err_msg=f"{len(part)} rows")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_products_with_float32_weights_have_the_same_bits_for_any_number_of_rows(dtype):
    """Rows of any type: a router's are of 16 bits. A size that no tile divides."""
    from lockstep_gpu.kernels.products import Products, SmallWeight

    device = OnDevice()
    random = np.random.default_rng(0)
    sizes = 70, 33
    weight = random.standard_normal((sum(sizes), 333), np.float32)
    x = random.standard_normal((150, 333), np.float32).astype(numbers(dtype))
    outs = [device.up(np.zeros((len(x), size), np.float32)) for size in sizes]
    small = SmallWeight(device.up(weight), None, 16, 0, 333, sizes)
    multiply = Products(device.stream, numbers(dtype)).bind(small, device.up(x), outs)
    results = []
    for rows in (150, 65, 64, 17, 16, 9, 8, 1):
        multiply(rows)
        results.append(np.concatenate([device.down(out) for out in outs], axis=1)[:rows])
        np.testing.assert_array_equal(results[-1], results[0][:rows], err_msg=f"{rows} rows")
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-4)


def test_processed_logits_are_the_hosts_to_the_bit_and_tokens_are_counted_once():
    """Five steps, each taken twice, as where one was launched early and dropped."""
    from lockstep_gpu.kernels.step_kernels import Kernels
    from lockstep_gpu.logits_tables import LogitsTables

    device = OnDevice()
    mix = ProcessedMix(16, 32003)
    records = mix.records()
    tables = LogitsTables(16, 32003)
    for slot, sampler in enumerate(mix.samplers):
        tables.set_sampling(slot, sampler)
    tables.send(device.stream)
    rows = device.up(np.arange(16, dtype=np.int32))
    outs = [device.up(np.zeros(16, np.int32)) for _ in range(3)]
    for _ in range(5):
        step = mix.step()
        for slot, masks in enumerate(step.masks):
            if masks is not None:
                records["changes"][slot] |= MASKED
                tables.set_masks(slot, masks)
        tables.send(device.stream)
        logits, positions, inputs, samplings = (
            device.up(array)
            for array in (step.logits, (step.positions - 1).astype(np.int32), step.inputs.astype(np.int32), records)
        )
        for _ in range(2):
            arguments = logits, rows, positions, 10000, inputs, rows, samplings, tables.arrays
            Kernels(False).advance(device.stream, *arguments, *outs)
        changed = records["changes"] > 0
        np.testing.assert_array_equal(device.down(tables.processed)[changed], step.processed[changed])
        logprobs = tables.read_logprobs(device.down(tables.logprobs), records, range(16))
        step.check(device.down(outs[0]), [logprobs.get(slot) for slot in range(16)])
