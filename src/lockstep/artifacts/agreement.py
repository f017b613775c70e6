"""Does an assembly agree with itself: each block with what stands before it, attention with its variant's sizes?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.dtypes import PRECISION_NAMES
from lockstep.artifacts.schema import Wrong
from lockstep.artifacts.signature import IO, Signature

if TYPE_CHECKING:
    from lockstep.artifacts.assembly import Assembly, AttentionVariant, Part

Values = dict[str, tuple[str, list[int | str]]]  # what stands at a place of the model, by name


def agrees(assembly: Assembly, num_layers: int) -> None:
    """Raise Wrong for the first place where the assembly does not fit together. num_layers: what its file says."""
    _same("num_layers", len(assembly.layers), num_layers)
    _same("dtype", PRECISION_NAMES[assembly.precision], assembly.dtype)
    for name, variant in assembly.variants.items():
        _check_variant(f"kinds.{name}", variant, assembly.dtype)
    values: Values = {
        "token_ids": ("int64", ["num_tokens"]),
        "position_ids": ("int64", ["num_tokens"]),
        "logit_rows": ("int64", ["num_requests"]),
    }
    _run(assembly, "embedding", assembly.embedding, values)
    _same("hidden_size", values.get("hidden", ("", [None]))[1], ["num_tokens", assembly.hidden_size])
    for index, layer in enumerate(assembly.layers):
        _run(assembly, f"layers[{index}].block", layer.block, values)
        _attend(f"layers[{index}].kind", _named(assembly.variants, layer.variant, f"layers[{index}].kind"), values)
        at_end = dict(values)
        _run(assembly, f"layers[{index}].exit", layer.exit, at_end)
        _same("vocab_size", at_end.get("logits", ("", [None]))[1], ["num_requests", assembly.vocab_size])


def _run(assembly: Assembly, where: str, part: Part, values: Values) -> None:
    """A block: `values` gets what it makes."""
    signature = _named(assembly.classes, part.graph, f"{where}.class").signature
    _same(f"{where}.slots", sorted(part.slots), sorted(slot.name for slot in signature.slots))
    _unique(f"classes.{part.graph}", signature)
    for io in signature.inputs:
        _same(f"classes.{part.graph}: {io.name}", _type(io), values.get(io.key))
    for io in signature.outputs:
        if (
            not io.shape
            or io.shape[0] not in ("num_tokens", "num_requests")
            or not all(isinstance(size, int) for size in io.shape[1:])
        ):
            raise Wrong(f"classes.{part.graph}: {io.name}", "num_tokens or num_requests, then sizes", list(io.shape))
        values[io.key] = _type(io)


def _attend(where: str, variant: AttentionVariant, values: Values) -> None:
    for phase, graph in variant.phases().items():
        for io in graph.signature.inputs:
            if not io.name.startswith("past_"):
                _same(f"{where}: {phase}: {io.name}", _of_tokens(io), values.get(io.name))
    values["attention"] = _of_tokens(next(io for io in variant.decode.signature.outputs if io.name == "attention"))


def _check_variant(where: str, variant: AttentionVariant, dtype: str) -> None:
    heads, kv_heads, dim, value_dim = (
        variant.num_heads,
        variant.num_kv_heads,
        variant.head_dim,
        variant.value_head_dim,
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
        signature = variant.phases()[phase].signature
        _unique(f"{where}.{phase}", signature)
        _same(f"{where}.{phase}.outputs", sorted(io.name for io in signature.outputs), sorted(outputs))
        for io in (*signature.inputs, *signature.outputs):
            _same(f"{where}.{phase}: {io.name}", list(io.shape), {**inputs, **outputs}.get(io.name))
            if io.name in ("past_key", "past_value", "key_out", "value_out"):  # what the cache holds
                _same(f"{where}.{phase}: {io.name}", io.dtype, dtype)


def _type(io: IO) -> tuple[str, list[int | str]]:
    return io.dtype, list(io.shape)


def _of_tokens(io: IO) -> tuple[str, list[int | str]]:
    return io.dtype, ["num_tokens", *io.shape[1:]]


def _unique(where: str, signature: Signature) -> None:
    names = [io.name for io in (*signature.inputs, *signature.outputs, *signature.slots)]
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
