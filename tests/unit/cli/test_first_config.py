"""`lockstep init`: a config that works unchanged, of each kind of source; `lockstep doctor`: the facts for choosing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from click.testing import CliRunner

import lockstep_gpu.compute_capability as gpu
from lockstep.cli import doctor as doctor_command
from lockstep.cli.job_times import seconds_by_stage
from lockstep.cli.main import main
from lockstep.config import first
from lockstep.config.backends import backends
from lockstep.config.load import load
from lockstep.config.packing import Packing
from lockstep.stages.rules import collected_targets

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "resources" / "demo-llama"


def run(*arguments: object) -> tuple[int, str]:
    ended = CliRunner().invoke(main, list(map(str, arguments)), prog_name="lockstep")
    return ended.exit_code, ended.output


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("source", "name", "length"),
    [(str(DEMO), "demo-llama", 512), (f"random:{ROOT}/resources/shapes/phi3/config.json?seed=3", "phi3", 512)],
)
def test_a_first_config_asks_for_what_the_model_has(source: str, name: str, length: int) -> None:
    code, output = run("init", source)
    assert code == 0 and f"lockstep run {name}.yaml" in output
    assert re.match(rf"{name}: about [\d.]+ M parameters, [\d.]+ GB of memory, .* min on \d+ cores", output)
    config = load(Path(f"{name}.yaml"))
    assert config.models[name].source == source and config.models[name].golden.prompts
    assert config.limits.model_dump() == {
        "max_batch_size": 16,
        "max_input_len": length,
        "max_seq_len": length,
        "max_num_tokens": min(1024, length),
    }
    config.check_sources()
    config.check_backends()
    assert len(Path(f"{name}.yaml").read_text().splitlines()) <= 12


def test_names_and_paths_that_yaml_reads_as_something_else_are_text(folder: Path) -> None:
    shutil.copytree(DEMO, folder / "a: b" / "1.50")
    assert run("init", "a: b/1.50")[0] == 0
    assert load(Path("1.50.yaml")).models["1.50"].source == "a: b/1.50"


@pytest.mark.parametrize(("source", "name"), [
    ("hf:org/SmolLM2-135M@main", "SmolLM2-135M"), ("models/a b+c.Q4_1.gguf", "a-b-c.Q4_1"),
    ("random:shapes/x/config.json?seed=1", "x"), ("models/tiny/", "tiny"),
    ("/c/models--org--Name-1B/snapshots/0123abcd", "Name-1B"),
])  # fmt: skip
def test_a_model_is_named_by_its_source(source: str, name: str) -> None:
    assert first.name_of(source) == name


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("nowhere", ("expected a checkpoint folder", "nowhere")),
        ("org/name", ("write hf:org/name",)),
        ("hf:", ("hf:org/name", "'hf:'")),
        ("nowhere.gguf", ("expected a GGUF file", "nowhere.gguf")),
    ],
)
def test_a_source_that_is_none_is_one_line_and_leaves_nothing(
    folder: Path, source: str, parts: tuple[str, ...]
) -> None:
    code, output = run("init", source)
    assert code == 2 and len(output.splitlines()) == 1 and all(part in output for part in parts)
    assert not list(folder.iterdir())


def test_a_checkpoint_without_all_of_its_weights_is_refused_at_once(folder: Path) -> None:
    """After `git clone` without LFS, and a download that broke off."""
    source = folder / "model"
    source.mkdir()
    shutil.copy(DEMO / "config.json", source)
    weights = source / "model.safetensors"
    for data, words in (
        (None, "found no weights; download the whole checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "found a Git LFS pointer"),
        ((DEMO / weights.name).read_bytes()[:100_000], "found 100000 bytes; the file is damaged or incomplete"),
    ):
        if data is not None:
            weights.write_bytes(data)
        code, output = run("init", "model")
        assert code == 2 and words in output and len(output.splitlines()) == 1
        assert list(folder.iterdir()) == [source]


def test_a_config_that_is_there_is_kept(folder: Path) -> None:
    (folder / "demo-llama.yaml").write_text("mine")
    code, output = run("init", DEMO)
    assert code == 2 and "demo-llama.yaml: expected no such file yet" in output
    assert (folder / "demo-llama.yaml").read_text() == "mine"
    assert run("init", DEMO, "--out", "other.yaml")[0] == 0 and yaml.safe_load(Path("other.yaml").read_text())["models"]


def test_the_precision_follows_size_memory_and_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Packing("awq", 4, 128, True)
    sizes = ((10**8, None), (10**10, None), (3 * 10**10, None), (10**8, packed))
    memory = 32 * 10**9
    chosen = [first.choose(size, packing, memory) for size, packing in sizes]
    assert [choice.precision for choice in chosen] == ["fp32", "w8a16", "w4a16", "w4a16"]
    assert all(choice.precision in backends()[choice.backend].precisions for choice in chosen)
    on_gpu = {"cuda": replace(backends()["cuda"], cannot_run=lambda: None, device_memory=lambda: memory)}
    monkeypatch.setattr(first, "backends", lambda: {**backends(), **on_gpu})
    chosen = [first.choose(size, packing, 0) for size, packing in sizes]
    assert [choice.precision for choice in chosen] == ["fp16", "fp16", "w4a16", "w4a16"]


def test_doctor_says_of_each_backend_what_it_can_do_and_what_is_missing() -> None:
    code, text = run("doctor")
    facts = json.loads(run("doctor", "--json")[1])
    assert code == 0 and set(facts["backends"]) == set(backends())
    for name, fact in facts["backends"].items():
        builds, runs = ("no" if fact[key] else "yes" for key in ("not_built", "not_run"))
        assert re.search(rf"^{name} +{builds} +{runs} +{', '.join(fact['precisions'])}$", text, re.MULTILINE)
        if reason := fact["not_built"] or fact["not_run"]:
            assert f"{name}: {reason}" in text
    assert facts["backends"]["onnxruntime"]["not_run"] is None
    assert facts["memory_bytes"] > 0 and facts["disk_bytes"] > 0 and facts["versions"]["onnxruntime"]


def test_doctor_and_a_run_say_where_tensorrt_is_that_it_needs_a_gpu_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its version, of the package for one version of CUDA."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "10.6.0" if "cu12-b" in name else version(name))
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    for capability, reason in ((None, "needs an NVIDIA GPU, found none"), ("9.0", None)):
        monkeypatch.setattr(gpu, "ask_driver", lambda capability=capability: capability)
        facts = json.loads(run("doctor", "--json")[1])
        assert facts["backends"]["tensorrt"]["not_built"] == facts["backends"]["tensorrt"]["not_run"] == reason
        assert facts["versions"]["tensorrt"] == "10.6.0"
        config = load(ROOT / "config" / "gpu-tensorrt-smollm2.yaml")
        assert config.not_built() == config.not_run() == ({"tensorrt": reason} if reason else {})
        targets = collected_targets(config)
        assert len(targets["all"]) == 4 and bool(targets["built"]) == bool(targets["run"]) == (reason is None)


def test_doctor_takes_a_module_without_a_file_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`importlib.util.find_spec` raises for a module that is imported and has no spec."""
    monkeypatch.setitem(sys.modules, "prometheus_client", ModuleType("prometheus_client"))
    extras = json.loads(run("doctor", "--json")[1])["missing_extras"]
    assert "prometheus_client" not in extras.get("serve", [])


def test_doctor_says_what_a_model_takes() -> None:
    run("init", DEMO)
    sizes = json.loads(run("doctor", "demo-llama.yaml", "--json")[1])["models"]["demo-llama"]
    fp16_nbytes = (DEMO / "model.safetensors").stat().st_size
    assert fp16_nbytes - 10_000 < 2 * sizes["parameters"] < fp16_nbytes, "all but the file's header"
    assert {"export", "validate", "golden", "served"} < {*sizes["seconds"]}
    run("init", f"random:{DEMO / 'config.json'}?seed=0", "--out", "random.yaml")
    (copied,) = json.loads(run("doctor", "random.yaml", "--json")[1])["models"].values()
    assert (sizes["disk_bytes"], copied["disk_bytes"]) == (4 * sizes["parameters"], 6 * copied["parameters"])
    text = run("doctor", "demo-llama.yaml")[1]
    assert "about 2 M parameters, 0.7 GB of memory, 7 MB of disk" in text
    assert re.search(r", \d+ min on \d+ cores \(\w+ \d+%, \w+ \d+%", text)


def test_the_times_of_a_run_are_about_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's 16 targets on two cores: 29 minutes (README)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    config = load(ROOT / "config" / "smollm2.yaml")
    assert 15 < sum(seconds_by_stage(config, "smollm2", 134_500_000, 30).values()) / 60 < 60


def test_doctor_names_the_memory_that_the_largest_job_was_measured_to_take() -> None:
    """And the rules ask a cluster for a third more, at least."""
    record = (ROOT / "records" / "clusters.md").read_text()
    (peak,) = map(float, re.findall(r"0\.567 GB, .*\n.* (\d+) MB in fp32", record))
    shown = (doctor_command.JOB_NBYTES + doctor_command.JOB_PER_BYTE * 0.567e9) / 1e6
    assert abs(shown / peak - 1) < 0.02
    rules = "".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    formulas = re.findall(r"mem_mb=memory\((\d+), ([\d.]+)\)", rules)
    assert max(float(base) + float(factor) * 567 for base, factor in formulas) > 1.33 * peak


def test_commands_without_a_config_speak_of_the_only_one_here_else_of_the_last_run(folder: Path) -> None:
    run("init", DEMO, "--out", "my.yaml")
    (folder / "results").mkdir()
    (folder / "results" / "config.json").write_text(json.dumps(load(Path("my.yaml")).dump()))
    for where in ("my.yaml", "results/config.json"):
        assert run("targets") == (0, "demo-llama/fp32/all/onnxruntime\n")
        code, output = run("explain", "demo-llama/fp16")
        assert code == 2 and f"in {where}; --config names another" in output
        (folder / "other.yml").write_text("models: {}\n")
