"""Models that jobs fetch or make: from the hub, pinned, and random ones; in a run as a user starts it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from checkout import Checkout, failure

import gguf_models
from hub_server import HubServer
from lockstep.export import random_model

SHAPE = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "eos_token_id": None, "bos_token_id": None, "dtype": "float32",
}  # fmt: skip
GOLDEN = {"max_new_tokens": 4, "prompts": [{"text": "Hello"}]}
CONFIG = ("--configfile", "own.yaml")
# As far as the stages differ that make them.
MODELS = ("results/hub", "results/random")
BUILT = [
    *(f"{model}/fp32/weights.json" for model in MODELS),
    *(f"{model}/fp32/engines/onnxruntime/engines.json" for model in MODELS),
]
# Of the hub's model all: a lock is of a whole one. A fetched checkpoint is one like any other to these stages, so they
# run in the test's process.
CHECKED = [
    "results/hub/fp32/validate/all.json",
    "results/hub/fp32/compare/onnxruntime.json",
    "results/hub/fp32/golden/onnxruntime/all.json",
    "results/hub/fp32/served/onnxruntime/all.json",
]
CHECKS = ("validate", "compare", "reference", "golden", "served")
TARGETS = [*BUILT, *CHECKED]
WEIGHTS = list(map("/".join, itertools.product(MODELS, ("source.json", "checkpoint.json", "fp32/weights.json"))))


class User(Checkout):
    """A checkout with a config of a hub model and a random one, and a hub that may be out of reach."""

    url = "http://127.0.0.1:9"  # the port of `discard`, where nothing listens

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "HF_HOME": str(self.folder / "home"), "HF_ENDPOINT": self.url}

    def configure(self, seed: int = 0, layers: int | str = "all", names: Sequence[str] = ("hub", "random")) -> None:
        models = {"hub": "hf:acme/tiny", "random": f"random:shape.json?seed={seed}"}
        config = {"models": {name: {"source": models[name], "layers": [layers], "golden": GOLDEN} for name in names}}
        (self.folder / "own.yaml").write_text(yaml.safe_dump(config))
        (self.folder / "shape.json").write_text(json.dumps(SHAPE))


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def checkpoint(folder: Path, seed: int) -> dict[str, bytes]:
    folder.mkdir(parents=True)
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    return {
        path.name: path.read_bytes() for path in random_model.make(folder / "shape.json", seed, folder / "c").iterdir()
    }


@pytest.mark.long
def test_models_are_fetched_and_made_and_stay_what_they_were(tmp_path: Path, hub: HubServer) -> None:
    user = User.make(tmp_path / "checkout")
    user.configure()
    commit = hub.model("acme/tiny", checkpoint(tmp_path / "v1", 1))
    plan = user.would_run(*CONFIG)  # offline, before anything is known of the model
    assert plan["fetch"] == plan["make_checkpoint"] == 1 and plan["golden"] == 2

    user.url = hub.url
    # One after the other: the second model takes the graphs of the first, whose shape it has, from the cache.
    user.finish(*BUILT, *CONFIG, "--config", f"cache={tmp_path / 'cache'}", "--cores", "1")
    manifest = json.loads((user.results / "hub" / "checkpoint.json").read_text())
    assert manifest["commit"] == commit and manifest["folder"] == "checkpoint"
    assert not user.would_run(*BUILT, *CONFIG)

    # The branch moves on: nothing does here, also where the fetched files are lost.
    hub.repositories["acme/tiny"].commit(checkpoint(tmp_path / "v2", 2))
    assert not user.would_run(*BUILT, *CONFIG)
    before = user.digests()
    (user.results / "hub" / "checkpoint" / "model.safetensors").resolve().unlink()
    (user.results / "random" / "checkpoint" / "model.safetensors").unlink()
    user.finish(*CONFIG, "--forcerun", "fetch", "make_checkpoint", "--", *WEIGHTS)
    assert user.digests() == before and not user.would_run(*BUILT, *CONFIG)

    for stage in CHECKS:
        user.job(stage, "hub/fp32/all", config="own.yaml")
    assert json.loads((user.results / "hub/fp32/golden/onnxruntime/all.json").read_text())["result"] == "pass"
    assert not user.would_run(*TARGETS, *CONFIG)
    before = user.digests()

    # Locked, it does not elsewhere either, not even where the branch was fetched as it is now.
    user.run("lockstep", "lock", "hub")
    other = User.make(tmp_path / "other")
    other.configure(names=["hub"])
    other.url = hub.url
    other.finish("results/hub/checkpoint.json", *CONFIG)
    assert other.digests()["hub/checkpoint.json"] != before["hub/checkpoint.json"]
    shutil.copytree(user.folder / "locks", other.folder / "locks")
    locked = ("results/hub/checkpoint.json", *CONFIG, "--config", "locked=true")
    refused = other.snakemake("--cores", "2", *locked, check=False)
    output = refused.stdout + refused.stderr
    assert refused.returncode == 1 and "fetch: commit differs" in output and "delete results/hub" in output
    shutil.rmtree(other.results / "hub")
    other.finish(*locked)
    results = {name: digest for name, digest in other.digests().items() if name.startswith("hub/")}
    assert "hub/checkpoint.json" in results and results == {name: before[name] for name in results}

    # Without a network too, for the cache has the commit.
    user.url = User.url
    (user.results / "hub" / "source.json").unlink()
    user.finish(*WEIGHTS, *CONFIG)
    assert user.digests() == before

    user.configure(seed=1)
    plan = user.would_run(*CONFIG)
    assert plan["make_checkpoint"] == 1 and plan["fetch"] == 0
    user.configure()
    (user.folder / "shape.json").write_text(json.dumps({**SHAPE, "rope_theta": 5000.0}))
    plan = user.would_run(*CONFIG)
    assert plan["make_checkpoint"] == 1 and plan["fetch"] == 0


def test_too_many_layers_stop_a_hub_model_before_its_weights(tmp_path: Path, hub: HubServer) -> None:
    user = User.make(tmp_path / "checkout")
    user.configure(layers=2)
    user.url = hub.url
    hub.model(
        "acme/tiny",
        checkpoint(tmp_path / "v1", 1) | {"config.json": json.dumps({**SHAPE, "num_hidden_layers": 1}).encode()},
    )
    process = user.snakemake("--cores", "1", "results/hub/checkpoint.json", *CONFIG, check=False)
    assert process.returncode and not hub.asked("/cdn/")
    assert "expected at most 1 (num_hidden_layers in " in process.stdout + process.stderr


@pytest.mark.long  # `make real` makes one
def test_a_gguf_file_is_made_a_checkpoint_and_made_again_when_it_changes(tmp_path: Path) -> None:
    user = User.make(tmp_path / "checkout")
    limits = {"max_seq_len": gguf_models.LENGTH, "max_input_len": 32}
    model = {"source": "models/tiny.gguf", "golden": GOLDEN}
    (user.folder / "own.yaml").write_text(yaml.safe_dump({"models": {"gguf": model}, "limits": limits}))
    (user.folder / "models").mkdir()
    assert "models.gguf.source: expected a GGUF file; found none at" in failure(
        user.snakemake("-n", *CONFIG, check=False)
    )
    path = user.folder / "models" / "tiny.gguf"
    gguf_models.write_model(path, "llama", gguf_models.table()["vocabularies"], quantized="Q8_0")
    command = ("results/gguf/checkpoint.json", *CONFIG)
    user.finish(*command)
    before = user.digests()["gguf/checkpoint.json"]
    assert not user.would_run(*command)

    gguf_models.write_model(path, "llama", gguf_models.table()["vocabularies"], quantized="Q4_0")
    assert user.would_run(*command)["make_checkpoint"] == 1
    user.finish(*command)
    assert user.digests()["gguf/checkpoint.json"] != before
    path.write_bytes(path.read_bytes()[:1000])
    assert "expected a whole GGUF file at" in failure(user.snakemake("-n", *CONFIG, check=False))
