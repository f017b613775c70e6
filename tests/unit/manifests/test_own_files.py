"""Every public function that writes leaves the other files of a folder alone, and refuses to replace one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import error_of
from demo_model import DEMO

import lockstep
from lockstep import Limits, Target, Tolerances
from lockstep.artifacts.files import sha256_file
from lockstep.manifests.own_files import clear_unnamed
from lockstep.targets import Results
from some import some

ADAPTERS = DEMO.parent / "demo-adapters"
LIMITS = Limits(4, 128, 256, 512)
TOLERANCES = Tolerances("fp32")
TARGET = Target("demo-llama", "fp32", 2, "onnxruntime")
GOLDEN = lockstep.GoldenTerms(1, ("Light",))


class Demo:
    """Paths of the demo's artefacts in fp32, as arguments."""

    def __init__(self, results: Results):
        self.checkpoint = results.checkpoint("demo-llama")
        self.assembly = results.assembly("demo-llama", "fp32")
        self.weights = results.weights("demo-llama", "fp32")
        self.engines = results.engines("demo-llama", "fp32", "onnxruntime")
        self.reference = results.reference("demo-llama", 2)


def _config() -> dict:
    return json.loads((DEMO / "config.json").read_text())


CALLS: dict[str, Callable[[Demo, Path], object]] = {
    "make_random_checkpoint": lambda demo, out: lockstep.make_random_checkpoint(DEMO / "config.json", 0, out),
    "resolve_checkpoint": lambda demo, out: lockstep.resolve_checkpoint(str(DEMO), DEMO, out / "checkpoint.json"),
    "resolve_architecture": lambda demo, out: lockstep.resolve_architecture(str(DEMO), DEMO, out / "architecture.json"),
    "convert_weights": lambda demo, out: lockstep.convert_weights(demo.checkpoint, "fp16", out / "weights.json"),
    "resolve_adapters": lambda demo, out: lockstep.resolve_adapters(
        {"captain": "x"}, {"captain": ADAPTERS / "captain"}, demo.checkpoint, 64, None, out / "adapters.json"
    ),
    "export_graphs": lambda demo, out: lockstep.export_graphs(demo.checkpoint, "fp32", out / "assembly.json"),
    "export_config": lambda demo, out: lockstep.export_config(_config(), "fp32", out),
    "validate_graphs": lambda demo, out: lockstep.validate_graphs(
        demo.assembly, demo.weights, demo.checkpoint, 2, TOLERANCES, 128, out / "validation.json"
    ),
    "build_engines": lambda demo, out: lockstep.build_engines(demo.assembly, "onnxruntime", out / "engines.json"),
    "compare_engines": lambda demo, out: lockstep.compare_engines(
        demo.assembly, demo.weights, demo.engines, TOLERANCES, LIMITS, out / "comparison.json"
    ),
    "make_reference": lambda demo, out: lockstep.make_reference(demo.checkpoint, 2, GOLDEN, out / "reference.json"),
    "check_golden": lambda demo, out: lockstep.check_golden(
        *(demo.assembly, demo.weights, demo.engines, demo.reference, TARGET, TOLERANCES, LIMITS),
        *(out / "golden.json", out / "golden.speed.json"),
    ),
}
NO_FILES = {  # public, and write nothing, or are classes
    "Advance", "Assembly", "CheckError", "CheckpointFiles", "Engine", "EngineSet", "GoldenTerms", "InputError",
    "Limits", "Model", "ModelDrafter", "ModelOptions", "NgramDrafter", "Speculation", "Request", "Results", "Sampling",
    "Target", "Tokenizer", "Tolerances", "Weights", "describe_cpu", "generate", "load_config", "open_model",
    "open_tokenizer", "verify_results",
}  # fmt: skip
# A random checkpoint is not replaced: the folder might hold a real one.
OTHERS = ("notes.txt", "other.onnx", "middle_9.onnx", "older.engine", "data.json", "other.safetensors", ".other.tmp")


def state(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def test_every_public_function_is_here() -> None:
    assert set(CALLS) | NO_FILES == set(lockstep.__all__)


@pytest.mark.parametrize("name", some(CALLS, "resolve_checkpoint", "export_graphs", "build_engines"))
def test_other_files_of_the_folder_stay(references: Results, tmp_path: Path, name: str) -> None:
    """Also when its output is replaced."""
    demo = Demo(references)
    folder = tmp_path / "shared"
    folder.mkdir()
    for other in OTHERS:
        (folder / other).write_text("someone else's")
    (folder / ".killed.tmp").mkdir()
    other_files = state(folder)
    CALLS[name](demo, folder)
    written = state(folder)
    assert (
        len(written) > len(other_files) and other_files.items() <= written.items() and (folder / ".killed.tmp").is_dir()
    )
    if name in ("convert_weights", "export_graphs", "build_engines"):
        CALLS[name](demo, folder)
        assert state(folder).keys() == written.keys() and other_files.items() <= state(folder).items()


@pytest.mark.parametrize(("name", "file"), [
    ("make_random_checkpoint", "model.safetensors"), ("make_random_checkpoint", "model-00007-of-00009.safetensors"),
    ("make_random_checkpoint", "config.json"), ("convert_weights", "weights.safetensors"),
    ("export_graphs", "embedding.onnx"), ("export_graphs", "tokenizer.json"), ("export_config", "exit.onnx"),
    ("build_engines", "middle.onnx"), ("make_reference", "reference.safetensors"),
])  # fmt: skip
def test_a_file_of_someone_else_is_not_replaced(references: Results, tmp_path: Path, name: str, file: str) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / file).write_text("someone else's")
    before = state(folder)
    line = error_of(CALLS[name], Demo(references), folder)
    assert line.startswith(f"{folder / file}: expected") and "folder" in line and "delete" in line
    assert state(folder) == before


def test_an_input_in_the_same_folder_stays(references: Results, tmp_path: Path) -> None:
    """Graphs next to the manifest that they are exported from; engines not over their graphs."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO, folder)
    checkpoint = lockstep.resolve_checkpoint("checkpoint", folder, tmp_path / "one" / "checkpoint.json")
    inputs = state(tmp_path / "one")
    assembly = lockstep.export_graphs(checkpoint, "fp32", tmp_path / "one" / "assembly.json")
    graphs = state(tmp_path / "one")
    assert inputs.items() <= graphs.items()
    assert "middle.onnx" not in inputs and "expected to write a file here" in error_of(
        lockstep.build_engines, assembly, "onnxruntime", tmp_path / "one" / "engines.json"
    )
    assert state(tmp_path / "one") == graphs


def test_a_checkpoint_is_not_replaced_by_its_conversion(tmp_path: Path) -> None:
    """Whatever its file is called, and whether or not an earlier weights.json points to it."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO, folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    header = json.loads((DEMO / "model.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    names = {name: "weights.safetensors" for name in header if name != "__metadata__"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    checkpoint = lockstep.resolve_checkpoint("checkpoint", folder, folder / "checkpoint.json")
    before = state(folder)
    for precision in ("fp32", "fp16", "bf16"):
        line = error_of(lockstep.convert_weights, checkpoint, precision, folder / "weights.json")
        assert "found the checkpoint's own" in line
    assert state(folder) == before


def test_a_stage_clears_its_folder_of_what_killed_ones_left(tmp_path: Path) -> None:
    """Snakemake deletes a manifest before its job: then nothing names its files."""
    for name in ("graph.onnx", ".graph.onnx.7.tmp", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".graph.onnx.abc.tmp").mkdir()
    clear_unnamed(tmp_path / "assembly.json", lambda path: path.suffix == ".onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
