"""The entries of each manifest in its file: other keys would be another format, and other digests."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.artifacts.adapters import AdaptersManifest, AdapterSources
from lockstep.artifacts.assembly import BoundBlock, FileEntry, Layer, Uncut
from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.document import JsonObject, reader
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.fetched import Fetched
from lockstep.artifacts.tensor_parallel import TensorParallel
from lockstep.artifacts.weights import WeightsManifest
from lockstep_gpu.backends.cuda.kernels_file import KernelsFile
from lockstep_gpu.backends.tensorrt.tactics import TacticsRecord

SHA = "ab" * 32
FILE = {"path": "w.safetensors", "size": 8, "sha256": SHA}
PLACE = {"file": "w.safetensors", "offset": 0, "length": 8, "dtype": "F16", "shape": [2, 2]}
SLOT = {"name": "w", "dtype": "float16", "shape": [2, 2]}
GRAPH = {
    "graph": "a.onnx",
    "sha256": SHA,
    "inputs": [{"name": "hidden", "dtype": "float16", "shape": ["num_tokens", 2]}],
    "outputs": [{"name": "hidden_out", "dtype": "float16", "shape": ["num_tokens", 2]}],
}
HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 2, "value_head_dim": 2}
VARIANT = {**HEADS, "scale": 0.5, "softcap": 0, "window": 0, "prefill": GRAPH, "decode": GRAPH}
LORA = {"a": "a", "b": "b", "columns": 8, "rank": 8, "rows": ""}
PRODUCT: dict[str, Any] = {
    "input": "x", "output": "y", "slots": ["w"], "bits": 16, "group_size": 0, "in_features": 2, "out_features": 2,
}  # fmt: skip
KERNEL: dict[str, Any] = {
    "name": "k", "source": "", "arguments": [["x", "rows"]], "outputs": ["y"], "rows": "num_tokens", "blocks": 1,
    "threads": 32,
}  # fmt: skip
DOCUMENTS: dict[str, tuple[type[JsonObject], dict[str, Any]]] = {
    "source, of the hub": (Fetched,
        {"format": "lockstep.source/1", "source": "hf:a/b", "files": [FILE], "commit": "c", "repository": "a/b"} | {
            "revision": "main"}),
    "source, random": (Fetched, {"format": "lockstep.source/1", "source": "random:a", "files": [], "seed": 0}),
    "source, GGUF": (Fetched,
        {"format": "lockstep.source/1", "source": "a.gguf", "files": [], "gguf": {"sha256": SHA, "size": 8}}),
    "checkpoint": (CheckpointManifest,
        {"format": "lockstep.checkpoint/1", "source": "m", "folder": "../m", "files": [FILE], "model_type": "llama",
            "num_hidden_layers": 1, "config": {"deep": [{}]}, "tensors": {"w": PLACE},
            "unindexed": [{"file": "w.safetensors", "tensor": "momentum"}], "commit": "c",
            "quantization": {"group_size": 32, "bits": {"w": 4}, "zero_points": True}}),
    "checkpoint without weights": (CheckpointManifest,
        {"format": "lockstep.checkpoint/1", "source": "m", "folder": ".", "files": [], "model_type": "llama"} | {
            "num_hidden_layers": 1, "config": {}, "tensors": {}, "unindexed": []}),
    "weights": (WeightsManifest,
        {"format": "lockstep.weights/1", "precision": "w4a16", "group_size": 32, "files": [FILE]} | {
            "tensors": {"w": {**PLACE, "file": 0}}}),
    "engines": (EngineSetManifest,
        {"format": "lockstep.engines/1",
            "backend": "cuda",
            "backend_version": "1",
            "builder_revision": 0,
            "precision": "fp16",
            "device": {"architecture": "x", "isa": ["avx2"], "more": 1},
            "options": {"max_batch_size": None, "opset": 20},
            "engines": {
                "a": {"file": "a.plan", "sha256": SHA, "graph_sha256": SHA, "slots": [SLOT], "parts": {"w": ["v"]}},
                "b": {"file": "b.plan", "sha256": SHA, "graph_sha256": SHA, "tactics": SHA}},
            "digest": SHA,
            "tactics": {"mode": "free"}}),
    "adapters": (AdaptersManifest,
        {"format": "lockstep.adapters/1",
            "adapters": {
                "poet": {"source": "poet", "folder": "../poet", "files": [FILE], "rank": 8, "scale": 2,
                    "base_model": "", "modules": {"q_proj": {"a": PLACE, "b": PLACE}}, "commit": "c"}}}),
    "adapter sources": (AdapterSources,
        {"format": "lockstep.adapter_sources/1", "adapters": {"poet": {"source": "hf:a/b", "commit": "c"}}} | {
            "files": [FILE]}),
    "chat template": (ChatTemplate,
        {"format": "lockstep.chat_template/1", "template": "{{ x }}", "special_tokens": {"bos_token": ""}}),
    "kernels": (KernelsFile,
        {"format": "lockstep.kernels/1",
            "inputs": {"x": ["float16", ["num_tokens", 2]]},
            "outputs": {"y": ["float16", ["num_tokens", 2]]},
            "inner": {"z": ["num_tokens", 2]},
            "steps": [{"kernel": KERNEL}, {"products": [{**PRODUCT, "lora": LORA}, {**PRODUCT, "lora": None}]}]}),
    "tactics": (TacticsRecord,
        {"format": "lockstep.tactics/1", "made_by": {"version": "10"}, "cache_sha256": SHA,
            "engines": {
                "a": {"graph_sha256": SHA,
                    "layers": [{"name": "l", "formats": ["fp16"], "kind": "gemm", "tactic": "t"}]}},
            "cached": {"key": "t"}}),
}  # fmt: skip
PARTS: dict[str, tuple[type, dict[str, Any]]] = {
    "layer": (
        Layer,
        {"block": {"class": "middle", "slots": {"w": ["t"]}}, "kind": "full", "exit": {"class": "e", "slots": {}}},
    ),
    "block": (BoundBlock, {"class": "embedding", "slots": {"w": ["t"]}}),
    "whole model": (Uncut, {**GRAPH, "slots": [SLOT], "tensors": {"w": ["t"]}}),
    "tokenizer": (FileEntry, {"file": "tokenizer.json", "sha256": SHA}),
    "ranks": (
        TensorParallel,
        {
            "degree": 2,
            "graphs": {"a.0": GRAPH},
            "classes": {
                "a": {
                    "pieces": [{"class": "a.0", "sums": {"part": "sum"}}],
                    "values": {"query": {"axis": 1, "ranges": [[[0, 2]], [[2, 4]]]}},
                    "weights": {"w": {"axis": 0, "ranges": [[[0, 1]], [[1, 2]]]}},
                    "first": ["bias"],
                }
            },
            "kinds": {"full": VARIANT},
        },
    ),
}


@pytest.mark.parametrize(("kind", "value"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_document_has_the_entries_of_its_format(kind: type[JsonObject], value: dict[str, Any]) -> None:
    assert kind.from_json(value).to_json() == value


@pytest.mark.parametrize(("kind", "value"), PARTS.values(), ids=PARTS)
def test_a_part_of_an_assembly_has_the_entries_of_its_format(kind: type, value: dict[str, Any]) -> None:
    assert JsonObject.to_json(reader(kind)(value)) == value
