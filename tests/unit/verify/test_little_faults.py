"""A product that is a little too large is refused in every precision and on every backend that runs here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from demo_model import CONFIG, DEMO, LIMITS

from faults.between import where
from faults.edit import Edit
from faults.scaled import FACTORS
from lockstep.artifacts.bisect_report import FoundFault
from lockstep.artifacts.files import read_json, sha256_file, write_bytes, write_json
from lockstep.backends.builder import build
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.openvino import cpu
from lockstep.checkpoint import resolve
from lockstep.export.run import export
from lockstep.targets import Results
from lockstep.verify.bisect.explain import engine_report
from lockstep.verify.compare.pair import Pair
from lockstep.verify.walk import Tokens
from lockstep.weights import Weights, convert
from shared import Shared
from some import some

NAME = "demo-llama"
QUANTIZED = ("w8a16", "w4a16", "w8a8", "w4a8")
# One of each kind of rounding: none, of weights, of activations too.
DAILY = [(precision, "onnxruntime") for precision in ("fp32", "w8a8", "w8a8-fp8")] + [("w4a16", "openvino")]
bf16 = pytest.param("bf16", "openvino", marks=pytest.mark.skipif(cpu.why_not("bf16") is not None, reason="no bf16"))
PAIRS = [
    *some([(precision, "onnxruntime") for precision in ("fp32", "fp16", *QUANTIZED, "w8a8-fp8")], *DAILY),
    *some([(precision, "openvino") for precision in ("fp32", *QUANTIZED)], *DAILY),
    bf16,
]


@pytest.fixture
def results(request: pytest.FixtureRequest, shared: Shared) -> Callable[[str], Results]:
    """What gives the demo in a precision, its graphs and weights."""

    def of(precision: str) -> Results:
        if precision in ("fp32", "fp16", "bf16"):
            return request.getfixturevalue("demo_bf16" if precision == "bf16" else "demo")

        def make(folder: Path) -> None:
            results = Results(folder)
            checkpoint = results.checkpoint(NAME)
            assembly = results.assembly(NAME, precision)
            resolve(str(DEMO), DEMO, checkpoint)
            export(checkpoint, precision, assembly, group_size=16)
            convert(checkpoint, precision, results.weights(NAME, precision), assembly)

        return Results(shared.folder(f"little/{precision}", make))

    return of


def compared(results: Results, precision: str, backend: str, engines: Path, factor: float) -> tuple[Any, list[str]]:
    """Compare the middle block, whose engine gives queries times `factor`."""
    assembly = results.assembly(NAME, precision)
    weights = Weights.open(results.weights(NAME, precision))
    opened = EngineSet.open(engines, assembly)
    graph = opened.assembly.classes["middle"]
    pair = Pair(opened, weights, assembly.parent, "middle", graph, LIMITS, 1)
    right = pair.run_engine

    def scaled(feed: Any, profile: int) -> dict[str, np.ndarray]:
        outputs = dict(right(feed, profile))
        query = outputs["query"].astype(np.float32) * np.float32(factor)
        return {**outputs, "query": query.astype(outputs["query"].dtype)}

    pair.run_engine = scaled
    tolerance = CONFIG.tolerance("demo-llama", precision, backend)
    return pair.compare(tolerance, seconds=0), pair.failures


@pytest.mark.parametrize("precision, backend", PAIRS)
def test_a_product_that_is_a_little_too_large_is_refused(
    results: Callable[[str], Results], tmp_path: Path, precision: str, backend: str
) -> None:
    """By compare. Right engines pass."""
    demo = results(precision)
    engines = build(demo.assembly(NAME, precision), backend, tmp_path / "engines.json")
    right, failures = compared(demo, precision, backend, engines, 1.0)
    assert right.passed and not failures
    bound = max(run.outputs["query"].tolerance for run in right.runs)
    for factor in (*FACTORS, 1 + 3 * bound):
        wrong, failures = compared(demo, precision, backend, engines, factor)
        assert not wrong.passed and "query: expected an " in failures[0], factor


def spoil(engines: Path, name: str, change: Callable[[Edit], None]) -> None:
    """Edit an engine of ONNX Runtime, with a digest that fits."""
    file = engines.with_name(f"{name}.onnx")
    edit = Edit(onnx.load(file), None)
    change(edit)
    write_bytes(file, edit.done())
    manifest = read_json(engines)
    manifest["engines"][name]["sha256"] = sha256_file(file)
    write_json(engines, manifest)


@pytest.mark.parametrize(
    "precision, name, output, num_tokens",
    [
        ("w4a8", "exit", "logits", 418),
        ("w8a8", "middle", "key", 3),
        pytest.param("w8a8-fp8", "exit", "logits", 77, marks=pytest.mark.long),
        pytest.param("w4a8", "entry", "query", 5, marks=pytest.mark.long),
    ],
)
def test_a_step_of_one_size_that_is_a_little_wrong_is_refused_in_8_bits(
    results: Callable[[str], Results], tmp_path: Path, precision: str, name: str, output: str, num_tokens: int
) -> None:
    """Each of its numbers is nearer than what another integer for an activation costs; all rows of that size are off.

    Right engines pass with other rows too, though some of theirs are off by more.
    """
    demo = results(precision)
    assembly = demo.assembly(NAME, precision)
    engines = build(assembly, "onnxruntime", tmp_path / "engines.json")

    def failures() -> list[str]:
        opened = EngineSet.open(engines, assembly)
        graph = opened.assembly.classes[name]
        weights = Weights.open(demo.weights(NAME, precision))
        pair = Pair(opened, weights, assembly.parent, name, graph, LIMITS, 1)
        pair.compare(CONFIG.tolerance(NAME, precision, "onnxruntime"), seconds=300)
        return pair.failures

    assert failures() == []
    spoil(engines, name, where(output, hidden=num_tokens))
    (failure,) = failures()
    assert f"num_tokens {num_tokens}), {output}: expected an rms error of at most " in failure


@pytest.mark.parametrize("precision", some(["w8a8", "w4a8", "w8a8-fp8"]))
def test_bisect_names_an_engine_that_is_a_little_wrong_in_8_bits(
    results: Callable[[str], Results], tmp_path: Path, precision: str
) -> None:
    demo = results(precision)
    paths = demo.assembly(NAME, precision), demo.weights(NAME, precision)
    engines = build(paths[0], "onnxruntime", tmp_path / "engines.json")
    tolerance = CONFIG.tolerance(NAME, precision, "onnxruntime")
    request = Tokens(np.arange(3, 40), 30)

    def fault() -> FoundFault | None:
        return engine_report(*paths, engines, 2, tolerance, request).fault

    assert fault() is None
    spoil(engines, "middle", lambda edit: edit.replace("query", lambda value: edit.times(value, FACTORS[0])))
    actual = fault()
    assert actual is not None and (actual.graph, actual.measured.tensor) == ("middle", "query")
