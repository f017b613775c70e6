"""Attention sinks: a learned logit next to the scores of each head, which comes to attention with the query."""

from __future__ import annotations

import json

import pytest
import test_mxfp4
from families import FAMILIES

from lockstep.artifacts.assembly import Assembly
from lockstep.errors import InputError
from lockstep.export import attention
from lockstep.export.run import assemble, export_config
from lockstep.export.tracer import meta_model
from lockstep_gpu.attention.variants import why_not_fused

CONFIG = FAMILIES["gpt_oss"].config


@pytest.mark.long
@pytest.mark.exports
def test_sinks_come_behind_the_numbers_of_their_head(tmp_path):
    export_config(CONFIG, "fp16", tmp_path)
    assembly = Assembly.load(tmp_path / "assembly.json")
    for variant in assembly.variants.values():
        assert variant.sinks and variant.query_dim == variant.head_dim + 1
        assert why_not_fused(variant, "float16") is None
        for graph in variant.phases().values():
            sizes = {io.name: io.shape[1] for io in graph.signature.inputs if io.name in ("query", "key")}
            assert sizes == {"query": 4 * 17, "key": 2 * 16}
    raw = json.loads((tmp_path / "assembly.json").read_text())
    assert all(variant["sinks"] is True for variant in raw["kinds"].values())


def forgotten(build, *scores):
    sinks = build.sinks
    build.sinks = None
    try:
        return _weights(build, *scores)
    finally:
        build.sinks = sinks


def of_another_head(build, *scores):
    last = build.ints(-1, build.batchless.num_kv_heads, build.group)
    turned = build.op("Transpose", build.op("Reshape", build.sinks, last), perm=[0, 2, 1])
    sinks = build.sinks
    build.sinks = build.op("Reshape", turned, build.ints(-1, build.batchless.num_heads))
    try:
        return _weights(build, *scores)
    finally:
        build.sinks = sinks


_weights = attention.AttentionBuilder.weights


@pytest.mark.long
@pytest.mark.traces
@pytest.mark.parametrize("fault", [forgotten, of_another_head])
def test_sinks_that_are_wrong_are_caught_before_anything_is_written(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(attention.AttentionBuilder, "weights", fault)
    with pytest.raises(InputError, match="its split form differs from transformers by"):
        export_config(CONFIG, "fp32", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.exports
def test_ranks_are_refused_by_the_reason(shared):
    config = test_mxfp4.CONFIG
    with pytest.raises(InputError, match="tensor_parallel: .* sinks; use one rank"):
        assemble(meta_model(config, "fp32"), config, "fp32", tensor_parallel=2, traced=shared.parts(config, "fp32"))
