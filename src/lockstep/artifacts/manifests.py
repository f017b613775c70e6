"""Read the manifests that a run needs: assembly, engines, weights. A path in, the checked document out, or InputError.

Types and ranges are checked, and that an assembly agrees with itself. Nothing behind it checks a type again: what a
bundle from elsewhere says chooses files, sizes of buffers and what is bound to what.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.dtypes import DTYPE_BITS
from lockstep.artifacts.files import read_json
from lockstep.artifacts.schema import (
    Check,
    Wrong,
    check,
    either,
    integer,
    items,
    mapping,
    number,
    one_of,
    optional,
    record,
    text,
)

REMEDY = "the file is damaged, or not one that a stage wrote: make it again, or take another bundle"
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

LARGEST = 2**31 - 1  # a dimension; TensorRT counts in 32 bits
_BYTES = integer(0, 2**62)
_SIZE = integer(1, LARGEST)
_DIGEST = text("[0-9a-f]{64}", "a sha256 in hexadecimal digits")
_NAME = text(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,1000}", "a name")
_FILE = text(r"(?!\.)[^/\\:\x00-\x1f\x7f\ud800-\udfff]{1,255}", "the name of a file beside it")
_PRECISION = one_of(*DTYPES)
_LAYERS = 10_000  # the deepest models have some hundred
_DEVICE = record({}, {"architecture": _NAME, "isa": items(_NAME, 1000)})

_IO = record(
    {
        "name": _NAME,
        "dtype": one_of("float32", "float16", "bfloat16", "int64"),
        "shape": items(
            either(
                _SIZE,
                one_of("num_tokens", "num_requests", "past_capacity"),
                words="a size, num_tokens, num_requests or past_capacity",
            ),
            most=8,
        ),
    }
)
_SLOT = record({"name": _NAME, "dtype": one_of(*DTYPES.values()), "shape": items(_SIZE, most=8)})
_IOS, _SLOTS, _TENSORS = items(_IO, 100), items(_SLOT, 10_000), items(_NAME, 10_000, least=1)
_GRAPH = record({"graph": _FILE, "sha256": _DIGEST, "inputs": _IOS, "outputs": _IOS}, {"slots": _SLOTS})
_HEADS = dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "value_head_dim"), _SIZE)
_KIND = record(
    {**_HEADS, "scale": number, "softcap": number, "window": integer(0, LARGEST), "prefill": _GRAPH, "decode": _GRAPH}
)
_PART = record({"class": _NAME, "slots": mapping(_TENSORS, _NAME)})
_TOKENIZER = {"tokenizer": optional(record({"file": _FILE, "sha256": _DIGEST}))}
_ASSEMBLY = record(
    {
        "precision": _PRECISION,
        "dtype": one_of(*DTYPES.values()),
        "hidden_size": _SIZE,
        "vocab_size": _SIZE,
        "num_layers": integer(1, _LAYERS),
        "classes": mapping(_GRAPH, _FILE),
        "kinds": mapping(_KIND, _FILE),
        "embedding": _PART,
        "layers": items(record({"block": _PART, "kind": _NAME, "exit": _PART}), most=_LAYERS, least=1),
        "eos_token_ids": items(integer(0, LARGEST), most=10_000),
        "max_position_embeddings": optional(_SIZE),
    },
    _TOKENIZER,
)
_ENGINE = record(
    {"file": _FILE, "sha256": _DIGEST, "graph_sha256": _DIGEST}, {"slots": _SLOTS, "parts": mapping(_TENSORS, _NAME)}
)
_ENGINES = record(
    {
        "backend": _NAME,
        "backend_version": _NAME,
        "precision": _PRECISION,
        "device": _DEVICE,
        "engines": mapping(_ENGINE, _FILE),
        "options": record({}, {name: optional(_SIZE) for name in ("max_batch_size", "max_seq_len", "max_num_tokens")}),
    }
)
_TENSOR = record(
    {
        "file": integer(0, 100_000),
        "offset": _BYTES,
        "length": _BYTES,
        "dtype": one_of(*DTYPE_BITS),
        "shape": items(_BYTES, most=16),
    }
)
_WEIGHTS = record({
    "precision": _PRECISION, "tensors": mapping(_TENSOR, _NAME),
    "files": items(record({"path": _NAME, "size": _BYTES, "sha256": _DIGEST}), most=100_000),
})  # fmt: skip


def read_assembly(path: str | os.PathLike) -> dict[str, Any]:
    """Raises InputError for a file that is no assembly, or whose parts do not fit together."""
    assembly = _read(path, formats.ASSEMBLY, _ASSEMBLY)
    check(assembly, _agrees, path, REMEDY)
    return assembly


def read_tokenizer(path: str | os.PathLike) -> dict[str, str] | None:
    """Return the assembly's entry of the tokenizer, {"file", "sha256"}; None where it has none.

    Raises InputError for a file that is no assembly.
    """
    return _read(path, formats.ASSEMBLY, record({}, _TOKENIZER)).get("tokenizer")


def read_engines(path: str | os.PathLike) -> dict[str, Any]:
    """Raises InputError for a file that is no manifest of engines."""
    return _read(path, formats.ENGINES, _ENGINES)


def read_weights(path: str | os.PathLike) -> dict[str, Any]:
    """Raises InputError for a file that is no manifest of weights. Where tensors lie is for whoever opens the files."""
    weights = _read(path, formats.WEIGHTS, _WEIGHTS)
    check(weights, _files_once, path, REMEDY)
    return weights


def _read(path: str | os.PathLike, format: str, schema: Check) -> dict[str, Any]:
    value = read_json(path, format)
    check(value, schema, path, REMEDY)
    return value


def _files_once(weights: Mapping[str, Any], where: str) -> None:
    """Each is mapped whole."""
    paths = [file["path"] for file in weights["files"]]
    if len(set(paths)) < len(paths):
        raise Wrong("files", "each file once", next(path for path in paths if paths.count(path) > 1))


def _agrees(assembly: Mapping[str, Any], where: str) -> None:
    """Each block reads what stands before it, in the type and shape it has there; attention has the sizes of its
    kind."""
    _same("num_layers", len(assembly["layers"]), assembly["num_layers"])
    _same("dtype", DTYPES[assembly["precision"]], assembly["dtype"])
    for name, kind in assembly["kinds"].items():
        _check_kind(f"kinds.{name}", kind, assembly["dtype"])
    values = {name: ("int64", ["num_tokens"]) for name in ("token_ids", "position_ids")} | {
        "logit_rows": ("int64", ["num_requests"])
    }
    _run(assembly, "embedding", assembly["embedding"], values)
    _same("hidden_size", values.get("hidden", ("", [None]))[1], ["num_tokens", assembly["hidden_size"]])
    for index, layer in enumerate(assembly["layers"]):
        _run(assembly, f"layers[{index}].block", layer["block"], values)
        kind = _named(assembly["kinds"], layer["kind"], f"layers[{index}].kind")
        _attend(f"layers[{index}].kind", kind, values)
        at_end = dict(values)
        _run(assembly, f"layers[{index}].exit", layer["exit"], at_end)
        _same("vocab_size", at_end.get("logits", ("", [None]))[1], ["num_requests", assembly["vocab_size"]])


def _run(assembly: Mapping[str, Any], where: str, part: Mapping[str, Any], values: dict[str, tuple[str, list]]) -> None:
    """A block: `values` is what stands there, by name, and gets what it makes."""
    block = _named(assembly["classes"], part["class"], f"{where}.class")
    _same(f"{where}.slots", sorted(part["slots"]), sorted(slot["name"] for slot in block.get("slots", [])))
    _unique(f"classes.{part['class']}", block)
    for io in block["inputs"]:
        _same(
            f"classes.{part['class']}: {io['name']}",
            (io["dtype"], io["shape"]),
            values.get(io["name"].removesuffix("_out")),
        )
    for io in block["outputs"]:
        if (
            not io["shape"]
            or io["shape"][0] not in ("num_tokens", "num_requests")
            or not all(isinstance(size, int) for size in io["shape"][1:])
        ):
            raise Wrong(f"classes.{part['class']}: {io['name']}", "num_tokens or num_requests, then sizes", io["shape"])
        values[io["name"].removesuffix("_out")] = io["dtype"], io["shape"]


def _attend(where: str, kind: Mapping[str, Any], values: dict[str, tuple[str, list]]) -> None:
    for phase in ("prefill", "decode"):
        for io in kind[phase]["inputs"]:
            if not io["name"].startswith("past_"):
                _same(
                    f"{where}: {phase}: {io['name']}",
                    (io["dtype"], ["num_tokens", *io["shape"][1:]]),
                    values.get(io["name"]),
                )
    made = next(io for io in kind["decode"]["outputs"] if io["name"] == "attention")
    values["attention"] = made["dtype"], ["num_tokens", *made["shape"][1:]]


def _check_kind(where: str, kind: Mapping[str, Any], dtype: str) -> None:
    heads, kv_heads, dim, value_dim = (
        kind[name] for name in ("num_heads", "num_kv_heads", "head_dim", "value_head_dim")
    )
    for phase, tokens, rows in (("prefill", "num_tokens", 1), ("decode", "num_requests", "num_requests")):
        inputs = {
            "query": [tokens, heads * dim],
            "key": [tokens, kv_heads * dim],
            "value": [tokens, kv_heads * value_dim],
            "position_ids": [tokens],
            "past_key": [rows, kv_heads, "past_capacity", dim],
            "past_value": [rows, kv_heads, "past_capacity", value_dim],
            "past_lengths": [rows],
        }
        outputs = {
            "attention": [tokens, heads * value_dim],
            "key_out": [tokens, kv_heads, dim],
            "value_out": [tokens, kv_heads, value_dim],
        }
        _unique(f"{where}.{phase}", kind[phase])
        _same(f"{where}.{phase}.outputs", sorted(io["name"] for io in kind[phase]["outputs"]), sorted(outputs))
        for io in (*kind[phase]["inputs"], *kind[phase]["outputs"]):
            _same(f"{where}.{phase}: {io['name']}", io["shape"], {**inputs, **outputs}.get(io["name"]))
            if io["name"] in ("past_key", "past_value", "key_out", "value_out"):  # what the cache holds
                _same(f"{where}.{phase}: {io['name']}", io["dtype"], dtype)


def _unique(where: str, graph: Mapping[str, Any]) -> None:
    names = [io["name"] for io in (*graph["inputs"], *graph["outputs"], *graph.get("slots", []))]
    _same(where, len(names), len(set(names)))


def _named(entries: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in entries:
        raise Wrong(where, f"one of {_words(sorted(entries))}", name)
    return entries[name]


def _same(where: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Wrong(where, "nothing of this name" if expected is None else _words(expected), found)


def _words(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "nothing"
    return str(value)
