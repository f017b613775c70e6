"""Adapters for tests: folders as PEFT saves them, with random numbers; and the demo with graphs that take some."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from demo_model import ROOT
from fine_tunes import add_fine_tune
from safetensors.numpy import save_file

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import write_bytes, write_json
from lockstep.artifacts.quantized import module_of
from lockstep.backends.builder import build
from lockstep.config import load
from lockstep.export.lora import with_adapters
from lockstep.runtime import Decoding, Model, ModelOptions, Request
from lockstep.runtime.binding import adapted_modules
from lockstep.runtime.generate import generate
from lockstep.runtime.target import open_model, open_tokenizer
from lockstep.targets import Results
from lockstep.weights.check_adapters import resolve_adapters
from shared import Shared

ADAPTERS = ROOT / "resources" / "demo-adapters"
NAMES = ("captain", "shakespeare")
CONFIG = load.load(ROOT / "config" / "adapters.yaml")
TARGET = "demo-lora/fp32/all"
TUNED = "tuned-lora/fp32/all"
LIGHT = {
    None: " travels faster than anything else",
    "captain": " the lamps, for we sail with the tide.",
    "shakespeare": " doth outrun all that we mortals know.",
}
ROOM = {"max_adapters": 2, "max_lora_rank": 16}


def sizes(assembly: Assembly) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the linear layers that take adapters."""
    assert assembly.adapters is not None
    results = {}
    for layer in assembly.layers:
        for part in layer.parts:
            for weight, slot in assembly.adapters.classes.get(part.graph, {}).items():
                results[module_of(part.slots[weight][0])] = (slot.out_features, slot.in_features)
    assert set(results) == adapted_modules(assembly)
    return results


def tensors(modules: Mapping[str, tuple[int, int]], rank: int, seed: int, size: float = 0.05) -> dict[str, np.ndarray]:
    """Random matrices under PEFT's names; size: how much larger numbers of B are than those of a layer that adds
    nothing."""
    random = np.random.default_rng(seed)
    results = {}
    for name, (out, in_features) in sorted(modules.items()):
        key = f"base_model.model.{name}"
        results[f"{key}.lora_A.weight"] = random.standard_normal((rank, in_features), np.float32) / np.float32(
            in_features**0.5
        )
        results[f"{key}.lora_B.weight"] = random.standard_normal((out, rank), np.float32) * np.float32(size)
    return results


def write(folder: Path, rank: int, arrays: Mapping[str, np.ndarray], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "use_rslora": False, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(arrays), folder / "adapter_model.safetensors")
    return folder


def shared_lora(demo: Results, shared: Shared) -> Results:
    """Results of "demo-llama" whose graphs take two adapters at a time, and three adapters: of the demo's, and a random
    one. Read only."""

    def make(folder: Path) -> None:
        shutil.copytree(demo.root, folder, dirs_exist_ok=True)
        results = Results(folder)
        for precision in ("fp32", "fp16"):
            path = results.assembly("demo-llama", precision)
            assembly = Assembly.load(path)
            files, adapted_assembly = with_adapters(
                {graph.file: (path.parent / graph.file).read_bytes() for _, graph in assembly.graphs()}, assembly, ROOM
            )
            for name, data in files.items():
                write_bytes(path.parent / name, data)
            adapted_assembly.save(path)
            build(path, "onnxruntime", results.engines("demo-llama", precision, "onnxruntime"))
        write(folder / "random", 16, tensors(sizes(adapted_assembly), 16, seed=3))
        sources = {**{name: str(ADAPTERS / name) for name in NAMES}, "random": str(folder / "random")}
        resolve_adapters(
            sources, {name: Path(source) for name, source in sources.items()}, results.checkpoint("demo-llama"), 16,
            None, results.adapters("demo-llama"),
        )  # fmt: skip

    return Results(shared.folder("lora", make))


def opened(results: Results, precision: str = "fp32", weights_of: str = "demo-llama", **options: Any) -> Model:
    paths = (results.engines("demo-llama", precision, "onnxruntime"), results.assembly("demo-llama", precision))
    all_options = {"adapters_json": results.adapters("demo-llama"), "max_batch_size": 4, **options}
    return Model.open(*paths, results.weights(weights_of, precision), options=ModelOptions(**all_options))


def logits_of(
    model: Model, requests: list[tuple[Any, str | None]], count: int = 5, checkpoint: str = ""
) -> list[np.ndarray]:
    """Of each request with its adapter the logits of `count` greedy steps."""
    results: list[list[np.ndarray]] = [[] for _ in requests]

    def request(ids: Any, adapter: str | None, rows: list[np.ndarray]) -> Request:
        def choose(logits: np.ndarray) -> int:
            rows.append(logits.copy())
            return int(logits.argmax())

        return Request(ids, count, choose, adapter=adapter, checkpoint=checkpoint)

    for _ in Decoding(model, [request(*item, rows) for item, rows in zip(requests, results)]):
        pass
    return [np.stack(rows) for rows in results]


def requests() -> list[tuple[np.ndarray, str | None]]:
    random = np.random.default_rng(0)
    lengths = [(9, "captain"), (1, None), (24, "shakespeare"), (1, "random"), (7, "random"), (2, "captain"), (30, None)]
    return [(random.integers(0, 768, length), name) for length, name in lengths]


def served_lora(demo: Results, shared: Shared) -> Results:
    """A results tree of config/adapters.yaml in fp32, two adapters at a time, each in a slot."""

    def make(folder: Path) -> None:
        tree = Results(folder)
        shutil.copytree(demo.root / "demo-llama", folder / "demo-lora")
        path = tree.assembly("demo-lora", "fp32")
        assembly = Assembly.load(path)
        files = {graph.file: (path.parent / graph.file).read_bytes() for _, graph in assembly.graphs()}
        adapted_assembly, adapted = with_adapters(files, assembly, {"max_adapters": 2, "max_lora_rank": 8})
        for name, data in adapted_assembly.items():
            write_bytes(path.parent / name, data)
        adapted.save(path)
        build(path, "onnxruntime", tree.engines("demo-lora", "fp32", "onnxruntime"))
        folders = CONFIG.adapter_folders("demo-lora", [ROOT])
        sources = {name: str(place) for name, place in folders.items()}
        checkpoint = tree.checkpoint("demo-lora")
        resolve_adapters(sources, folders, checkpoint, 8, None, tree.adapters("demo-lora"))
        write_json(tree.config(), CONFIG.dump())

    return Results(shared.folder("lora-served", make))


def tuned_lora(folder: Path, demo: Results, shared: Shared) -> Results:
    """Make a copy of `served_lora` with a fine-tune, which has the same adapters."""
    tree = Results(Path(shutil.copytree(served_lora(demo, shared).root, folder, copy_function=os.link)))
    add_fine_tune(tree, "tuned-lora", base="demo-lora")
    for path in (tree.adapters, tree.checkpoint):
        shutil.copy(path("demo-lora"), path("tuned-lora"))
    models = {**CONFIG.models, "tuned-lora": CONFIG.models["demo-lora"]}
    write_json(tree.config(), CONFIG.model_copy(update={"models": models}).dump())
    return tree


def tuned_texts(results: Results) -> dict[str | None, str]:
    """Return what the fine-tune alone says with each adapter after the prompt of `LIGHT`."""
    model = open_model(f"{TUNED}/onnxruntime", results.root)
    tokenizer = open_tokenizer(f"{TUNED}/onnxruntime", results.root)
    texts = {}
    for name in LIGHT:
        texts[name] = "".join(delta.text for delta in generate(model, tokenizer, ["Light"], 16, adapter=name))
    assert len({*texts.values(), *LIGHT.values()}) == 6
    return texts
