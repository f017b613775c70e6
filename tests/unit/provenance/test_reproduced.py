"""A target compared with a rebuild: equal, or each planted difference is named with its cause."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo_model import CONFIG, LIMITS, TOLERANCES
from recorded import recorded

from lockstep.artifacts.files import read_json
from lockstep.artifacts.summary import Reproduction
from lockstep.backends.onnxruntime import backend
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.provenance import reproduce
from lockstep.provenance import run as stage
from lockstep.stages import STAGES
from lockstep.targets import Results, Target
from lockstep.verify.golden.check import check_engines

TARGET = Target("demo-llama", "fp16", 2, "onnxruntime")
NAMES = ("demo-llama", "fp16", 2, "onnxruntime")
BUILT = ["checkpoint", "engines/fp16/onnxruntime", "golden/fp16/onnxruntime/2", "graphs/fp16", "weights/fp16"]


def make(references: Results, root: Path, options: dict | None = None) -> Results:
    """A recorded tree of the target, with its golden check."""
    results = recorded(references, root, options)
    reference = references.reference("demo-llama", 2)
    copy = results.reference("demo-llama", 2)

    def take() -> None:
        copy.parent.mkdir()
        for suffix in (".json", ".safetensors"):
            shutil.copyfile(reference.with_suffix(suffix), copy.with_suffix(suffix))

    def check() -> None:
        files = [job.inputs[name] for name in ("assembly", "weights", "engines", "reference")]
        outputs = results.golden(*NAMES), results.speed(*NAMES)
        check_engines(*files, TARGET, TOLERANCES["fp16"], LIMITS, *outputs)

    for name, work in (("reference", take), ("golden", check)):
        job = STAGES[name].job(CONFIG, results.root, vars(TARGET))
        stage.run(job, work)
    return results


@pytest.fixture(scope="module")
def first(references: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make(references, tmp_path_factory.mktemp("first") / "results")


@pytest.fixture
def again(first: Results, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reproduction]:
    """Reproduce `first`, where each round gives the next of some trees, and the line of a golden check that failed."""

    def give(*trees: Results, failure: str | None = None) -> Reproduction:
        remaining = list(trees)

        def run_workflow(config: Any, checkpoint: Path, target: Target, folder: Path, *arguments: Any) -> str | None:
            assert (folder / "results/demo-llama/reference/2.json").is_symlink(), "the reference is taken as it is"
            shutil.copytree(
                remaining.pop(0).root, folder / "results", dirs_exist_ok=True, ignore=lambda *_: ["reference"]
            )
            return failure

        monkeypatch.setattr(reproduce, "run_workflow", run_workflow)
        return reproduce.reproduce(CONFIG.dump(), first, TARGET, len(trees))

    return give


def differences(record: Reproduction) -> dict[str, str]:
    return {place: line for place, line in record.artefacts.items() if line}


def test_two_builds_on_the_cpu_are_the_same(references: Results, first: Results, again, tmp_path: Path) -> None:
    record = again(first, make(references, tmp_path / "results"))
    assert record.same_rounds == 2 and not differences(record)
    for name in BUILT:
        assert any(place.startswith(name) for place in record.artefacts), name
    assert Reproduction.load(first.reproduction(*NAMES)) == record


class Unasked(OnnxRuntimeBackend):
    """Optimises in another way than it says."""

    def build(self, graph_path, out_path, options):
        return super().build(graph_path, out_path, {**options, "optimization_level": "disabled"})


def test_other_engines_are_named_and_the_tokens_are_the_same(
    references: Results, first: Results, again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "BACKEND", Unasked)
    record = again(first, make(references, tmp_path / "results"))
    assert record.same_rounds == 1 and record.in_words == "1 of 2"
    ((place, line),) = differences(record).items()
    assert place.startswith("engines/fp16/onnxruntime/") and line.startswith("build: ")
    assert " differs: " in line and "made with" not in line, "of the same inputs"


@pytest.mark.long
def test_what_made_other_engines_is_named(references: Results, again, tmp_path: Path) -> None:
    record = again(make(references, tmp_path / "results", {"optimization_level": "disabled"}))
    ((_, line),) = differences(record).items()
    assert line.startswith("build: ") and record.same_rounds == 0


def test_other_tokens_and_a_golden_check_that_fails_are_named(first: Results, again, tmp_path: Path) -> None:
    second = Results(shutil.copytree(first.root, tmp_path / "results", symlinks=True))
    report = read_json(second.golden(*NAMES))
    record = again(second, failure="prompt 'Light': expected token 1, found 2")
    assert differences(record) == {"golden check": "prompt 'Light': expected token 1, found 2"}
    assert report["prompts"], "the report has the tokens of that run"
