"""A full disk in every stage, a results folder that cannot be written: one clear line, and nothing lost."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkout import Checkout

from some import some

MODEL = "demo-llama"
# Stage: a target that names one of its results, and the manifest of that.
STAGES = {
    "resolve": (f"{MODEL}/fp32/2", f"{MODEL}/checkpoint.json"),
    "convert": (f"{MODEL}/fp32/2", f"{MODEL}/fp32/weights.json"),
    "build": (f"{MODEL}/fp32/2", f"{MODEL}/fp32/engines/onnxruntime/engines.json"),
    "golden": (f"{MODEL}/fp32/2", f"{MODEL}/fp32/golden/onnxruntime/2.json"),
    "export": (f"{MODEL}/fp32/2", f"{MODEL}/fp32/graphs/assembly.json"),
    "validate": (f"{MODEL}/fp32/2", f"{MODEL}/fp32/validate/2.json"),
    "reference": (f"{MODEL}/fp32/2", f"{MODEL}/reference/2.json"),
}


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("stage", some(STAGES, "build"))
def test_a_full_disk_is_one_line_and_running_again_is_all_it_takes(demo: Checkout, stage: str) -> None:
    target, manifest = STAGES[stage]
    job = ("stage_job", stage, target, "config/config.yaml", "results")
    before = shutil.copytree(demo.results, demo.folder / "before")
    with mounted(demo.results, "-t", "tmpfs", "-o", "size=64m", "tmpfs"):
        shutil.copytree(before, demo.results, dirs_exist_ok=True)
        if stage == "build":  # whole engines are kept: there would be nothing to write
            shutil.rmtree((demo.results / manifest).parent)
        for suffix in (".json", ".safetensors"):  # what no manifest names is no stage's to overwrite
            (demo.results / manifest).with_suffix(suffix).unlink(missing_ok=True)
        filler = demo.results / "filler"
        with open(filler, "wb", buffering=0) as file:
            file.write(b"x" * (shutil.disk_usage(demo.results).free + 1))
        assert shutil.disk_usage(demo.results).free == 0
        process = demo.run(*job, check=False)
        assert process.returncode == 2 and len(process.stderr.splitlines()) == 1, process.stderr
        assert "No space left on device" in process.stderr or "bytes free" in process.stderr
        assert not (demo.results / manifest).exists()
        assert not [path for path in demo.results.rglob("*") if path.name.endswith(".tmp")]
        filler.unlink()
        demo.run(*job)
        assert demo.call("lockstep", "verify").returncode == 0


def test_a_working_folder_that_cannot_be_written_is_one_line(fresh: Checkout, tmp_path: Path) -> None:
    folder = tmp_path / "read_only"
    folder.mkdir()
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        process = fresh.call("snakemake", "-n", "--directory", str(folder), check=False)
    output = [line for line in process.stderr.splitlines() if not line.startswith("Using workflow specific profile")]
    assert process.returncode == 2 and len(output) == 1, process.stderr
    assert output[0].startswith(f"lockstep: error: {folder}: expected a folder that can be written to")


@pytest.mark.long
def test_a_results_folder_that_cannot_be_written_is_one_line(demo: Checkout) -> None:
    before = demo.digests()
    with mounted(demo.results, "--bind", str(demo.results)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(demo.results)], check=True)
        process = demo.job("build", f"{MODEL}/fp32", check=False)
        assert process.returncode == 2 and len(process.stderr.splitlines()) == 1
        assert "Read-only file system" in process.stderr
        assert demo.call("lockstep", "verify").returncode == 0
        assert demo.call("lockstep", "explain", f"{MODEL}/fp32/all").returncode == 0
        demo.append(f"resources/{MODEL}/tokenizer.json", "\n")
        process = demo.snakemake("--cores", "1", check=False)
        assert process.returncode and "Write-protected output files" in process.stderr
        assert "Traceback" not in process.stderr
    assert demo.digests() == before
