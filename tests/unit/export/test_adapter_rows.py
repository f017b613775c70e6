"""Adapters' first products as rows of weights, and graphs without room for adapters, of several families."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from families import FAMILIES

from lockstep.artifacts.adapters import A_SUFFIX, IDS, rows_of
from lockstep.errors import CheckError
from lockstep.export.lora import with_adapters
from lockstep.onnx_tools import prepare
from lockstep.onnx_tools.adapted_graphs import WithoutAdapters
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.toolkit import run_passes
from shared import Shared

ROOM = {"max_adapters": 2, "max_lora_rank": 8}
OPTIONS = {"fuse_projections": True}
# Biases; fused q, k, v; transposed weights, which stay; three products as one.
NAMES = ("llama", "phi3", "gpt2", "llama, llama3 rope")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", [*NAMES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:])])
def test_the_rewritten_graph_computes_the_same(shared: Shared, family: str, precision: str) -> None:
    """`prepare` runs both on random numbers."""
    files, assembly = with_adapters(*shared.assembled(dict(FAMILIES[family].config), precision), ROOM)
    assert assembly.adapters is not None
    num_rewritten = 0
    for name in assembly.adapters.classes:
        graph = assembly.classes[name]
        model = onnx.load_from_string(files[graph.file])
        prepared = prepare.prepare(model, graph.signature.slots, OPTIONS, True)
        assert prepared is not None
        of_adapters = set[str]().union(*map(rows_of, prepared.parts))
        inputs = {value.name for value in prepared.model.graph.input if value.name.endswith(A_SUFFIX)}
        all_of_adapters = {slot.a for slot in assembly.adapters.classes[name].values()}
        assert of_adapters | (inputs - prepared.parts.keys()) == all_of_adapters
        for slot, parts in prepared.parts.items():
            num_weights = len(parts) - len(rows_of(slot))
            assert parts[num_weights:] == rows_of(slot) and not of_adapters & set(parts[:num_weights])
        fused = prepare.prepare(model, graph.signature.slots, OPTIONS)
        plain = fused.model if fused else model  # one product already, or none that is fused
        assert num_products(prepared.model) == num_products(plain) - len(of_adapters)
        num_rewritten += len(of_adapters)
    assert (num_rewritten == 0) == (family == "gpt2")


def num_products(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Gemm" for node in model.graph.node)


def test_rows_in_another_order_are_found(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    files, assembly = with_adapters(*shared.assembled(dict(FAMILIES["llama"].config), "fp32"), ROOM)
    slot_rows = prepare.slot_rows
    monkeypatch.setattr(prepare, "slot_rows", lambda feeds, parts, slot: slot_rows(feeds, parts, slot)[::-1])
    graph = assembly.classes["middle"]
    with pytest.raises(CheckError, match="the rewritten graph is not equivalent"):
        prepare.prepare(onnx.load_from_string(files[graph.file]), graph.signature.slots, OPTIONS, True)


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:]] + [NAMES[0]])
def test_a_graph_without_room_is_that_of_the_model_without_adapters(shared: Shared, family: str) -> None:
    before, plain = shared.assembled(dict(FAMILIES[family].config), "fp32")
    files, assembly = with_adapters(before, plain, ROOM)
    assert assembly.adapters is not None
    for name in assembly.adapters.classes:
        stripped = run_passes(onnx.load_from_string(files[assembly.classes[name].file]), WithoutAdapters())
        original = onnx.load_from_string(before[plain.classes[name].file])
        assert [value.name for value in stripped.graph.input] == [value.name for value in original.graph.input]
        assert [node.op_type for node in stripped.graph.node] == [node.op_type for node in original.graph.node]
        assert IDS not in stripped.SerializeToString().decode("latin-1")
        feeds = prepare.random_inputs(original)
        outputs = [open_session(model.SerializeToString()).run(None, dict(feeds)) for model in (original, stripped)]
        assert all(map(np.array_equal, *outputs))
