"""Faults between the edges: `compare` and `validate` see each at whatever size, token or magnitude a seed puts it."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from demo_model import CONFIG, TOLERANCES
from lora_folders import shared_lora

from faults.between import clipped, faults, is_edge
from faults.edit import Edit
from faults.fault import replaced
from faults.table import FAULTS as TABLE
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.artifacts.reports import SizeCombinations
from lockstep.backends.cpu import thread_count
from lockstep.backends.engine_set import EngineSet
from lockstep.targets import Limits, Results
from lockstep.verify.compare import inputs, sequence_sweep
from lockstep.verify.compare.pair import Pair
from lockstep.verify.compare.trial import Arrays
from lockstep.verify.repeats import repeated_rows
from lockstep.weights import Weights
from shared import Shared
from some import some

MODEL = "demo-llama"
LIMITS = CONFIG.limits.plain()


def spoiled(results: Results, folder: Path, name: str, edit, model: str = MODEL) -> Path:
    """An engine set with an engine changed by `edit`, with a digest that fits."""
    engines = shutil.copytree(results.engines(model, "fp32", "onnxruntime").parent, folder) / "engines.json"
    manifest = read_json(engines)
    entry = manifest["engines"][name]
    file = engines.parent / entry["file"]
    changed = Edit(onnx.load(file))
    edit(changed)
    file.write_bytes(changed.done())
    entry["sha256"] = sha256_file(file)
    write_json(engines, manifest)
    return engines


def pair(
    results: Results, engines: Path, name: str, model: str = MODEL, limits: Limits = LIMITS, seed: int = 0
) -> Pair:
    assembly = results.assembly(model, "fp32")
    opened = EngineSet.open(engines, assembly)
    graph = dict(opened.backend.graphs(opened.assembly, opened.manifest.options))[name]
    return Pair(opened, Weights.open(results.weights(model, "fp32")), assembly.parent, name, graph, limits, None, seed)


SEED = 7
FAULTS = {fault.name: fault for fault in faults(SEED)}
REPEATED = TABLE["embedding-three"]


@pytest.mark.parametrize("fault", some(FAULTS))
def test_a_fault_between_the_edges_is_seen(demo: Results, tmp_path: Path, fault: str) -> None:
    (pattern,) = FAULTS[fault].where
    name = pattern.replace("*", "attention")
    actual = pair(demo, spoiled(demo, tmp_path / "engines", name, FAULTS[fault].change), name)
    entry = actual.compare(TOLERANCES["fp32"], 300)
    assert not entry.passed and f"engine {name}, " in actual.failures[0]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "output, largest", [("key_out", 50.0), ("value_out", 1e6), ("attention", 1e6)], ids=lambda value: str(value)
)
def test_attention_that_saturates_is_seen(demo: Results, tmp_path: Path, phase: str, output: str, largest: float):
    """The scaled trial comes first: keys and values at the end of the precision."""
    name = f"attention.{phase}"
    actual = pair(demo, spoiled(demo, tmp_path / "engines", name, replaced(output, clipped(largest))), name)
    assert not actual.compare(TOLERANCES["fp32"], 300).passed


def test_a_right_engine_is_tried_at_every_size_in_an_order_of_its_own(demo: Results) -> None:
    engines = demo.engines(MODEL, "fp32", "onnxruntime")
    entry = pair(demo, engines, "entry").compare(TOLERANCES["fp32"], 300)
    assert entry.passed and entry.sizes.tried == entry.sizes.known == LIMITS.max_num_tokens + LIMITS.max_batch_size + 13
    none = pair(demo, engines, "entry").compare(TOLERANCES["fp32"], 0)
    assert none.passed and none.sizes.tried == 0 and none.sizes.known == entry.sizes.known


def test_a_busy_machine_tries_as_many_sizes(demo: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waits, as where other processes have the cores: together twice as long as the sizes may take."""
    limits = replace(LIMITS, max_num_tokens=8)
    waiting = pair(demo, demo.engines(MODEL, "fp32", "onnxruntime"), "entry", limits=limits)
    run_engine = waiting.run_engine

    def run_later(feed: Arrays, profile: int) -> Arrays:
        time.sleep(0.05)
        return run_engine(feed, profile)

    monkeypatch.setattr(waiting, "run_engine", run_later)
    sizes = waiting.compare(TOLERANCES["fp32"], 0.6 / thread_count()).sizes
    assert sizes.tried == sizes.known == 8 + limits.max_batch_size + 13


def test_a_token_that_comes_three_times_in_a_step_is_seen(demo: Results, tmp_path: Path) -> None:
    engines = spoiled(demo, tmp_path / "engines", "embedding", REPEATED.change)
    entry = pair(demo, engines, "embedding")
    assert not entry.compare(TOLERANCES["fp32"], 300).passed
    assert re.search(r"\((num_tokens \d+, (3|all) rows the same|num_tokens \d+)\), hidden: expected", entry.failures[0])


@pytest.mark.parametrize(("min_rows", "max_rows"), [(1, 512), (1, 4), (1, 1), (200, 300)])
def test_rows_repeat_twice_thrice_and_all(min_rows: int, max_rows: int) -> None:
    steps = list(repeated_rows(min_rows, max_rows, random.Random(1)))
    for name, rows in steps:
        assert min_rows <= len(rows) <= max_rows and 0 <= rows.min() and rows.max() < max_rows
        if max_rows == 512 and name in ("2 rows the same", "3 rows the same"):
            assert np.unique(rows, return_counts=True)[1].max() == int(name[0])
    if max_rows == 512:
        assert {"2 rows the same", "3 rows the same"} <= {name for name, _ in steps}
        (neighbours,) = (rows for name, rows in steps if name == "22 rows next to each other")
        assert len(set(itertools.pairwise(neighbours.tolist()))) == 22 * 22 - 1


def test_every_number_of_requests_decodes_at_every_length_of_the_demo(demo: Results) -> None:
    engines = demo.engines(MODEL, "fp32", "onnxruntime")
    decode = pair(demo, engines, "attention.decode").compare(TOLERANCES["fp32"], 300)
    lengths = 256  # in caches of 64, 128 and 256
    assert decode.passed and decode.sizes.triples == SizeCombinations(4 * lengths, 4 * lengths)
    assert decode.sizes.pairs == SizeCombinations(4 * 3 + 5 * lengths, 4 * 3 + 5 * lengths)
    exit = pair(demo, engines, "exit").compare(TOLERANCES["fp32"], 300)
    assert exit.sizes.triples is None and exit.sizes.pairs is not None
    rows = LIMITS.max_num_tokens + LIMITS.max_batch_size
    assert rows <= exit.sizes.pairs.tried < exit.sizes.pairs.known == 4 * rows - 6, "no more requests than tokens"


def test_one_triple_of_sizes_is_seen(demo: Results, tmp_path: Path) -> None:
    """Three requests in a cache of 128 rows, one of which holds 77 tokens."""

    def wrong(edit: Edit) -> None:
        matches = edit.all_of(
            edit.op("Equal", edit.size("query"), 3),
            edit.op("Equal", edit.size("past_key", 2), 128),
            edit.op("Equal", edit.op("ReduceMin", edit.op("Abs", edit.op("Sub", "past_lengths", 77)), keepdims=0), 0),
        )
        edit.replace("attention", lambda value: edit.op("Where", matches, edit.times(value, 1.05), value))

    actual = pair(demo, spoiled(demo, tmp_path / "engines", "attention.decode", wrong), "attention.decode")
    assert not actual.compare(TOLERANCES["fp32"], 300).passed
    assert "num_requests 3, past_capacity 128" in actual.failures[0]


@pytest.mark.parametrize("phase", ["decode", pytest.param("prefill", marks=pytest.mark.long)])
def test_lengths_beyond_the_sequence_are_drawn(
    demo: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The sequence has 96 tokens here: right engines pass, one that is wrong after 130 to 190 tokens does not."""

    def wrong(edit: Edit) -> None:
        longest = edit.op("ReduceMax", "past_lengths", keepdims=0)
        matches = edit.all_of(edit.op("Greater", longest, 129), edit.op("Less", longest, 191))
        edit.replace("attention", lambda value: edit.op("Where", matches, edit.times(value, 1.05), value))

    monkeypatch.setattr(sequence_sweep, "SEQUENCE_TOKENS", 96)
    monkeypatch.setattr(inputs, "edges", lambda longest, lengths=(): [longest])
    monkeypatch.setattr(inputs, "both_sides", lambda longest, lengths=(): [longest])
    name = f"attention.{phase}"
    right = pair(demo, demo.engines(MODEL, "fp32", "onnxruntime"), name)
    assert right.compare(TOLERANCES["fp32"], 300).passed
    actual = pair(demo, spoiled(demo, tmp_path / "engines", name, wrong), name)
    assert not actual.compare(TOLERANCES["fp32"], 300).passed


def test_another_seed_draws_other_sizes(demo: Results) -> None:
    engines = demo.engines(MODEL, "fp32", "onnxruntime")
    first, second, again = (seeded(demo, engines, seed) for seed in (0, 1, 0))
    assert first == again != second


def seeded(results: Results, engines: Path, seed: int) -> list[tuple[tuple[int, ...], ...]]:
    sweep = pair(results, engines, "attention.prefill", seed=seed).sweep()
    return [tuple(sweep.points(trial)) for trial in sweep.trials]


def test_places_that_are_drawn_are_no_edges_and_differ_by_seed() -> None:
    drawn = set()
    for seed in range(20):
        drawn.update(fault.name for fault in faults(seed))
    assert len(drawn) > 150
    assert is_edge(128) and is_edge(129) and is_edge(512) and not is_edge(77)


@pytest.fixture(scope="module")
def lora(demo: Results, shared: Shared) -> Results:
    return shared_lora(demo, shared)


def test_an_engine_that_takes_one_adapter_for_another_is_seen(lora: Results, tmp_path: Path) -> None:
    def second_for_first(edit: Edit) -> None:
        edit.replace(
            "adapter_ids", lambda ids: edit.op("Where", edit.op("Equal", ids, edit.const(1)), edit.const(0), ids)
        )

    engines = spoiled(lora, tmp_path / "engines", "middle", second_for_first)
    actual = pair(lora, engines, "middle")
    assert not actual.compare(TOLERANCES["fp32"], 300).passed
    right = pair(lora, lora.engines(MODEL, "fp32", "onnxruntime"), "middle")
    assert right.compare(TOLERANCES["fp32"], 300).passed
