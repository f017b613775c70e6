"""`python -m benchmarks ranks`: from shapes to the table of aims, on fake devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import ranks
from benchmarks.__main__ import bench
from click.testing import CliRunner
from test_bench import TRANSFORMERS

import fake_gpu
from lockstep.artifacts.files import read_json
from lockstep.provenance import code_identity

TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
FAKE_GPUS = """#!/bin/sh
exec {python} -c '
import sys
sys.path[:0] = {paths}
import fake_gpu
from lockstep.stages import worker
from benchmarks import batches, gpu
gpu.CONTEXT, gpu.PREFILL, gpu.WARM, gpu.STEPS = 20, 40, 2, 4
batches.SUMS = (1, 16)
with fake_gpu.installed("10.9.0") as device:
    device.devices = 2
    worker.main()
    assert not device.faults'
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A Python with two fake devices, and a shape; transformers runs on the CPU."""
    root = Path(__file__).parents[2]
    paths = [str(Path(fake_gpu.__file__).parents[1]), str(root), str(code_identity.SOURCES.parent)]
    python, transformers, shape = (tmp_path / name for name in ("python", "transformers", "tiny.json"))
    for script, text in ((python, FAKE_GPUS), (transformers, TRANSFORMERS)):
        script.write_text(text.format(python=sys.executable, paths=json.dumps(paths)))
        script.chmod(0o755)
    shape.write_text(json.dumps(TINY))
    monkeypatch.setattr(sys, "executable", str(transformers))
    return python, shape


def run(python: Path, shape: Path, work: Path, docs: Path, *ranks: int) -> Any:
    asked = [option for count in ranks for option in ("--ranks", str(count))]
    command = ["ranks", "--backend", "tensorrt", "--shape", shape, "--python", python, "--work", work]
    command += ["--write", docs, "--rounds", 1, *asked]
    return CliRunner().invoke(bench, list(map(str, command)))


@pytest.mark.exports
@pytest.mark.long
def test_one_command_measures_every_number_of_ranks_that_the_gpus_allow(scripts: tuple[Path, Path], tmp_path: Path):
    """What one call has measured the next leaves as it is; four ranks on two GPUs are left out."""
    python, shape = scripts
    ended = run(python, shape, tmp_path / "work", tmp_path, 1)
    assert ended.exit_code == 0, ended.output
    first = (tmp_path / "work/tiny/1-tensorrt.json").stat().st_mtime_ns
    ended = run(python, shape, tmp_path / "work", tmp_path, 1, 2, 4)
    assert ended.exit_code == 0 and ended.stdout == f"{tmp_path}/gpu/ranks-tensorrt.json\n", ended.output
    assert (tmp_path / "work/tiny/1-tensorrt.json").stat().st_mtime_ns == first
    record = read_json(tmp_path / "gpu/ranks-tensorrt.json")
    cases = record["cases"]["tiny"]
    assert set(cases) == {"1", "2"} and not record["ranks_on_one_gpu"]
    for case in cases.values():
        assert case["build_seconds"] > 0 and case["ready_seconds"] > 0 and set(case["decode"]) == {"1", "16"}
        assert {name: row["passes"] for name, row in case["check"].items()} == {"all": True}
    assert set(cases["2"]["sums"]) == {"1", "16"} and "sums" not in cases["1"]
    found = {(row["shape"], row["ranks"], row["figure"]): row for row in record["aims"]}
    assert found["tiny", 2, "decode 1: times one GPU"]["found"] > 0
    assert found["tiny", 1, "logits all layers: times fp16 of transformers"]["met"] is None, "no aim of this shape"
    assert found["llama-3-70b", 4, "prompt: ms"]["found"] is None
    page = (tmp_path / "gpu/ranks-tensorrt.md").read_text()
    assert "| llama-3-70b | 4 | prompt: ms | not run | at most 135 | 141.6 |  |" in page
    assert "A sum over 2 ranks of tiny:" in page


@pytest.mark.long
def test_too_few_gpus_are_one_line_before_anything_is_made(scripts: tuple[Path, Path], tmp_path: Path) -> None:
    ended = run(*scripts, tmp_path / "work", tmp_path, 4, 8)
    assert ended.exit_code == 2 and ended.stderr == (
        "lockstep: error: ranks: expected 4 GPUs or more, for the fewest ranks that are asked for, found 2; make more "
        "visible (CUDA_VISIBLE_DEVICES), or ask for fewer with --ranks\n"
    )
    assert not (tmp_path / "work").exists()


def case(scale: float) -> dict[str, Any]:
    """Measured on a GPU `scale` times as fast as just enough for the 70B shape."""
    rate = lambda value: {"tokens_per_second": scale * value}
    return {
        "device": {"name": "GPU"},
        "backend": "tensorrt",
        "versions": {"tensorrt": "10.9.0"},
        "build_seconds": 60 / scale,
        "ready_seconds": 60 / scale,
        "decode": {"1": rate(92), "16": rate(1300)},
        "prompt": {"milliseconds": {"median": 135 / scale}},
        "check": {
            layers: {"max_logit_error": 0.2 / scale, "max_logit_error_of_transformers_fp16": 0.1}
            for layers in ("2", "16")
        },
    }


@pytest.mark.parametrize(("scale", "met"), [(1, True), (1.01, True), (0.99, False)])
def test_each_aim_is_judged_by_its_own_figure(scale: float, met: bool) -> None:
    shape = "llama-3-70b"
    rows = [row for row in ranks.record_of({shape: {"4": case(scale)}}, False)["aims"] if row["shape"] == shape]
    aims = [row for row in rows if row["at_least"] or row["at_most"]]
    assert len(aims) == 7 and {row["met"] for row in aims} == {met}
    on_one = ranks.record_of({shape: {"4": case(scale)}}, True)
    assert {row["met"] for row in on_one["aims"]} == {None} and "say nothing" in ranks.page(on_one)
