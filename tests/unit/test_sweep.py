"""Faults between the edges: `compare` and `validate` see each at whatever size, token or magnitude a seed puts it."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from demo_model import CONFIG, TOLERANCES
from lora_folders import shared_lora

from faults.between import clipped, faults, is_edge
from faults.edit import Edit
from faults.fault import replaced
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends.engine_set import EngineSet
from lockstep.targets import Limits, Results
from lockstep.verify.compare.pair import Pair
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


def pair(results: Results, engines: Path, name: str, model: str = MODEL, limits: Limits = LIMITS) -> Pair:
    assembly = results.assembly(model, "fp32")
    opened = EngineSet.open(engines, assembly)
    graph = dict(opened.backend.graphs(opened.assembly, opened.manifest.options))[name]
    return Pair(opened, Weights.open(results.weights(model, "fp32")), assembly.parent, name, graph, limits, None)


SEED = 7
FAULTS = {fault.name: fault for fault in faults(SEED)}


@pytest.mark.parametrize("fault", some(FAULTS))
def test_a_fault_between_the_edges_is_seen(demo: Results, tmp_path: Path, fault: str) -> None:
    (pattern,) = FAULTS[fault].where
    name = pattern.replace("*", "attention")
    found = pair(demo, spoiled(demo, tmp_path / "engines", name, FAULTS[fault].change), name)
    entry = found.compare(TOLERANCES["fp32"], 300)
    assert not entry.passed and f"engine {name}, " in found.failures[0]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "output, largest", [("key_out", 50.0), ("value_out", 1e6), ("attention", 1e6)], ids=lambda value: str(value)
)
def test_attention_that_saturates_is_seen(demo: Results, tmp_path: Path, phase: str, output: str, largest: float):
    """The scaled trial comes first: keys and values at the end of the precision."""
    name = f"attention.{phase}"
    found = pair(demo, spoiled(demo, tmp_path / "engines", name, replaced(output, clipped(largest))), name)
    assert not found.compare(TOLERANCES["fp32"], 300).passed


def test_a_right_engine_is_tried_at_every_size_in_an_order_of_its_own(demo: Results) -> None:
    engines = demo.engines(MODEL, "fp32", "onnxruntime")
    entry = pair(demo, engines, "entry").compare(TOLERANCES["fp32"], 300)
    assert entry.passed and entry.sizes.tried == entry.sizes.known == LIMITS.max_num_tokens + LIMITS.max_batch_size
    none = pair(demo, engines, "entry").compare(TOLERANCES["fp32"], 0)
    assert none.passed and none.sizes.tried == 0 and none.sizes.known == entry.sizes.known


def test_places_that_are_drawn_are_no_edges_and_differ_by_seed() -> None:
    drawn = [{fault.name for fault in faults(seed)} for seed in range(20)]
    assert len(set().union(*drawn)) > 150
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
    found = pair(lora, engines, "middle")
    assert not found.compare(TOLERANCES["fp32"], 300).passed
    right = pair(lora, lora.engines(MODEL, "fp32", "onnxruntime"), "middle")
    assert right.compare(TOLERANCES["fp32"], 300).passed
