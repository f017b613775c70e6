"""`hf:` sources with a local hub: requests, files that are kept, and one line for each failure.

In a child process where requests are counted or the process is ended; else in this one, which spares the imports.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

import fork_server
from hub_server import HubServer
from lockstep.artifacts import formats
from lockstep.artifacts.fetched import Fetched, folder_of
from lockstep.artifacts.files import sha256_file
from lockstep.checkpoint import resolve_fetched
from lockstep.checkpoint.hub.fetch import fetch
from lockstep.config.load import load
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.export.random_model import byte_tokenizer
from lockstep.manifests.digest_cache import size_of
from lockstep.manifests.manifest_files import lost_files
from lockstep.provenance.locked import fetch_parameters, find_lock

NAME = "acme/tiny"
TOKENIZER = byte_tokenizer().to_str().encode()
CONFIG = json.dumps({"model_type": "llama", "num_hidden_layers": 4, "max_position_embeddings": 256}).encode()


FETCH = f"""
from pathlib import Path
from lockstep.checkpoint.hub.fetch import fetch
from lockstep.errors import guard
with guard():
    fetch("hf:{NAME}", Path("results/m/source.json"))
"""


def _is_the_hubs(variable: str) -> bool:
    return variable.startswith("HF_") or variable.lower().endswith("_proxy")


def weights(seed: int = 0, size: int = 1 << 20) -> bytes:
    return save({"w": np.random.default_rng(seed).standard_normal(size, dtype=np.float32)})


def model(**changes: bytes | None) -> dict[str, bytes]:
    """The files of a repository, with what nobody needs among them."""
    files = {
        "config.json": CONFIG, "generation_config.json": b"{}", "tokenizer.json": TOKENIZER,
        "model.safetensors": weights(), "README.md": b"#", "modeling_tiny.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle", "onnx/model.onnx": b"x",
    }  # fmt: skip
    return {name: data for name, data in (files | changes).items() if data is not None}


class User:
    """A working directory, a hub cache, and `lockstep` started there."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.folder = folder
        self.hub = hub
        self.out = folder / "results" / "m" / "source.json"
        self.snapshots = folder / "home" / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots"
        folder.mkdir(exist_ok=True)

    def environment(self, **changes: str) -> dict[str, str]:
        variables = {name: value for name, value in os.environ.items() if not _is_the_hubs(name)}
        return {**variables, "HF_HOME": str(self.folder / "home"), "HF_ENDPOINT": self.hub.url, **changes}

    def start(self) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", FETCH], cwd=self.folder, env=self.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def fetch(self, source: str = f"hf:{NAME}", layers: int = 2, locked: bool = False, **environment: str) -> Fetched:
        """Fetch in this process, with what the rule's script gives the stage."""
        config = load({"models": {"m": {"source": source, "layers": [layers], "golden": {"prompts": [{"text": "A"}]}}}})
        with pytest.MonkeyPatch.context() as patch:
            for name in filter(_is_the_hubs, list(os.environ)):
                patch.delenv(name)
            for name, value in self.environment(**environment).items():
                patch.setenv(name, value)
            patch.chdir(self.folder)
            importlib.reload(constants)  # where huggingface_hub caches its environment
            lock_file = find_lock("m", [Path()]) if locked else None
            fetch(source, Path("results/m/source.json"), **fetch_parameters(config, "m", lock_file))
        return Fetched.load(self.out)

    def lock(self, source: str, commit: str) -> None:
        """Lock the model at a commit, with files that nothing here looks at."""
        value = {
            "format": formats.LOCK,
            "model": "m",
            "made with": {},
            "locked": {"checkpoint": {"source": source, "commit": commit}},
        }
        (self.folder / "locks").mkdir(exist_ok=True)
        (self.folder / "locks" / "m.lock.json").write_text(json.dumps(value))

    def error(self, *arguments, kind: type[LockstepError] = InputError, **environment: str) -> str:
        """The one line of a fetch that must fail, and leaves no manifest that was not there."""
        before = self.out.read_bytes() if self.out.exists() else None
        with pytest.raises(kind) as error:
            self.fetch(*arguments, **environment)
        assert (self.out.read_bytes() if self.out.exists() else None) == before
        line = str(error.value)
        assert "\n" not in line
        return line

    def parts(self) -> list[Path]:
        return sorted(self.folder.rglob("*.incomplete"))


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def user(tmp_path: Path, hub: HubServer) -> Iterator[User]:
    yield User(tmp_path / "work", hub)
    importlib.reload(constants)


def test_only_the_files_that_are_needed_come_and_the_commit_is_recorded(user: User, hub: HubServer) -> None:
    commit = hub.model(NAME, model())
    process = user.start()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    actual = Fetched.load(user.out)
    names = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert actual.commit == commit and actual.source == f"hf:{NAME}" and sorted(actual.sha256) == names
    assert {path.name: sha256_file(path) for path in folder_of(user.out).iterdir()} == actual.sha256
    paths = [
        request.path
        for request in hub.requests
        if not request.path.startswith((f"/api/models/{NAME}", f"/{NAME}/resolve/", "/cdn/"))
    ]
    assert not paths, "no telemetry, no list of agents: nothing but this model"
    assert sorted(path.name for path in user.snapshots.joinpath(commit).iterdir()) == names
    manifest = json.loads(resolve_fetched(user.out, user.out.with_name("checkpoint.json")).read_text())
    assert (manifest["commit"], manifest["folder"]) == (commit, "checkpoint")


def test_shards_are_those_of_the_index(user: User, hub: HubServer) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": weights(n) for n in (1, 2)}
    index = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode()
    files = {
        "model.safetensors": None,
        "model.safetensors.index.json": index,
        "consolidated.safetensors": weights(3),
        **shards,
    }
    hub.model(NAME, model(**files))
    assert {name for name in user.fetch().sha256 if "safetensors" in name} == {"model.safetensors.index.json", *shards}
    hub.model(NAME, model(**files | {"model-00002-of-00002.safetensors": None}))
    assert ("expected model-00002-of-00002.safetensors, which model.safetensors.index.json names") in User(
        user.folder / "other", hub
    ).error()


def test_a_branch_a_tag_and_a_commit(user: User, hub: HubServer) -> None:
    first = hub.model(NAME, model())
    second = hub.repositories[NAME].commit(model(**{"model.safetensors": weights(1)}), ref="refs/pr/1")
    assert user.fetch(f"hf:{NAME}@refs/pr/1").commit == second
    assert user.fetch(f"hf:{NAME}@{first}").commit == first
    assert (
        sha256_file(user.out.parent / "checkpoint" / "model.safetensors")
        == Fetched.load(user.out).sha256["model.safetensors"]
    )


def test_a_branch_that_moves_is_not_followed(user: User, hub: HubServer) -> None:
    first = hub.model(NAME, model())
    user.fetch()
    resolve_fetched(user.out, user.out.with_name("checkpoint.json"))
    hub.repositories[NAME].commit(model(**{"model.safetensors": weights(1)}))
    hub.requests.clear()
    assert user.fetch().commit == first and not hub.requests, "all is there: nothing is asked"
    user.out.unlink()
    assert user.fetch().commit == first, "the checkpoint's manifest remembers it"
    user.out.unlink()
    user.out.with_name("checkpoint.json").unlink()
    second = hub.repositories[NAME].refs["main"]
    assert user.fetch().commit == second != first
    hub.repositories[NAME].commit(model(**{"model.safetensors": weights(2)}))
    assert user.fetch().commit == second


def test_locked_the_locked_commit_is_taken_wherever_the_branch_is(user: User, hub: HubServer) -> None:
    first = hub.model(NAME, model())
    user.lock(f"hf:{NAME}@main", first)
    second = hub.repositories[NAME].commit(model(**{"model.safetensors": weights(1)}))
    assert user.fetch(f"hf:{NAME}@main", 2, True).commit == first
    assert len({request.path for request in hub.asked("/cdn/")}) == 1, (
        "the weights of the branch as it is now are not downloaded"
    )
    user.out.unlink()
    assert user.fetch(f"hf:{NAME}@main", 2).commit == second
    assert user.fetch(f"hf:{NAME}@main", 2, True).commit == first, "files fetched before without the lock are not used"


def test_locked_another_commit_is_refused_before_its_weights_come(user: User, hub: HubServer) -> None:
    first = hub.model(NAME, model())
    user.lock(f"hf:{NAME}@main", first)
    second = hub.repositories[NAME].commit(model(**{"model.safetensors": weights(1)}))
    hub.repositories[NAME].refs["dev"] = second
    commits = (
        f"fetch: commit differs: {first} -> {second}; locked by locks/m.lock.json: undo the change, or "
        f"run without locked and `lockstep lock` again"
    )
    for source in (f"hf:{NAME}@{second}", f"hf:{NAME}@dev"):
        assert user.error(source, 2, True, kind=CheckError) == commits
    assert not hub.asked("/cdn/")
    assert user.fetch(f"hf:{NAME}@{first}", 2, True).commit == first, "another name of the same commit is none"


def test_a_commit_that_is_gone_is_named(user: User, hub: HubServer) -> None:
    first = hub.model(NAME, model())
    user.lock(f"hf:{NAME}", first)
    hub.repositories[NAME].commit(model(**{"model.safetensors": weights(1)}))
    del hub.repositories[NAME].commits[first]
    assert user.error(f"hf:{NAME}", 2, True) == (
        f"hf:{NAME}: expected commit {first}, at which it was found before, found it gone from {NAME}; "
        "take the newest one: delete source.json and checkpoint.json of the model, and run again, not locked"
    )  # fmt: skip


@pytest.mark.exports
def test_a_first_config_of_a_model_on_the_hub_asks_for_its_config_alone(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    for source in (f"hf:{NAME}", f"hf:{NAME}@main"):
        process = fork_server.run(
            "lockstep", ("init", source, "--out", "my.yaml"), user.folder, user.environment(), 120
        )
        assert process.returncode == 0, process.stderr
        config = load(user.folder / "my.yaml")
        assert config.models["tiny"].source == source and config.limits.max_seq_len == 256
        (user.folder / "my.yaml").unlink()
    files = {request.path.rpartition("/")[2] for request in hub.requests if "/resolve/" in request.path}
    assert files == {"config.json"}
    process = fork_server.run("lockstep", ("init", "hf:acme/none"), user.folder, user.environment(), 120)
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert "hf:acme/none: expected a model on" in process.stderr and not list(user.folder.glob("*.yaml"))


def test_what_is_gone_from_the_cache_comes_again(user: User, hub: HubServer) -> None:
    commit = hub.model(NAME, model())
    user.fetch()
    (folder_of(user.out) / "model.safetensors").resolve().unlink()
    assert lost_files(user.out)
    hub.repositories[NAME].commit(model(**{"model.safetensors": weights(1)}))
    assert user.fetch().commit == commit and not lost_files(user.out)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_after_a_stopped_download_the_same_command_brings_the_file(
    user: User, hub: HubServer, how: signal.Signals
) -> None:
    data = weights(size=16 << 20)
    hub.model(NAME, model(**{"model.safetensors": data}))
    hub.pause_after = 40_000_000
    process = user.start()
    deadline = time.monotonic() + 300
    while not any(map(size_of, user.parts())):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    hub.resume.set()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == (130 if how == signal.SIGINT else -how), errors
    user.fetch()
    assert (folder_of(user.out) / "model.safetensors").read_bytes() == data


def test_the_config_is_checked_before_weights_come(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    assert "models.m.layers[0]: expected at most 4 (num_hidden_layers in " in user.error(f"hf:{NAME}", 5)
    assert not hub.asked("safetensors") and not hub.asked("/cdn/")
    user.fetch()
    assert "expected at most 4" in user.error(f"hf:{NAME}", 5)


def test_bytes_damaged_on_the_way_never_reach_the_cache(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    hub.damage = True
    assert "damaged on the way; run the same command again" in user.error()
    assert not list(user.snapshots.rglob("*.safetensors"))
    hub.damage = False
    user.fetch()


def test_a_file_of_another_size_than_announced(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    hub.announce = 100
    assert (
        "expected the files that the hub announces, found Consistency check failed: file should be of size"
    ) in user.error()
    hub.announce = 0
    user.fetch()


def test_a_file_that_changed_in_the_cache_is_seen_by_resolve(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    user.fetch()
    blob = (folder_of(user.out) / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(InputError, match=f"^{blob}: expected the file that was fetched .* delete it and "):
        resolve_fetched(user.out, user.out.with_name("checkpoint.json"))


def test_the_token_goes_to_the_hub_and_not_beyond(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    hub.repositories[NAME].token = "hf_secret"
    assert (
        "found none of this name (401); correct it, or if it is private log in with `hf auth login` or set HF_TOKEN"
    ) in user.error()
    assert (
        "found none of this name (404); correct it, or if it is private use a token that may read it"
    ) in user.error(HF_TOKEN="hf_other")
    hub.requests.clear()
    user.fetch(HF_TOKEN="hf_secret")
    assert {request.token for request in hub.asked("/resolve/")} == {"hf_secret"}
    assert [request.token for request in hub.asked("/cdn/")] == [None]
    (user.folder / "home" / "token").write_text("hf_secret")
    user.out.unlink()
    user.fetch()


def test_a_gated_model(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    hub.repositories[NAME].token = "hf_secret"
    hub.repositories[NAME].gated = True
    message = f"hf:{NAME}: expected access to this gated model, found none; ask for it on {hub.url}/{NAME}, then "
    assert user.error() == message + "log in with `hf auth login` or set HF_TOKEN"
    assert user.error(HF_TOKEN="hf_other") == message + "use a token that may read it"


def test_no_such_model_and_no_such_revision(user: User, hub: HubServer) -> None:
    assert f"hf:{NAME}: expected a model on {hub.url}, found none of this name (401)" in user.error()
    hub.model(NAME, model())
    assert user.error(f"hf:{NAME}@v9") == (
        f"hf:{NAME}@v9: expected a branch, tag or commit, found no revision 'v9' in {NAME}; correct it"
    )
    assert "found no revision" in user.error(f"hf:{NAME}@{'0' * 40}")


@pytest.mark.parametrize(("files", "expected"), [
    ({"model.safetensors": None}, "found pickled weights (pytorch_model.bin), which can run code when they "
"are opened; use a revision with safetensors"),
    ({"model.safetensors": None, "pytorch_model.bin": None}, "expected model.safetensors or "
"model.safetensors.index.json, found no weights"),
    ({"tokenizer.json": None}, "expected tokenizer.json, found none in the repository; download it with `hf "
"download acme/tiny --local-dir FOLDER`"),
    ({"config.json": None}, "expected config.json, found none in the repository"),
    ({"config.json": None, "adapter_config.json": b"{}"}, "found an adapter (adapter_config.json); merge it "
"into its base model"),
])  # fmt: skip
def test_a_repository_that_holds_no_checkpoint(user: User, hub: HubServer, files: dict, expected: str) -> None:
    hub.model(NAME, model(**files))
    assert expected in user.error() and not hub.asked("/cdn/")


def test_without_a_network_the_cache_serves(user: User, hub: HubServer) -> None:
    commit = hub.model(NAME, model())
    dark = "http://127.0.0.1:9"  # the port of `discard`, where nothing listens
    nothing = (
        f"hf:{NAME}: expected the hub or its cache, found {{}} and no such model in the cache; run again with a network"
    )
    assert user.error(HF_HUB_OFFLINE="1") == nothing.format("HF_HUB_OFFLINE set")
    assert user.error(HF_ENDPOINT=dark) == nothing.format(f"{dark} out of reach")
    user.fetch()
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": dark}):
        user.out.unlink()
        assert user.fetch(**environment).commit == commit
        user.out.unlink()
        assert user.fetch(f"hf:{NAME}@{commit}", **environment).commit == commit
    user.out.unlink()
    (user.snapshots / commit / "model.safetensors").resolve().unlink()
    assert (f"found HF_HUB_OFFLINE set and no model.safetensors in {user.snapshots / commit}") in user.error(
        HF_HUB_OFFLINE="1"
    )


def test_a_hub_that_is_down(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    hub.failing = 503
    assert f"found {hub.url} out of reach and no such model in the cache" in user.error()


def test_a_changed_source_leaves_nothing_of_the_old_one(user: User, hub: HubServer) -> None:
    hub.model(NAME, model())
    user.fetch()
    other = hub.model("acme/other", model(**{"generation_config.json": None, "tokenizer_config.json": b"{}"}))
    actual = user.fetch("hf:acme/other")
    assert actual.commit == other and sorted(path.name for path in folder_of(user.out).iterdir()) == sorted(
        actual.sha256
    )
    assert "tokenizer_config.json" in actual.sha256 and "generation_config.json" not in actual.sha256
