"""Quantised weights split over ranks: each rank's integers and scales are a part of the same file, and what the ranks
compute is what one computes."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import error_of
from families import FAMILIES
from pipeline import open_model, write_assembly
from quantized_models import LIMIT, build_model, check, validated

import fake_gpu
from lockstep import Advance, Model, ModelOptions, make_random_checkpoint
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.quantized import data_name, scales_name
from lockstep.artifacts.tensor_parallel import Shard
from lockstep.backends.builder import build
from lockstep.errors import CheckError
from lockstep.export.quantize import quantize
from lockstep.export.run import assemble
from lockstep.export.tracer import meta_model
from lockstep.targets import Results
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.weights import Weights, slot_array
from lockstep.weights.groups import dequantize

# Ranks, and small weights, have their own tests that run by day.
pytestmark = pytest.mark.long
GROUP = 16
# Rows of 64 and 96 numbers: each of two ranks has two and three whole groups of them.
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def config_of(family: str) -> dict[str, Any]:
    config = FAMILIES[family].config
    return {**config, **(SIZES if "hidden_size" in config else {"n_embd": 64})}


@functools.cache
def whole_precision(family: str) -> tuple[dict[str, bytes], Assembly]:
    config = config_of(family)
    return assemble(meta_model(config, "fp32"), config, "fp32", tensor_parallel=2)


def split(family: str, precision: str, group_size: int = GROUP) -> tuple[dict[str, bytes], Assembly]:
    return quantize(*whole_precision(family), precision, group_size)


def write(family: str, precision: str, source: Path, out: Path) -> None:
    write_assembly(*split(family, precision), source, out)


@pytest.fixture(scope="module", params=[("llama", "w4a16"), ("gpt_neox", "w8a16"), ("gpt2", "w4a16")], ids="-".join)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    """A model of two ranks through all stages but the checks: with biases and heads that ranks share; with query, key
    and value in one weight, and one sum of two branches; with weights that the checkpoint holds transposed."""
    family, precision = request.param
    root = tmp_path_factory.mktemp(family)
    (root / "config.json").write_text(json.dumps(config_of(family)))
    source = make_random_checkpoint(root / "config.json", 0, root / "source")
    terms = GoldenTerms(4, ("San Francisco is a", "Light"), 40)
    graphs = functools.partial(write, family, precision, source)
    return build_model(source, precision, ("all",), terms, root / "results", graphs), precision


def test_two_gpus_read_their_part_of_small_weights(results: tuple[Results, str], tmp_path: Path) -> None:
    quantized, precision = results
    if Assembly.load(quantized.assembly("model", precision)).model_type == "gpt2":
        pytest.skip("cuda has no kernel for its norms")
    pair = (quantized.assembly("model", precision), quantized.weights("model", precision))
    random = np.random.default_rng(0)
    limits = {name: getattr(LIMIT, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    alone = open_model(quantized, "model", precision, **limits)
    if precision == "w8a16":  # GPT-NeoX, whose query, key and value are one weight: ranks transpose their parts of it
        with pytest.raises(
            CheckError, match="have a CUDA kernel, found one of .*, Transpose in a form that has none; use"
        ):
            build(pair[0], "cuda", tmp_path / "engines.json", limits)
        return
    with fake_gpu.installed(name="cuda") as gpu:
        gpu.devices = 2
        split = Model.open(
            build(pair[0], "cuda", tmp_path / "engines.json", limits), *pair, options=ModelOptions(**limits)
        )
        tokens = random.integers(0, alone.vocab_size, 20)
        for start in (0, 20, 21, 22):
            expected, logits = (model.step([Advance(0, tokens, start)]) for model in (alone, split))
            # fp16 activations, of logits of standard deviation 1 or so.
            np.testing.assert_allclose(logits, expected, rtol=0, atol=0.02 * np.abs(expected).max())
            tokens = expected.argmax(axis=1)
        del split


@pytest.mark.exports
def test_two_ranks_say_what_the_dequantised_weights_say(results: tuple[Results, str], tmp_path: Path) -> None:
    quantized, precision = results
    validated(quantized, precision, "all", tmp_path)
    assert check(quantized, precision, "all", LIMIT, tmp_path)["result"] == "pass"


@pytest.mark.exports
def test_scales_of_another_rank_fail_validation(results: tuple[Results, str], tmp_path: Path) -> None:
    files, precision = results
    path = files.assembly("model", precision).with_name("wrong.json")
    value = read_json(files.assembly("model", precision))
    weights = value["tensor_parallel"]["classes"]["middle"]["weights"]
    scales = next(name for name in sorted(weights) if name.endswith("mlp.down_proj.weight.scales") or "4h_to_h" in name)
    weights[scales_name(scales.rpartition(".")[0])]["ranges"].reverse()
    write_json(path, value)
    with pytest.raises(CheckError, match="hidden: expected an error"):
        validated(files, precision, "all", tmp_path, path)


def test_ranks_read_the_file_that_one_rank_reads(results: tuple[Results, str]) -> None:
    """The weights are those of the model on one rank, and a rank's part of them is the part in full precision."""
    rank_files, precision = results
    assembly = Assembly.load(rank_files.assembly("model", precision))
    files, full = whole_precision("llama" if precision == "w4a16" else "gpt_neox")
    weights = Weights.open(rank_files.weights("model", precision))
    single_rank = quantize(files, replace(full, tensor_parallel=None), precision, GROUP)[1]
    assert single_rank.quantization == assembly.quantization  # all that `convert` reads of an assembly
    exact = dict(weights.dequantized())
    assert assembly.tensor_parallel is not None and full.tensor_parallel is not None
    num_slots = 0
    for layer, plain in zip(assembly.layers, full.layers, strict=True):
        for part, old in ((layer.block, plain.block), (layer.exit, plain.exit)):
            sharded = assembly.tensor_parallel.classes[part.graph]
            split_class = full.tensor_parallel.classes[old.graph]
            sizes = {slot.name: slot.sizes for slot in assembly.classes[part.graph].signature.slots}
            for slot in {name.removesuffix(".data") for name in part.slots if name.endswith(".data")}:
                names = data_name(slot), scales_name(slot)
                arrays = [slot_array(weights, part.slots[name], sizes[name]) for name in names]
                (tensor,) = old.slots[slot]
                for rank in range(2):
                    data, scales = (sharded.take_weight(*pair, rank) for pair in zip(names, arrays))
                    dequantized = dequantize(data, scales, GROUP)
                    assert np.array_equal(dequantized, split_class.take_weight(slot, exact[tensor], rank))
                    assert dequantized.size < exact[tensor].size
                    num_slots += 1
    assert num_slots >= 2 * 3 * 4


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "phi3", "cohere"])
def test_integers_and_scales_are_split_where_the_weight_is(family: str) -> None:
    """By rows, sections of a fused weight among them, or by whole groups."""
    assembly = split(family, "w4a16")[1]
    full = whole_precision(family)[1]
    assert assembly.tensor_parallel is not None and full.tensor_parallel is not None
    axes = set()
    for name, old in full.tensor_parallel.classes.items():
        new = assembly.tensor_parallel.classes[name].weights
        assert assembly.tensor_parallel.classes[name].first == old.first
        for slot, shard in old.weights.items():
            numbers = numbers_of(shard)
            if slot in new:  # a bias, or a head that is tied to the embedding
                assert new[slot] == shard
                continue
            assert new[data_name(slot)] == new[scales_name(slot)]
            unit = GROUP if shard.axis else 1
            for rank, rank_numbers in enumerate(numbers_of(new[data_name(slot)])):
                first_items = np.array(rank_numbers)[:, None] * unit
                assert (first_items + np.arange(unit)).ravel().tolist() == numbers[rank]
            axes.add(shard.axis)
    assert axes == {0, 1}


def numbers_of(shard: Shard) -> list[list[int]]:
    return [list(itertools.chain(*(range(*pair) for pair in rank))) for rank in shard.ranges]


def test_a_share_of_a_rank_that_is_no_whole_groups_is_refused() -> None:
    line = error_of(split, "llama", "w8a16", 32)
    assert line == (
        "group_size: expected a size that divides the 48 numbers of a row of model.layers.0.mlp.down_proj.weight that "
        "each of 2 ranks takes, found 32; choose another one, or another tensor_parallel"
    )


def test_engines_of_ranks_hold_no_weights(results: tuple[Results, str]) -> None:
    files, precision = results
    engines = files.engines("model", precision, "onnxruntime")
    entries: Mapping[str, Any] = read_json(engines)["engines"]
    assert all((engines.parent / entry["file"]).stat().st_size < 30_000 for entry in entries.values())
    again = engines.with_name("again") / "engines.json"
    build(files.assembly("model", precision), "onnxruntime", again)
    assert read_json(again) == read_json(engines)
