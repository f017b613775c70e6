"""Checkpoints as people have them, each through the whole run: resolve, convert, export, build, generate; against
transformers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
import transformers
from checkpoints import in_shards
from families import FAMILIES
from safetensors.numpy import load_file
from safetensors.torch import save_file

from lockstep.backends.builder import build
from lockstep.checkpoint import resolve
from lockstep.export import random_model
from lockstep.export.quiet import quiet
from lockstep.export.run import export
from lockstep.runtime import Model, ModelOptions, Tokenizer, generate
from lockstep.targets import Results
from lockstep.tolerances import Tolerances
from lockstep.verify import validate
from lockstep.weights import convert
from shared import Shared
from some import some

SHAPE = {**FAMILIES["llama"].config, "eos_token_id": None, "bos_token_id": None}
PROMPT = "San Francisco"
NEW = 12


def source(folder: Path, dtype: str = "float32", shard_bytes: int = 1 << 30) -> Path:
    folder.mkdir()
    (folder / "shape.json").write_text(json.dumps({**SHAPE, "dtype": dtype}))
    return in_shards(random_model.make(folder / "shape.json", 0, folder / "checkpoint"), shard_bytes)


@pytest.fixture(scope="module")
def graphs(shared: Shared) -> Results:
    """Graphs and engines of the shape: they hold no weights, so all checkpoints below share them."""

    def make(folder: Path) -> None:
        results = Results(folder / "results")
        checkpoint = resolve("s", source(folder / "s"), results.checkpoint("m"))
        build(
            export(checkpoint, "fp32", results.assembly("m", "fp32")),
            "onnxruntime",
            results.engines("m", "fp32", "onnxruntime"),
        )

    return Results(shared.folder("whole", make) / "results")


def run(folder: Path, graphs: Results, name: str = "relative/checkpoint") -> tuple[Results, list[int]]:
    """Results of the checkpoint in `folder`, in fp32, and the tokens that it generates after the prompt."""
    results = Results(folder.parent / "results")
    convert(resolve(name, folder, results.checkpoint("m")), "fp32", results.weights("m", "fp32"))
    shutil.copytree(
        graphs.assembly("m", "fp32").parents[1],
        results.assembly("m", "fp32").parents[1],
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("weights*"),
    )
    return results, tokens(results)


def tokens(results: Results) -> list[int]:
    assembly = results.assembly("m", "fp32")
    model = Model.open(
        results.engines("m", "fp32", "onnxruntime"), assembly, results.weights("m", "fp32"), "all",
        ModelOptions(max_batch_size=1, max_seq_len=64),
    )  # fmt: skip
    generation = generate(model, Tokenizer.open(assembly), [PROMPT], NEW)
    list(generation)
    return generation.tokens[0]


def expected(folder: Path) -> list[int]:
    """What transformers gives for the same files, computed in fp32."""
    with quiet(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([random_model.byte_tokenizer().encode(PROMPT).ids])
        return model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()


def as_hub_cache(folder: Path, root: Path) -> Path:
    """The files of `folder` as the hub's cache keeps them: blobs named by digest, and a snapshot of links that leave
    it."""
    snapshot = root / "hub" / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.move(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def change(path: Path, add: Mapping[str, np.ndarray] = MappingProxyType({}), drop: tuple[str, ...] = ()) -> None:
    tensors = {
        name: torch.from_numpy(array) for name, array in (load_file(path) | dict(add)).items() if name not in drop
    }
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("dtype", "shard_bytes", "cached"),
    some([("bfloat16", 50_000, False), ("float16", 50_000, True), ("float32", 1 << 30, False)]),
)
def test_every_dtype_in_one_file_or_shards_as_a_folder_or_in_a_hub_cache(tmp_path, graphs, dtype, shard_bytes, cached):
    folder = source(tmp_path / "s", dtype, shard_bytes)
    if cached:
        folder = as_hub_cache(folder, tmp_path)
    results, actual = run(folder, graphs)
    assert actual == expected(folder) and len(actual) == NEW
    assert results.weights("m", "fp32").with_name("weights.safetensors").exists() == (dtype != "float32"), (
        "what fits is not copied"
    )
    if cached and dtype == "float32":  # the manifest points through the links, and follows when all of it moves
        shutil.move(tmp_path / "hub", tmp_path / "moved")
        assert tokens(Results(tmp_path / "moved" / results.root.relative_to(tmp_path / "hub"))) == actual


def test_tensors_that_the_model_does_not_know_are_ignored_and_listed(tmp_path, graphs):
    folder = source(tmp_path / "s")
    before = expected(folder)
    change(
        folder / "model.safetensors",
        {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32), "step": np.array([3])},
    )
    results, actual = run(folder, graphs)
    assert actual == before
    names = (
        results.weights("m", "fp32"), results.checkpoint("m"), "all", Tolerances("fp32"), 64,
        results.validation("m", "fp32", "all"),
    )  # fmt: skip
    report = json.loads(validate.run(results.assembly("m", "fp32"), *names).read_text())
    assert report["unused_tensors"] == ["model.layers.0.self_attn.rotary_emb.inv_freq", "step"]
    assert report["result"] == "pass"


def test_a_shards_tensor_that_the_index_does_not_name_is_ignored_and_listed(tmp_path, graphs):
    folder = source(tmp_path / "s", shard_bytes=50_000)
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    change(shard, {"momentum": np.ones(4, np.float32)})
    results, actual = run(folder, graphs)
    assert actual == expected(folder)
    assert json.loads(results.checkpoint("m").read_text())["unindexed"] == [{"file": shard.name, "tensor": "momentum"}]
