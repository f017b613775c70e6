"""Levels of sameness: the demo's engines built twice, and for each level a planted difference that only a look at that
level finds."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from demo_model import LIMITS, TOLERANCES
from recorded import recorded

from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends.onnxruntime import backend
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.errors import InputError
from lockstep.provenance.record import record_path
from lockstep.provenance.sameness import LEVELS, compared, differences, reached
from lockstep.targets import Results, Target
from lockstep.verify import golden

TARGET = Target("demo-llama", "fp16", 2, "onnxruntime")
NAMES = ("demo-llama", "fp16", 2, "onnxruntime")


def make(references: Results, root: Path, options: dict | None = None, change_graphs=lambda folder: None) -> Results:
    """A recorded tree of the target, with its golden check."""
    results = recorded(references, root, options, change_graphs)
    golden.check_engines(
        results.assembly("demo-llama", "fp16"),
        results.weights("demo-llama", "fp16"),
        results.engines("demo-llama", "fp16", "onnxruntime"),
        references.reference("demo-llama", 2),
        TARGET,
        TOLERANCES["fp16"],
        LIMITS,
        results.golden(*NAMES),
        results.speed(*NAMES),
    )
    return results


@pytest.fixture(scope="module")
def first(references: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make(references, tmp_path_factory.mktemp("first") / "results")


def same(first: Results, second: Results) -> tuple[dict[str, bool], dict[str, list[str]]]:
    found = differences(compared(first, TARGET), compared(second, TARGET))
    return {level: not lines for level, lines in found.items()}, found


def test_two_builds_on_the_cpu_are_the_same_at_every_level(references: Results, first: Results, tmp_path: Path) -> None:
    levels, found = same(first, make(references, tmp_path / "results"))
    assert levels == dict.fromkeys(LEVELS, True), found
    assert reached(levels) == "R4"


@pytest.mark.long
def test_another_optimisation_level_is_another_input_and_other_bytes(
    references: Results, first: Results, tmp_path: Path
) -> None:
    levels, found = same(first, make(references, tmp_path / "results", {"optimization_level": "disabled"}))
    assert levels == {"R0": False, "R3": True, "R4": False}
    assert found["R0"] == ["engines / options / optimization_level: all -> disabled"]
    assert reached(levels) == "none"


class Unasked(OnnxRuntimeBackend):
    """Optimises in another way than it says."""

    def build(self, graph_path, out_path, options):
        return super().build(graph_path, out_path, {**options, "optimization_level": "disabled"})


def test_other_engines_of_the_same_inputs_are_seen(
    references: Results, first: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "BACKEND", Unasked)
    second = make(references, tmp_path / "results")
    levels, found = same(first, second)
    assert levels == {"R0": True, "R3": True, "R4": False} and reached(levels) == "R3"
    named = {line.split(":")[0] for line in found["R4"]}
    assert named and named <= set(read_json(second.engines("demo-llama", "fp16", "onnxruntime"))["engines"])


def test_another_graph_is_another_input_and_is_named(references: Results, first: Results, tmp_path: Path) -> None:
    def negate_the_last_logits(folder: Path) -> None:
        """An exit that says the opposite: other operators, other layers, other tokens."""
        path, assembly = folder / "exit.onnx", read_json(folder / "assembly.json")
        model = onnx.load(path)
        last = next(node for node in model.graph.node if "logits" in node.output)
        last.output[:] = ["before"]
        model.graph.node.append(onnx.helper.make_node("Neg", ["before"], ["logits"]))
        onnx.save(model, path)
        assembly["classes"]["exit"]["sha256"] = sha256_file(path)
        write_json(folder / "assembly.json", assembly)

    # The golden check fails, as it must; its line stands in the place of the tokens.
    with pytest.raises(Exception, match="expected token") as caught:
        make(references, tmp_path / "results", change_graphs=negate_the_last_logits)
    second = compared(Results(tmp_path / "results"), TARGET, str(caught.value))
    found = differences(compared(first, TARGET), second)
    assert all(found.values())
    assert any(line.startswith("build / inputs / assembly: ") for line in found["R0"])
    assert any("expected token" in line for line in found["R3"])
    assert [line.split(":")[0] for line in found["R4"]] == ["exit"]


def test_other_tokens_are_named_with_their_place(first: Results, tmp_path: Path) -> None:
    second = Results(shutil.copytree(first.root, tmp_path / "results"))
    report = read_json(second.golden(*NAMES))
    was, report["prompts"][1]["tokens"][3] = report["prompts"][1]["tokens"][3], 0
    write_json(second.golden(*NAMES), report)
    levels, found = same(first, second)
    assert levels == {"R0": True, "R3": False, "R4": True} and reached(levels) == "R0"
    assert found["R3"] == [f"Light / 003: {was} -> 0"]


def test_a_tree_that_does_not_say_how_it_was_made_is_refused(first: Results, tmp_path: Path) -> None:
    second = Results(shutil.copytree(first.root, tmp_path / "results"))
    record_path(second.engines("demo-llama", "fp16", "onnxruntime")).unlink()
    with pytest.raises(
        InputError,
        match="engines.json: expected the record of how it was made, found none of this file; run `lockstep run` first",
    ):
        compared(second, TARGET)


def test_lists_differ_at_a_place() -> None:
    values = {level: [1, 2] for level in LEVELS}
    assert differences(values, {**values, "R4": [1, 3, 4]})["R4"] == ["001: 2 -> 3", "002: new, 4"]
