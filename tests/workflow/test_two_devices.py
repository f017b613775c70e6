"""Two kinds of GPU in one config: each node makes its own, one lock holds both, and the wrong node is refused."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import Checkout

from lockstep.artifacts.statement import Statement, statement_path

pytestmark = pytest.mark.long  # each device takes two runs

BACKEND = Path(__file__).resolve().parents[1] / "data" / "dummy_backend"
GPUS = {"alpha": "Alpha 100 80GB", "beta": "Beta 4"}


def with_devices(config: dict[str, Any]) -> None:
    config["models"]["demo-llama"] |= {"backends": ["alpha", "beta"], "precisions": ["fp32"], "layers": [2]}
    for prompt in config["models"]["demo-llama"]["golden"]["prompts"]:
        prompt["expected"].pop("all")
    config["devices"] = {name: {"backend": "dummy", "gpu": gpu, "gpu_model": name} for name, gpu in GPUS.items()}


def add_backend(checkout: Checkout) -> None:
    """The dummy backend, on a GPU that the variable DUMMY_GPU names."""
    folder = checkout.folder / "src/lockstep/backends/dummy"
    shutil.copytree(BACKEND, folder)
    for name, old, new in (
        ("settings.py", "section=DummyConfig", "section=DummyConfig, gpus=1"),
        ("backend.py", '{"type": "numpy"}', '{"type": "gpu", "name": __import__("os").environ["DUMMY_GPU"]}'),
    ):
        text = (folder / name).read_text()
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new))


def node(checkout: Checkout, name: str) -> Checkout:
    """The same folder, as a node with that GPU sees it."""
    return Checkout(checkout.folder, {**checkout.variables, "DUMMY_GPU": GPUS[name]})


def engines(checkout: Checkout, name: str) -> Path:
    return checkout.results / "demo-llama/fp32/engines" / name / "engines.json"


def looks_like_a_dummy(checkout: Checkout, name: str) -> None:
    """What the stages know of a backend that is one folder more (test_new_backend.py)."""
    manifest = json.loads(engines(checkout, name).read_text())
    assert {Path(entry["file"]).suffix for entry in manifest["engines"].values()} == {".dummy"}
    comparison = json.loads((checkout.results / f"demo-llama/fp32/compare/{name}.json").read_text())
    assert set(comparison["engines"]) == set(manifest["engines"]) and 0 < comparison["relative_error"] < 1e-5
    code = Statement.load(statement_path(engines(checkout, name))).key.code
    assert {part for part in code if re.fullmatch(r"lockstep/backends/\w+", part)} == {"lockstep/backends/dummy"}


def results(checkout: Checkout) -> dict[str, str]:
    """Digests of all files but the config, which every run writes."""
    return {name: digest for name, digest in checkout.digests().items() if not name.startswith("config.")}


@pytest.fixture(scope="module")
def two_devices(first_run: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """The demo for two devices, made on two nodes in turn, and locked."""
    checkout = first_run.copy(tmp_path_factory.mktemp("devices") / "checkout")
    add_backend(checkout)
    checkout.edit_config(with_devices)
    os.remove(checkout.results / "summary.json")  # of the targets before, and what a lock would take of them
    for folder in list(checkout.results.glob("demo-llama/*/*/onnxruntime")):
        shutil.rmtree(folder)
    for path in checkout.results.glob("demo-llama/*/compare/onnxruntime.*"):
        path.unlink()
    for name in GPUS:
        refused = node(checkout, next(other for other in GPUS if other != name))
        before = results(checkout)
        process = refused.snakemake("--cores", "2", "--config", f"device={name}", check=False)
        lines = {line.strip() for line in process.stderr.splitlines() if "lockstep: error:" in line}
        assert process.returncode == 1 and len(lines) == 1, process.stderr
        expected = f"build fp32/{name}: expected {GPUS[name]!r}, the device {name} of the config, found"
        (line,) = lines
        assert expected in line.replace("demo-llama/", "") and platform.node() in line, line
        assert not engines(checkout, name).exists()
        assert results(checkout) == before

        node(checkout, name).finish("--config", f"device={name}")
        assert engines(checkout, name).is_file()
        assert not node(checkout, name).would_run("--config", f"device={name}")
    # The rest needs no device.
    assert set(checkout.would_run()) <= {"summary"}
    checkout.finish()
    checkout.run("lockstep", "lock")
    yield checkout


def test_each_device_has_its_own_engines_checks_and_row(two_devices: Checkout) -> None:
    for name, gpu in GPUS.items():
        manifest = json.loads(engines(two_devices, name).read_text())
        assert (manifest["backend"], manifest["device"]["name"]) == ("dummy", gpu)
        assert (two_devices.results / f"demo-llama/fp32/golden/{name}/2.json").is_file()
        looks_like_a_dummy(two_devices, name)
    rows = json.loads((two_devices.results / "summary.json").read_text())["targets"]
    assert {(row["backend"], row["device"], row["verdict"]) for row in rows} == {
        (name, gpu, "pass") for name, gpu in GPUS.items()
    }
    assert (two_devices.results / "report/targets/demo-llama-fp32-2-beta.html").is_file()


def test_one_lock_holds_both(two_devices: Checkout) -> None:
    lock = json.loads((two_devices.folder / "locks/demo-llama.lock.json").read_text())
    places = [name.split("/") for name in lock["locked"]]
    assert {place[2]: place[3].rpartition(" ")[0] for place in places if place[0] == "engines"} == GPUS
    assert {place[2] for place in places if place[0] == "golden"} == set(GPUS)
    two_devices.call("lockstep", "verify")
    for name in GPUS:
        assert not node(two_devices, name).would_run("--config", "locked=true", f"device={name}")


@pytest.mark.parametrize("name", GPUS)
def test_what_is_said_of_another_nodes_engines(two_devices: Checkout, name: str) -> None:
    for device in GPUS:
        output = node(two_devices, device).run("lockstep", "explain", f"demo-llama/fp32/2/{name}").stdout
        assert "differs" not in output and "->" not in output and "is not there" not in output, output


def test_a_lost_engine_is_made_again_where_its_device_is(two_devices: Checkout, tmp_path: Path) -> None:
    copy = two_devices.copy(tmp_path / "checkout")
    before = copy.digests()
    os.remove(next(engines(copy, "alpha").parent.glob("*.dummy")))
    engines_made = str(engines(copy, "alpha").relative_to(copy.folder))  # what reads it reads the same bytes as before
    node(copy, "alpha").finish("--forcerun", "build", "--config", "device=alpha", "--", engines_made)
    assert copy.digests() == before


REPRODUCE = ("reproduce", "demo-llama/fp32/2/alpha", "--rounds", "1")


def test_a_target_is_not_reproduced_where_its_device_is_not(two_devices: Checkout) -> None:
    wrong = node(two_devices, "beta").run("lockstep", *REPRODUCE, check=False)
    line = wrong.stderr.splitlines()[-1]
    assert wrong.returncode == 1 and "expected 'Alpha 100 80GB', the device alpha" in line and "'Beta 4'" in line


def test_a_target_is_reproduced_where_its_device_is(two_devices: Checkout, tmp_path: Path) -> None:
    copy = two_devices.copy(tmp_path / "checkout")
    output = node(copy, "alpha").run("lockstep", *REPRODUCE).stdout
    assert "The same in 1 of 1 builds" in output, output


RESOURCES = """
from snakemake.api import DAGSettings, OutputSettings, ResourceSettings, SnakemakeApi
with SnakemakeApi(OutputSettings(quiet=["all"])) as api:
    workflow = api.workflow(ResourceSettings(cores=1))
    workflow.dag(DAGSettings()).execute_workflow(executor="dryrun")
    for job in workflow._workflow.dag.jobs:
        asked = [job.resources.get(name) for name in ("gpu", "gpu_model")]
        print(job.rule.name, job.wildcards_dict.get("backend"), *asked)
"""


def test_a_clusters_jobs_ask_for_their_gpu(two_devices: Checkout) -> None:
    command = [sys.executable, "-c", RESOURCES]
    done = subprocess.run(
        command, cwd=two_devices.folder, env=two_devices.environment(), text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    jobs = {tuple(line.split()) for line in done.stdout.splitlines()}
    for name in GPUS:
        for rule in ("build", "compare", "golden", "served"):
            assert (rule, name, "1", name) in jobs, done.stdout
    assert ("export", "None", "None", "None") in jobs


def test_an_unknown_device_is_one_line(two_devices: Checkout) -> None:
    process = two_devices.call("snakemake", "--dry-run", "--config", "device=gamma", check=False)
    text = process.stdout + process.stderr
    assert process.returncode == 2 and "device: expected one of alpha, beta; found 'gamma'" in text


def test_a_bundle_opens_without_the_names_of_devices(two_devices: Checkout, tmp_path: Path) -> None:
    out = tmp_path / "alpha.tar"
    two_devices.call("lockstep", "bundle", "demo-llama/fp32/2/alpha", "--weights", "--out", str(out))
    options = (str(out), "--prompt", "San Francisco is a", "--max-new-tokens", "4")
    output = node(two_devices, "alpha").run("lockstep", "generate", *options, folder=tmp_path).stdout
    assert output.startswith(" cars on")
