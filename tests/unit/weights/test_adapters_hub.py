"""Adapters from a hub of one's own: two files come, the commit stays, and each way it can fail is one line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_model import DEMO, ROOT

import fork_server
from hub_server import HubServer
from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.manifests.manifest_files import lost_files, named_files
from lockstep.provenance.statements import read_statement
from lockstep.stages import STAGES
from lockstep.targets import Results
from lockstep.weights.adapters import open_adapters

ADAPTERS = ROOT / "resources" / "demo-adapters"
NAME = "acme/captain"


def files(name: str = "captain", **changes: bytes | None) -> dict[str, bytes]:
    contents = {path.name: path.read_bytes() for path in (ADAPTERS / name).iterdir()} | {"README.md": b"#"}
    return {name: data for name, data in (contents | changes).items() if data is not None}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


class User:
    """A working directory with a model, one adapter on the hub and one in a folder, and a hub cache."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.folder = folder
        self.hub = hub
        self.results = Results(folder / "results")

    def run(self, command: str, source: str = f"hf:{NAME}", **environment: str) -> subprocess.CompletedProcess:
        adapters = {"mine": {"source": str(ADAPTERS / "shakespeare")}, "theirs": {"source": source}}
        model = {"source": str(DEMO), "adapters": adapters, "golden": {"prompts": [{"text": "Hello"}]}}
        (self.folder / "config.json").write_text(json.dumps({"models": {"m": model}}))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        variables = {
            "HF_HOME": str(self.folder / "home"),
            "HF_ENDPOINT": self.hub.url,
            "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests",
        }
        arguments = (command, "m/fp16", "config.json", "results")
        return fork_server.run("stage_job", arguments, self.folder, {**inherited, **variables, **environment}, 120)

    def error(self, *arguments: str, **environment: str) -> str:
        result = self.run("fetch_adapters", *arguments, **environment)
        *_, last = result.stderr.splitlines()
        assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
        assert not self.results.adapter_sources("m").exists()
        return last


@pytest.fixture
def user(tmp_path: Path, hub: HubServer) -> User:
    return User(tmp_path, hub)


@pytest.mark.long
def test_an_adapter_on_the_hub_is_fetched_and_stays_at_its_commit(user: User, hub: HubServer) -> None:
    commit = hub.model(NAME, files())
    stdout = user.run("fetch_adapters")
    assert stdout.returncode == 0, stdout.stderr
    sources = user.results.adapter_sources("m")
    assert json.loads(sources.read_text())["adapters"] == {"theirs": {"source": f"hf:{NAME}", "commit": commit}}
    assert [file.path.name for file in named_files(sources)] == ["adapter_config.json", "adapter_model.safetensors"]
    assert not [request for request in hub.requests if "README" in request.path]
    assert user.run("resolve").returncode == 0
    stdout = user.run("adapters")
    assert stdout.returncode == 0, stdout.stderr
    manifest = user.results.adapters("m")
    adapters = AdaptersManifest.load(manifest).adapters
    assert adapters["theirs"].commit == commit and adapters["mine"].commit == ""
    assert sorted(open_adapters(manifest)) == ["mine", "theirs"] and not lost_files(manifest)
    statement = read_statement(manifest)
    assert statement and STAGES["adapters"].pin(manifest, statement.key)[1]["theirs/commit"] == commit
    hub.model(NAME, files("shakespeare"))  # the branch moves; the resolved commit stays
    before = len(hub.requests)
    assert user.run("fetch_adapters").returncode == 0 and len(hub.requests) == before
    next(sources.with_suffix("").rglob("adapter_model.safetensors")).unlink()
    assert user.run("fetch_adapters").returncode == 0
    assert json.loads(sources.read_text())["adapters"]["theirs"]["commit"] == commit


@pytest.mark.long
def test_each_way_that_it_can_fail_is_one_line(user: User, hub: HubServer) -> None:
    assert "expected a model on" in user.error() and "found none of this name (40" in user.error()
    hub.model(NAME, files(**{"adapter_config.json": None}))
    assert "expected an adapter as PEFT saves it with adapter_config.json, found none" in user.error()
    hub.model(NAME, files(**{"adapter_model.safetensors": None, "adapter_model.bin": b"pickle"}))
    assert "adapter_model.safetensors, found pickled weights (adapter_model.bin)" in user.error()
    assert "found no revision 'v9'" in user.error(f"hf:{NAME}@v9")
    assert "found HF_HUB_OFFLINE set" in user.error(HF_HUB_OFFLINE="1")


@pytest.mark.long
def test_a_model_without_adapters_on_the_hub_fetches_nothing(user: User) -> None:
    stdout = user.run("fetch_adapters", str(ADAPTERS / "captain"))
    assert stdout.returncode == 0 and not stdout.stdout
    assert user.run("resolve").returncode == 0
    stdout = user.run("adapters")
    assert stdout.returncode == 2 and "adapter_sources.json: expected a file, found none" in stdout.stderr
