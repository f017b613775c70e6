"""The kernels of our own, on a GPU: what they write, and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

POSITIONS, HEADS, KV_HEADS, DIM, PAGE = 200, 4, 2, 16, 64
ROWS = np.array([0, -1, 2, 1, 1, 1, 1, 1, 1], np.int32)  # the second token belongs to nobody; row 1 goes over to its second page
AT = np.array([5, 0, 130, 61, 62, 63, 64, 65, 66])
PAGES = np.array([[3, 1, 0, 2], [4, 5, 6, 7], [8, 9, 10, 11]], np.int32)


class OnDevice:
    """Host arrays on the device, and back."""

    def __init__(self):
        from lockstep.engine.tensorrt import cuda

        self.cuda, self.stream = cuda, cuda.Stream()

    def up(self, host: np.ndarray):
        host = np.ascontiguousarray(host)
        array = self.cuda.empty(host.shape, host.dtype)
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
    found = []
    for row, at in zip(ROWS, AT):
        if row >= 0:
            place = (PAGES[row, at // PAGE], slice(None), at % PAGE) if wide else (row, slice(None), at)
            found.append(array[place].copy())
            array[place] = 0
    return found


@pytest.mark.parametrize("given", ["float16", "float32"])
@pytest.mark.parametrize("wide", [False, True])
def test_queries_and_keys_are_turned_and_cached_in_pages(given, wide):
    from lockstep.engine.tensorrt.kernels import Kernels, Rotation

    device, random = OnDevice(), np.random.default_rng(0)
    own, other = (random.standard_normal((POSITIONS, DIM), np.float32) for _ in range(2))
    partner = np.array([*range(4, 8), *range(4), *range(8, 16)], np.int32)
    query, key = (random.standard_normal((len(AT), heads, DIM), np.float32).astype(np.float16).astype(given) for heads in (HEADS, KV_HEADS))
    value = random.standard_normal((len(AT), KV_HEADS, DIM), np.float32).astype(np.float16)
    out, keys, values = (device.up(np.zeros(shape, np.float16)) for shape in (query.shape, *[(PAGES.size, KV_HEADS, PAGE, DIM)] * 2))
    positions = device.up(AT.astype(np.int64 if wide else np.int32))
    Kernels(wide).rotate(
        device.stream, device.up(query), device.up(key), device.up(value), out, keys, values, Rotation(device.up(own), device.up(other), device.up(partner)),
        device.up(ROWS), positions, device.up(PAGES),
    )  # fmt: skip
    turned = [x.astype(np.float32) * own[AT, None] + x[:, :, partner].astype(np.float32) * other[AT, None] for x in (query, key)]
    # Computed in fp32, and rounded to fp16 once, a little behind where NumPy does: one unit in the last place.
    np.testing.assert_allclose(device.down(out), turned[0], rtol=2**-10, atol=2**-13)
    found = {name: device.down(array) for name, array in (("keys", keys), ("values", values))}
    np.testing.assert_allclose(cached(found["keys"], True), turned[1][ROWS >= 0], rtol=2**-10, atol=2**-13)
    assert np.array_equal(cached(found["values"], True), value[ROWS >= 0])
    assert not found["keys"].any() and not found["values"].any()


@pytest.mark.parametrize(("dtype", "dim"), [("float16", 16), ("float16", 12), ("float32", 16)])  # 16 bytes at a time, 2 at a time
def test_keys_and_values_are_cached_in_rows(dtype, dim):
    from lockstep.engine.tensorrt.kernels import Kernels

    device, random = OnDevice(), np.random.default_rng(0)
    key, value = (random.standard_normal((len(AT), KV_HEADS, dim), np.float32).astype(dtype) for _ in range(2))
    keys, values = (device.up(np.zeros((3, KV_HEADS, POSITIONS, dim), dtype)) for _ in range(2))
    Kernels(False).write_cache(device.stream, device.up(key), device.up(value), keys, values, device.up(ROWS), device.up(AT.astype(np.int32)))
    for expected, array in ((key, device.down(keys)), (value, device.down(values))):
        assert np.array_equal(cached(array, False), expected[ROWS >= 0]) and not array.any()


@pytest.mark.parametrize("wide", [False, True])
def test_rows_that_decode_are_one_longer_and_others_count_as_one(wide):
    from lockstep.engine.tensorrt.kernels import Kernels

    device, random = OnDevice(), np.random.default_rng(0)
    rows, positions = np.where(random.random(300) < 0.3, -1, np.arange(300)).astype(np.int32), random.integers(0, 5000, 300)
    out = device.up(np.full(310, 77, np.int32))  # more than two blocks of threads, and what lies behind
    Kernels(wide).lengths(device.stream, device.up(rows), device.up(positions.astype(np.int64 if wide else np.int32)), out[:300])
    found = device.down(out)
    assert np.array_equal(found[:300], np.where(rows < 0, 1, positions + 1)) and (found[300:] == 77).all()


@pytest.mark.parametrize("size", [7, 1024, 32003])  # fewer than a block's threads, as many, more
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True])
def test_the_first_of_the_largest_logits_is_the_next_token(wide, dtype, size):
    import ml_dtypes

    from lockstep.engine.tensorrt.kernels import Kernels

    device, random = OnDevice(), np.random.default_rng(0)
    logits = random.uniform(-5, 5, (10, size)).astype(np.float32)
    logits[0, [size // 2, size - 1]] = 9  # as large: the first
    logits[2] = -3  # all
    logits[3] = -np.inf
    logits[4, size - 1] = 9
    logits[5, 0] = 9
    logits[7, size // 2], logits[8, 1], logits[9, -1] = np.nan, np.inf, np.nan
    rows, tokens, positions = np.array([0, -1, 2, 3, 4, 5, -1, 7, 8, 9], np.int32), np.arange(100, 110), np.arange(10) * 1000
    logits = logits.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    integer = np.int64 if wide else np.int32
    on_device = [device.up(array.astype(integer)) for array in (tokens, positions)]
    Kernels(wide).advance(device.stream, device.up(logits), device.up(rows), *on_device)
    going = rows >= 0
    expected = np.where(np.isfinite(logits.astype(np.float32).max(axis=1)), logits.astype(np.float32).argmax(axis=1), -1)
    assert device.down(on_device[0]).tolist() == np.where(going, expected, tokens).tolist()
    assert device.down(on_device[1]).tolist() == (positions + going).tolist()
