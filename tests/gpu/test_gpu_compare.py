"""Comparing for real: the demo's engines beside their graphs in ONNX Runtime, on each of their profiles."""

from __future__ import annotations

import pytest

from lockstep import backends
from lockstep.artifacts.files import read_json
from lockstep.targets import Limits
from lockstep.verify import compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision, attention, tolerance", [("fp32", "traced", 1e-4), ("fp16", "fused", 1e-2)])
def test_engines_compute_what_their_graphs_do(demo, tmp_path, precision, attention, tolerance):
    assembly, tensors = demo.assembly("demo-llama", precision), demo.weights("demo-llama", precision)
    options = {"attention": attention, "tactic_sources": ["edge_mask_convolutions", "jit_convolutions"]}
    engines = backends.build(assembly, "tensorrt", tmp_path / "engines" / "engines.json", options)
    report = read_json(compare.run(assembly, tensors, engines, tolerance, Limits(), tmp_path / "compare.json"))
    assert set(report["engines"]) == {name for name in read_json(engines)["engines"] if not name.endswith(".rotary")}
    profiles = {run["profile"] for run in report["engines"]["middle"]["runs"]}
    # Of blocks with TensorRT's products three, by size; of cut ones (fp16 with 8.6) what the limits ask for.
    assert profiles == set(range(len(profiles))) and (precision == "fp16" or len(profiles) == 3)
