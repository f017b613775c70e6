"""Comparing for real: the demo's engines beside their graphs in ONNX Runtime, on each of their profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep import checkpoint, compare, engine, split, weights
from lockstep.files import read_json

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).parents[2] / "resources" / "demo-llama"


@pytest.mark.parametrize("precision, attention, tolerance", [("fp32", "traced", 1e-4), ("fp16", "fused", 1e-2)])
def test_engines_compute_what_their_graphs_do(tmp_path, precision, attention, tolerance):
    made = checkpoint.resolve(str(DEMO), DEMO, tmp_path / "checkpoint.json")
    assembly = split.export(made, precision, tmp_path / "graphs" / "assembly.json")
    tensors = weights.convert(made, precision, tmp_path / "weights.json")
    options = {"attention": attention, "tactic_sources": ["edge_mask_convolutions", "jit_convolutions"]}
    engines = engine.build(assembly, "tensorrt", tmp_path / "engines" / "engines.json", options)
    report = read_json(compare.run(assembly, tensors, engines, tolerance, tmp_path / "compare.json"))
    assert set(report["engines"]) == {name for name in read_json(engines)["engines"] if not name.endswith(".rotary")}
    assert [run["profile"] for run in report["engines"]["middle"]["runs"]] == [0, 1, 2]
