"""Comparing for real: the demo's engines against their graphs in ONNX Runtime, on each of their profiles."""

from __future__ import annotations

import pytest
from test_gpu_run import FORMS

from lockstep.artifacts.files import read_json
from lockstep.backends import builder
from lockstep.targets import Limits
from lockstep.tolerances import Tolerances
from lockstep.verify import compare


@pytest.mark.parametrize("backend, precision, options", FORMS, indirect=["backend"])
def test_engines_compute_what_their_graphs_do(demo, tmp_path, backend, precision, options):
    assembly = demo.assembly("demo-llama", precision)
    tensors = demo.weights("demo-llama", precision)
    engines = builder.build(assembly, backend, tmp_path / "engines" / "engines.json", options)
    tolerance = Tolerances(precision, backend)
    report = read_json(compare.run(assembly, tensors, engines, tolerance, Limits(), tmp_path / "compare.json"))
    assert set(report["engines"]) == {name for name in read_json(engines)["engines"] if not name.endswith(".rotary")}
    assert {run["profile"] for run in report["engines"]["middle"]["runs"]} == {0, 1, 2}
