"""The kernel that chooses tokens, compiled for the host from the GPU's source, against step/logits_pipeline.py."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lockstep.step.logits_pipeline import most_likely, most_likely_of_shard
from lockstep.step.sampling import Sampling
from lockstep_gpu.logits_tables import LOGPROBS, MASKED, bits_of, count_tokens, read_logprobs
from next_token_cases import CASES, SAMPLING, ProcessedMix, check_draws, logits_of_ranks, record, rows_of
from some import some

TESTS = Path(__file__).parents[2]
KERNEL = TESTS.parent / "src" / "lockstep_gpu" / "kernels" / "next_token.cu"
COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCE = """
#include "fake_gpu/host_block.h"
#include "fake_gpu/host_numbers.h"
#define ON_HOST
#include "KERNEL"
extern "C" void run(int rows, const void* logits, int size, const int* slots, const void* held, int limit,
                    const void* given, const void* at, const void* samplings, void* const* tables, int* found,
                    void* tokens, void* positions, int wide) {
    launch(rows, [=] { advance(logits, 0, size, slots, held, limit, given, at, (const Sampling*)samplings,
                               (int*)tables[0], (Counted*)tables[1], (const float*)tables[2],
                               (const unsigned*)tables[3], (float*)tables[4], (Logprobs*)tables[5], found, tokens,
                               positions, wide); });
}
extern "C" void tell(int rows, const void* part, int size, int first, const int* slots, void* told) {
    launch(rows, [=] { largest(part, 0, size, first, slots, (RankArgmax*)told); });
}
extern "C" void decide(int rows, const void* told, int ranks, const int* slots, const void* held, int limit, int* found,
                       void* tokens, void* positions, int wide) {
    launch(rows, [=] { choose((const RankArgmax*)told, ranks, slots, held, limit, found, tokens, positions, wide); });
}
extern "C" void words(u64* out, u64 block, u64 position, u64 seed, u64 choice) {
    philox(*(u64(*)[4])out, block, position, seed, choice);
}
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(SOURCE.replace("KERNEL", str(KERNEL)))
    # -Bsymbolic: glibc has an `advance` too. Products and sums stay apart, as NumPy computes them.
    command = [
        COMPILER, "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-Wl,-Bsymbolic", f"-I{TESTS}",
        "kernel.cpp",
    ]  # fmt: skip
    subprocess.run([*command, "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Tables:
    """What `LogitsTables` holds, on the host."""

    def __init__(self, slots: int, size: int):
        self.counts = np.zeros((slots, size), np.int32)
        self.counted = np.zeros((slots, 2), np.int32)
        self.biases = np.zeros((slots, size), np.float32)
        self.masks = np.zeros((slots, 2, -(-size // 32)), np.uint32)
        self.processed = np.full((slots, size), np.nan, np.float32)
        self.logprobs = np.zeros(slots, LOGPROBS)


def run(
    kernel,
    logits: np.ndarray,
    samplings: np.ndarray,
    positions: np.ndarray,
    wide: bool = False,
    tables: Tables | None = None,
    inputs: np.ndarray | None = None,
) -> np.ndarray:
    """The token of each row, row i of slot i; what else is written is checked here. inputs: the rows' input tokens."""
    count, size = logits.shape
    integer = np.int64 if wide else np.int32
    slots = np.arange(count, dtype=np.int32)
    input_positions = (positions - 1).astype(integer)
    limit = int(positions.max())
    next_tokens = np.full(count, -7, np.int32)
    tokens = np.zeros(count, integer)
    nexts = np.zeros(count, integer)
    logits = np.ascontiguousarray(logits, np.float32)
    arrays = [address(array) for array in (slots, input_positions)]
    outs = [address(array) for array in (next_tokens, tokens, nexts)]
    inputs = np.zeros(count, integer) if inputs is None else inputs.astype(integer)[::-1].copy()
    at = np.arange(count, dtype=integer)[::-1].copy()
    tables = tables or Tables(count, size)
    pointers = (ctypes.c_void_p * 6)(*(array.ctypes.data for array in vars(tables).values()))
    addresses = address(inputs), address(at), address(samplings), pointers
    kernel.run(count, address(logits), size, *arrays, limit, *addresses, *outs, int(wide))
    assert tokens.tolist() == np.maximum(next_tokens, 0).tolist() and nexts.tolist() == (positions % limit).tolist()
    return next_tokens


OFTEN = [case for case in CASES if case.name in ("all-rules", "min-p", "top-k-more", "least-temperature")]


@pytest.mark.parametrize("case", some(CASES, *OFTEN), ids=lambda case: case.name)
def test_tokens_are_those_of_the_definition(kernel, case):
    logits, samplings, choices, positions = rows_of(case, 12)
    records = record(samplings, choices)
    tokens = run(kernel, logits, records, positions)
    check_draws(tokens, logits, samplings, choices, positions)
    assert np.array_equal(tokens, run(kernel, logits, records, positions, wide=True))


def test_processed_logits_are_the_hosts_to_the_bit_and_tokens_are_counted_once(kernel):
    """Five steps, each taken twice, as where one was launched early and dropped."""
    mix = ProcessedMix(16, 777)
    tables = Tables(16, 777)
    records = mix.records()
    for slot, sampler in enumerate(mix.samplers):
        tables.counts[slot], tables.counted[slot] = count_tokens(sampler, 777)
        tables.biases[slot][list(sampler.sampling.logit_bias)] = [*sampler.sampling.logit_bias.values()]
    for _ in range(5):
        step = mix.step()
        for slot, masks in enumerate(step.masks):
            if masks is not None:
                records["changes"][slot] |= MASKED
                tables.masks[slot] = bits_of(masks)
        for _ in range(2):
            tables.processed[:] = np.nan
            tokens = run(kernel, step.logits, records, step.positions, tables=tables, inputs=step.inputs)
        changed = records["changes"] > 0
        np.testing.assert_array_equal(tables.processed[changed], step.processed[changed])
        assert np.isnan(tables.processed[~changed]).all()
        logprobs = [
            read_logprobs(tables.logprobs[slot], min(20, count - 1))
            for slot, count in enumerate(records["num_logprobs"])
        ]
        step.check(tokens, logprobs)


def test_bits_of_the_noise_are_numpys(kernel):
    for block, position, seed, choice in ((1, 0, 0, 0), (7, 700, 2**64 - 1, 3), (16032, 2**31 - 1, 2**63 + 5, 255)):
        words = np.zeros(4, np.uint64)
        kernel.words(address(words), *map(ctypes.c_uint64, (block, position, seed, choice)))
        counter = np.array([block - 1, position, 0, 0], np.uint64)
        bits = np.random.Philox(key=np.array([seed, choice], np.uint64), counter=counter).random_raw(4)
        assert words.tolist() == bits.tolist()


def test_rows_that_do_not_sample_or_are_not_finite_stand_beside_those_that_do(kernel):
    logits = np.random.default_rng(0).standard_normal((6, 1500)).astype(np.float32)
    logits[1, [3, 900]] = 9
    logits[2, 1] = np.nan
    logits[3, 2] = np.inf
    logits[4] = -np.inf
    samplings = [Sampling(), Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5), Sampling(1.0), Sampling(1.0, top_k=1)]
    tokens = run(kernel, logits, record(samplings, [0] * 6), np.arange(1, 7))
    assert tokens.tolist() == [int(logits[0].argmax()), 3, -1, -1, -1, int(logits[5].argmax())]
    assert SAMPLING.itemsize == 72 and LOGPROBS.itemsize == 176  # struct Sampling, struct Logprobs


@pytest.mark.parametrize("ranks", some([2, 3, 8], 3))
@pytest.mark.parametrize("columns", [5, 1700])  # fewer than a block's threads, more
def test_what_ranks_tell_of_their_logits_is_what_one_rank_finds(kernel, ranks, columns):
    """Of equals the lowest id, within a rank and across; none for NaN and infinity; rows without a slot stay."""
    logits, slots = logits_of_ranks(ranks, columns)
    input_positions = np.arange(9, dtype=np.int64)
    records = np.full((9, ranks, 2), -7, np.int32)
    for rank in range(ranks):
        part = np.ascontiguousarray(logits[:, rank * columns : (rank + 1) * columns])
        record = np.full((9, 2), -7, np.int32)
        kernel.tell(9, address(part), columns, rank * columns, address(slots), address(record))
        ids, values = most_likely_of_shard(part, rank * columns)
        assert record[:, 1].tolist() == [token if slot >= 0 else -7 for token, slot in zip(ids.tolist(), slots)]
        assert np.array_equal(record[:, 0].view(np.float32)[slots >= 0], values[slots >= 0])
        records[:, rank] = record
    next_tokens = np.full(9, -5, np.int32)
    tokens = np.full(9, -5, np.int64)
    positions = np.full(9, -5, np.int64)
    outs = [address(array) for array in (next_tokens, tokens, positions)]
    kernel.decide(9, address(records), ranks, address(slots), address(input_positions), 7, *outs, 1)
    with np.errstate(invalid="ignore"):
        best = most_likely(logits)
    expected = np.full((3, 9), -5)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[:, slot] = best[row], max(best[row], 0), row + 1 if row + 1 < 7 else 0
    assert np.array_equal([next_tokens, tokens, positions], expected)
