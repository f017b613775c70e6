"""Levels of sameness: the demo's engines built twice, and for each level a planted difference that only a look at that
level finds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import onnx
import pytest
from demo_model import LIMITS, TOLERANCES
from recorded import recorded

from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.artifacts.summary import ReproducedLevel, Reproduction
from lockstep.backends import CanonicalBytes, EngineSet
from lockstep.backends.onnxruntime import backend
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.errors import InputError
from lockstep.provenance.record import record_path
from lockstep.provenance.reproduce import print_table
from lockstep.provenance.sameness import LEVELS, Facts, compare, facts, reached
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


def look(results: Results, failure: str | None = None) -> Facts:
    engines, assembly = results.engines("demo-llama", "fp16", "onnxruntime"), results.assembly("demo-llama", "fp16")
    return facts(results, TARGET, EngineSet.open(engines, assembly).inspected(), failure)


def same(first: Results, second: Results) -> tuple[dict[str, bool], dict[str, list[str]]]:
    found = compare(look(first), look(second))
    return {level: not lines for level, lines in found.items()}, found


def use(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    monkeypatch.setattr(backend, "BACKEND", kind)


def test_two_builds_on_the_cpu_are_the_same_at_every_level(references: Results, first: Results, tmp_path: Path) -> None:
    levels, found = same(first, make(references, tmp_path / "results"))
    assert levels == dict.fromkeys(LEVELS, True), found
    assert reached(levels) == "R4"


def test_another_optimisation_level_is_another_input_and_other_choices(
    references: Results, first: Results, tmp_path: Path
) -> None:
    levels, found = same(first, make(references, tmp_path / "results", {"optimization_level": "disabled"}))
    assert levels == {"R0": False, "R1": False, "R2": False, "R3": True, "R4": False}
    assert found["R0"] == ["engines / options / optimization_level: all -> disabled"]
    assert any(" / operators / Cast: " in line for line in found["R1"]), found["R1"]
    assert reached(levels) == "none"


class Unasked(OnnxRuntimeBackend):
    """Optimises in another way than it says."""

    def build(self, graph_path, out_path, options):
        return super().build(graph_path, out_path, {**options, "optimization_level": "disabled"})


def test_other_choices_from_the_same_inputs_are_seen(
    references: Results, first: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Unasked)
    levels, found = same(first, make(references, tmp_path / "results"))
    assert levels == {"R0": True, "R1": False, "R2": False, "R3": True, "R4": False}
    assert reached(levels) == "R0"


class Renaming(OnnxRuntimeBackend):
    """The same operators, and values of other names in between."""

    def build(self, graph_path, out_path, options):
        built = super().build(graph_path, out_path, options)
        model = onnx.load(out_path)
        name = model.graph.node[0].output[0]
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [
                    "renamed" if found == name and name not in {value.name for value in model.graph.output} else found
                    for found in names
                ]
        onnx.save(model, out_path)
        return built


def test_other_layers_of_the_same_operators_are_seen(
    references: Results, first: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Renaming)
    levels, found = same(first, make(references, tmp_path / "results"))
    assert levels == {"R0": True, "R1": True, "R2": False, "R3": True, "R4": False}
    assert any("-> renamed" in line for line in found["R2"])
    assert reached(levels) == "R1"


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
    found = compare(look(first), look(Results(tmp_path / "results"), str(caught.value)))
    assert all(found.values())
    assert any(line.startswith("build / inputs / assembly: ") for line in found["R0"])
    assert "exit / operators / Neg: new, 1" in found["R1"]
    assert any("expected token" in line for line in found["R3"])
    assert [line.split(":")[0] for line in found["R4"]] == ["exit"]


def test_other_tokens_are_named_with_their_place(first: Results, tmp_path: Path) -> None:
    second = Results(shutil.copytree(first.root, tmp_path / "results"))
    report = read_json(second.golden(*NAMES))
    was, report["prompts"][1]["tokens"][3] = report["prompts"][1]["tokens"][3], 0
    write_json(second.golden(*NAMES), report)
    levels, found = same(first, second)
    assert levels == {"R0": True, "R1": True, "R2": True, "R3": False, "R4": True} and reached(levels) == "R2"
    assert found["R3"] == [f"Light / 003: {was} -> 0"]


class RandomByte(OnnxRuntimeBackend):
    """Writes bytes into each engine that are never the same: as a library does that names things by pointers."""

    def build(self, graph_path, out_path, options):
        built = super().build(graph_path, out_path, options)
        model = onnx.load(out_path)
        model.producer_name = os.urandom(8).hex()
        onnx.save(model, out_path)
        return built


class Honest(RandomByte):
    """Says which bytes these are."""

    def canonical_bytes(self, engine_path):
        model = onnx.load(engine_path)
        model.ClearField("producer_name")
        return CanonicalBytes(model.SerializeToString(deterministic=True), ("producer_name: 16 random digits",))


def test_a_random_byte_is_seen_where_the_backend_does_not_name_it(
    references: Results, first: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, RandomByte)
    second = make(references, tmp_path / "results")
    levels, found = same(first, second)
    assert levels == {"R0": True, "R1": True, "R2": True, "R3": True, "R4": False} and reached(levels) == "R3"
    assert {line.split(":")[0] for line in found["R4"]} == set(
        read_json(second.engines("demo-llama", "fp16", "onnxruntime"))["engines"]
    )
    use(monkeypatch, Honest)
    levels, found = same(first, second)
    assert levels == dict.fromkeys(LEVELS, True), "compared without these bytes"
    assert look(second).removed["middle"] == ("producer_name: 16 random digits",)


def test_a_tree_that_does_not_say_how_it_was_made_is_refused(first: Results, tmp_path: Path) -> None:
    second = Results(shutil.copytree(first.root, tmp_path / "results"))
    record_path(second.engines("demo-llama", "fp16", "onnxruntime")).unlink()
    with pytest.raises(
        InputError,
        match="engines.json: expected the record of how it was made, found none of this file; run snakemake first",
    ):
        look(second)


def test_lists_differ_at_a_place_and_removed_bytes_stand_below_the_table(capsys: pytest.CaptureFixture) -> None:
    values = {level: [1, 2] for level in LEVELS}
    assert compare(Facts(values, {}), Facts({**values, "R2": [1, 3, 4]}, {}))["R2"] == ["001: 2 -> 3", "002: new, 4"]
    record = Reproduction(
        target=Target("m", "fp16", 2, "onnxruntime"),
        engine_digest="ab" * 32,
        backend_version="1.0",
        device={},
        rounds=3,
        level="R4",
        levels={"R4": ReproducedLevel("bytes", "cd" * 32, same_rounds=3, differences=(), more_differences=0)},
        bytes_left_out={"middle": ("bytes 8 to 15: a name made from a pointer",)},
    )
    print_table(record)
    assert "left out of middle: bytes 8 to 15: a name made from a pointer" in capsys.readouterr().out
