"""A model split over ranks computes what one rank does: every family, every shard, and the faults that would show."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from demo_model import CONFIG as DEMO_CONFIG
from demo_model import DEMO
from families import FAMILIES, some_families
from handmade import CONFIG, llama, make
from hypothesis import given
from hypothesis import strategies as st

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.reports import ServedReport
from lockstep.artifacts.tensor_parallel import Shard, ShardedClass, TensorParallel, attention_shards, heads_divide
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve
from lockstep.config import load
from lockstep.errors import CheckError, InputError
from lockstep.export import parity
from lockstep.export.reference_runner import ReferenceRunner
from lockstep.export.run import assemble, export
from lockstep.export.tracer import meta_model
from lockstep.runtime import Advance, Model, ModelOptions, Sampling
from lockstep.step.logits_pipeline import Sampler, most_likely, most_likely_of_ranks, most_likely_of_shard
from lockstep.targets import Results, Target
from lockstep.tolerances import Tolerances
from lockstep.verify import validate
from lockstep.verify.golden.check import check_engines
from lockstep.weights import Weights, convert, slot_array
from lockstep.weights.ranks import RankWeights
from real_server import RealServer
from shared import Shared
from some import some

# Both sides are fp32 on the same weights: what differs is the order of sums of a few hundred products. 1e-6 to 1e-5 of
# the logits' standard deviation is seen; the planted faults give 1e-2 and more.
TOLERANCE = 5e-5
ALWAYS = ("llama", "gpt_neox")


Splits = Callable[[str, int], "Split"]


@dataclass
class Split:
    """A family's model split over ranks, its random tensors, and the logits of one rank."""

    files: dict[str, bytes]
    assembly: Assembly
    tensors: dict[str, np.ndarray]
    sequences: list[np.ndarray]
    expected: list[np.ndarray]

    def error(self, assembly: Assembly) -> float:
        """Of the logits of all tokens, brought in chunks and mixed with another request's, over their deviation."""
        worst = parity.step_through(
            ReferenceRunner(self.files, assembly, self.tensors, len(self.sequences), 24), self.sequences
        )
        return parity.max_difference(worst, self.expected)

    @property
    def ranks(self) -> TensorParallel:
        assert self.assembly.tensor_parallel is not None
        return self.assembly.tensor_parallel

    def changed(self, name: str, change: Callable[[ShardedClass], ShardedClass]) -> Assembly:
        """With another table of one class."""
        classes = {**self.ranks.classes, name: change(self.ranks.classes[name])}
        return replace(self.assembly, tensor_parallel=replace(self.ranks, classes=classes))


@pytest.fixture(scope="session")
def split(shared: Shared) -> Splits:
    """By family and number of ranks."""
    return functools.cache(functools.partial(make_split, shared))


def make_split(shared: Shared, family: str, degree: int) -> Split:
    config = dict(FAMILIES[family].config)
    parts = shared.parts(config, "fp32")
    files, assembly = assemble(meta_model(config, "fp32"), config, "fp32", tensor_parallel=degree, traced=parts)
    tensors = parity.checkpoint_tensors(parity.reference_model(config, 0, 1.0))
    random = np.random.default_rng(0)
    sequences = [random.integers(0, assembly.vocab_size, length) for length in parity.LENGTHS]
    built = Split(files, assembly, tensors, sequences, [])
    runner = ReferenceRunner(files, replace(assembly, tensor_parallel=None), tensors, len(sequences), 24)
    built.expected += parity.step_through(runner, sequences)
    return built


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", some_families(*ALWAYS, sinks=False))
def test_ranks_compute_what_one_rank_does(split: Splits, family: str, degree: int) -> None:
    built = split(family, degree)
    assert built.error(built.assembly) < TOLERANCE


@pytest.mark.parametrize(("family", "middle", "exit"), [
    ("gpt_neox", 1, 1), pytest.param("cohere", 1, 1, marks=pytest.mark.long),
    pytest.param("phi", 1, 1, marks=pytest.mark.long), ("llama", 2, 2),
])  # fmt: skip
def test_attention_and_mlp_side_by_side_are_added_in_one_sum(
    split: Splits, family: str, middle: int, exit: int
) -> None:
    """Whatever order the model adds its branches in; an entry has none, for the first MLP is after the attention."""
    classes = split(family, 2).ranks.classes
    sums = {}
    for name, sharded in classes.items():
        sums[name] = sum(len(piece.sums) for piece in sharded.pieces)
    assert sums == {"entry": 0, "middle": middle, "exit": exit}


@pytest.mark.parametrize("family", ALWAYS)
def test_every_shard_is_a_slice_of_the_whole_and_together_they_are_it(split: Splits, family: str) -> None:
    """And all weights with more than one axis but norms, routers and latents are split."""
    built = split(family, 4)
    for name, sharded in built.ranks.classes.items():
        for slot in built.assembly.classes[name].signature.slots:
            full = np.arange(np.prod(slot.sizes)).reshape(slot.sizes)
            parts = [sharded.take_weight(slot.name, full, rank) for rank in range(4)]
            if slot.name in sharded.first:
                assert np.array_equal(parts[0], full) and not any(part.any() for part in parts[1:])
            elif slot.name in sharded.weights:
                assert {part.size for part in parts} == {parts[0].size} and parts[0].size < full.size
                assert set(np.concatenate([part.ravel() for part in parts])) == set(full.ravel())
            else:
                assert all(part is full for part in parts)


@given(st.integers(1, 3), st.integers(2, 5), st.integers(0, 2), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_what_is_taken_and_put_back_is_the_whole(unit: int, degree: int, axis: int, sections: list[int]) -> None:
    """Sections that lie one after another, as in a fused weight, each split over the ranks."""
    starts = np.cumsum([0, *(size * degree * unit for size in sections)]).tolist()
    ranges = []
    for rank in range(degree):
        places = [(start + rank * size * unit, size * unit) for start, size in zip(starts, sections)]
        ranges.append(tuple((first, first + length) for first, length in places))
    shard = Shard.from_json(Shard(axis, tuple(ranges)).to_json())
    shape = [2, 3, 2]
    shape[axis] = starts[-1]
    full = np.arange(np.prod(shape)).reshape(shape)
    parts = [shard.take(full, rank) for rank in range(degree)]
    assert all(part.shape == shard.shape(tuple(shape)) for part in parts)
    back = np.zeros_like(full)
    for rank, part in enumerate(parts):
        shard.put(back, rank, part)
    assert np.array_equal(back, full)


def by_heads(heads: list[int], kv_heads: list[int]) -> list[tuple[int, int]]:
    """(first, last) head of 12 numbers of a fused query, key and value of 4 and 2 heads."""
    fused = [*heads, *(4 + head for head in kv_heads), *(6 + head for head in kv_heads)]
    return [(12 * head, 12 * head + 12) for head in fused]


# By family and slot: how a rank's part reads in the terms of its layer, whole array, rank and ranks in.
FUSED: dict[tuple[str, str], Callable[[np.ndarray, int, int], np.ndarray]] = {
    ("phi3", "self_attn.qkv_proj.weight"): lambda full, rank, ranks: np.concatenate(
        [full[low:high] for low, high in by_heads(*heads_of(rank, ranks))]
    ),
    ("phi3", "mlp.gate_up_proj.weight"): lambda full, rank, ranks: np.concatenate(
        [half[rank * (80 // ranks) : (rank + 1) * (80 // ranks)] for half in (full[:80], full[80:])]
    ),
    ("gpt2", "attn.c_attn.weight"): lambda full, rank, ranks: full.reshape(48, 3, ranks, -1)[:, :, rank].reshape(
        48, -1
    ),
    ("gpt2", "attn.c_attn.bias"): lambda full, rank, ranks: full.reshape(3, ranks, -1)[:, rank].reshape(-1),
    ("gpt_neox", "attention.query_key_value.weight"): lambda full, rank, ranks: full.reshape(4, 3, 12, 48)[
        heads_of(rank, ranks)[0]
    ].reshape(-1, 48),
    ("mixtral", "experts.gate_up_proj"): lambda full, rank, ranks: full.reshape(4, 2, ranks, -1, 48)[
        :, :, rank
    ].reshape(4, -1, 48),
    ("mixtral", "experts.down_proj"): lambda full, rank, ranks: full.reshape(4, 48, ranks, -1)[:, :, rank],
}


def heads_of(rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """Of 4 heads in 2 groups those of a rank, and their key and value heads."""
    heads = list(range(4))[rank * 4 // ranks : (rank + 1) * 4 // ranks]
    return heads, sorted({head // 2 for head in heads})


@pytest.mark.parametrize(
    ("family", "name"), some(FUSED, *(key for key in FUSED if key[0] != "mixtral")), ids=lambda value: value
)
@pytest.mark.parametrize("ranks", some([2, 4]))
def test_fused_weights_are_cut_by_their_heads_halves_and_experts(
    split: Splits, family: str, name: str, ranks: int
) -> None:
    built = split(family, ranks)
    sharded = built.ranks.classes["middle"]
    (slot,) = (slot for slot in built.assembly.classes["middle"].signature.slots if slot.name.endswith(name))
    full = np.random.default_rng(0).standard_normal(slot.sizes)
    for rank in range(ranks):
        assert np.array_equal(sharded.take_weight(slot.name, full, rank), FUSED[family, name](full, rank, ranks))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.integers(2, 8))
def test_a_rank_has_the_keys_and_values_of_its_heads(
    kv_heads: int, group: int, head_dim: int, value_dim: int, ranks: int
) -> None:
    variant = SimpleNamespace(
        num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value_dim
    )
    if not heads_divide(variant.num_heads, kv_heads, ranks):
        return
    shards = attention_shards(variant, ranks)
    query, key = (np.repeat(np.arange(count), head_dim)[None] for count in (variant.num_heads, kv_heads))
    value, attention = (np.repeat(np.arange(count), value_dim)[None] for count in (kv_heads, variant.num_heads))
    for rank in range(ranks):
        heads = [rank * variant.num_heads // ranks + number for number in range(variant.num_heads // ranks)]
        theirs = sorted({head // group for head in heads})
        for name, array, expected in (
            ("query", query, np.repeat(heads, head_dim)),
            ("attention", attention, np.repeat(heads, value_dim)),
            ("key", key, np.repeat(theirs, head_dim)),
            ("value", value, np.repeat(theirs, value_dim)),
            ("past_key", np.arange(kv_heads)[None], theirs),
        ):
            assert shards[name].take(array, rank)[0].tolist() == list(expected), name


# --- planted faults


def exchanged(shard: Shard) -> Shard:
    return replace(shard, ranges=shard.ranges[::-1])


def exchange_weight(slot: str, sharded: ShardedClass) -> ShardedClass:
    """Give each rank another one's part of a weight."""
    return replace(sharded, weights={**sharded.weights, slot: exchanged(sharded.weights[slot])})


@pytest.mark.parametrize(("family", "slot"), [
    ("llama", "current.self_attn.q_proj.weight"), ("llama", "previous.self_attn.o_proj.weight"),
    ("llama", "previous.mlp.up_proj.weight"), ("llama", "previous.mlp.up_proj.bias"),
    ("llama", "previous.mlp.down_proj.weight"),
    # one of two branches
    ("gpt_neox", "previous.attention.dense.weight"), ("gpt_neox", "previous.mlp.dense_4h_to_h.weight"),
])  # fmt: skip
def test_a_shard_of_another_rank_shows(split: Splits, family: str, slot: str) -> None:
    actual = split(family, 2)
    assert actual.error(actual.changed("middle", functools.partial(exchange_weight, slot))) > 100 * TOLERANCE


def test_heads_of_another_rank_show(split: Splits) -> None:
    def exchange_keys(sharded: ShardedClass) -> ShardedClass:
        return replace(sharded, values={**sharded.values, "key": exchanged(sharded.values["key"])})

    actual = split("llama", 4)
    assert actual.error(actual.changed("middle", exchange_keys)) > 100 * TOLERANCE


@pytest.mark.parametrize(("family", "slot"), [
    ("llama", "previous.self_attn.o_proj.bias"), ("llama", "previous.mlp.down_proj.bias"),
    ("gpt_neox", "previous.attention.dense.bias"), ("gpt_neox", "previous.mlp.dense_4h_to_h.bias"),
])  # fmt: skip
def test_a_bias_that_every_rank_adds_shows(split: Splits, family: str, slot: str) -> None:
    """GPT-NeoX has two branches, each with one."""

    def add_on_all_ranks(sharded: ShardedClass) -> ShardedClass:
        return replace(sharded, first=tuple(name for name in sharded.first if name != slot))

    actual = split(family, 2)
    assert actual.error(actual.changed("middle", add_on_all_ranks)) > 100 * TOLERANCE


@pytest.mark.long
def test_a_sum_that_is_left_out_shows(tmp_path: Path, tiny: Results) -> None:
    """The table does not load: a later piece reads what nothing makes."""
    path = tmp_path / "assembly.json"
    value = read_json(tiny.assembly("tiny", "fp32"))
    value["tensor_parallel"]["classes"]["middle"]["pieces"][0]["sums"] = {}
    write_json(path, value)
    with pytest.raises(InputError, match=r"tensor_parallel\.graphs\.middle\.2: sum_1: expected nothing of this name"):
        Assembly.load(path)


# --- through the stages


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def degree(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def tiny(shared: Shared, degree: int) -> Results:
    folder = shared.folder(f"ranks-{degree}", lambda folder: make(folder, ["fp32", "fp16"], tensor_parallel=degree))
    return Results(folder / "results")


def open_model(tiny: Results, precision: str) -> Model:
    files = tiny.engines("tiny", precision, "onnxruntime"), tiny.assembly("tiny", precision)
    return Model.open(*files, tiny.weights("tiny", precision), options=ModelOptions(max_batch_size=4, max_seq_len=256))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("fp16", 2e-2)])  # as in test_runtime.py
def test_logits_are_those_of_a_forward_by_hand(tiny: Results, precision: str, tolerance: float) -> None:
    sequence = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 24)
    expected = llama(Weights.open(tiny.weights("tiny", precision)), CONFIG, sequence, 3)
    model = open_model(tiny, precision)
    rows = [model.step([Advance(0, sequence[:3], 0)])[0]]
    rows += [model.step([Advance(0, sequence[i : i + 1], i)])[0] for i in range(3, 24)]
    assert abs(np.stack(rows) - expected[2:]).max() < tolerance


def test_a_request_has_the_same_bits_whatever_runs_beside_it(tiny: Results) -> None:
    random = np.random.default_rng(1)
    prompts = [random.integers(0, CONFIG["vocab_size"], length) for length in (40, 7, 21)]
    model = open_model(tiny, "fp32")
    alone = [model.step([Advance(0, prompt, 0)])[0] for prompt in prompts]
    together = model.step([Advance(slot, prompt, 0) for slot, prompt in enumerate(prompts)])
    assert np.array_equal(together, np.stack(alone))
    next_tokens = [np.array([int(row.argmax())]) for row in together]
    decoded = model.step([Advance(slot, next_tokens[slot], len(prompts[slot])) for slot in range(3)])
    model.release(1)
    again = open_model(tiny, "fp32")
    again.step([Advance(3, prompts[2], 0)])
    assert np.array_equal(again.step([Advance(3, next_tokens[2], len(prompts[2]))])[0], decoded[2])


def test_ranks_tell_their_own_tokens_and_draw_from_the_whole_logits(tiny: Results) -> None:
    """A greedy step gathers tokens alone; one that draws gathers the logits that another model gives."""
    model = open_model(tiny, "fp32")
    twin = open_model(tiny, "fp32")
    prompts = [Advance(slot, np.arange(3 + slot, 20), 0) for slot in range(3)]
    tokens = model.step_tokens(prompts)
    assert tokens.tolist() == most_likely(twin.step(prompts)).tolist()
    sampler = Sampler(Sampling(temperature=0.9, seed=4))
    model.set_sampling(1, sampler)
    for _ in range(2):
        advances = [Advance(slot, tokens[slot : slot + 1], model.length(slot)) for slot in range(3)]
        logits = twin.step(advances)
        tokens = model.step_tokens(advances)
        assert tokens[[0, 2]].tolist() == most_likely(logits)[[0, 2]].tolist()
        assert tokens[1] == sampler(logits[1], model.length(1)).token


@given(st.lists(st.lists(st.sampled_from([-1.5, 0.0, 2.0, 2.5, np.inf, -np.inf, np.nan]), min_size=12, max_size=12)))
def test_the_tokens_that_ranks_tell_are_those_of_the_whole_logits(rows: list[list[float]]) -> None:
    """Of equals the lowest id, across ranks too; none where one of them has NaN or infinity."""
    logits = np.array(rows, np.float32).reshape(len(rows), 12)
    for degree in (2, 3, 4):
        parts = np.split(logits, degree, axis=1)
        results = [most_likely_of_shard(part, rank * 12 // degree) for rank, part in enumerate(parts)]
        with np.errstate(invalid="ignore"):
            assert most_likely_of_ranks(results).tolist() == most_likely(logits).tolist()


@pytest.mark.long
@pytest.mark.traces
@pytest.mark.parametrize("degree", [2, 4], indirect=True)
def test_an_export_is_the_same_bytes_again(tiny: Results, degree: int, tmp_path: Path) -> None:
    again = export(tiny.checkpoint("tiny"), "fp32", tmp_path / "assembly.json", degree)
    first = tiny.assembly("tiny", "fp32").parent
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.parent.iterdir())
    assert all((first / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_engines_serve_every_rank_and_hold_no_weights(tiny: Results) -> None:
    """Two layers or three, two ranks or four: embedding, entry, three pieces of a block and of the exit, attention."""
    engines = read_json(tiny.engines("tiny", "fp32", "onnxruntime"))["engines"]
    pieces = [*(f"exit.{number}" for number in (1, 2, 3)), *(f"middle.{number}" for number in (1, 2, 3))]
    assert sorted(engines) == sorted(["attention.decode", "attention.prefill", "embedding", "entry.1", *pieces])
    folder = tiny.engines("tiny", "fp32", "onnxruntime").parent
    assert all((folder / entry["file"]).stat().st_size < 20_000 for entry in engines.values())


def test_a_rank_reads_whole_rows_where_they_lie(tiny: Results) -> None:
    """Rows of a weight lie together in the checkpoint's file, columns with gaps: nothing is copied."""
    weights = Weights.open(tiny.weights("tiny", "fp32"))
    assembly = Assembly.load(tiny.assembly("tiny", "fp32"))
    assert assembly.tensor_parallel is not None
    part = assembly.layers[1].block
    slots = assembly.classes[part.graph].signature.slots
    sharded = assembly.tensor_parallel.classes[part.graph]
    for rank in range(assembly.tensor_parallel.degree):
        rank_weights = RankWeights(weights, part.slots, slots, sharded, rank)
        for slot in slots:
            full = slot_array(weights, part.slots[slot.name], slot.sizes)
            actual = rank_weights[slot.name]
            shard = sharded.weights.get(slot.name)
            assert actual.shape == (shard.shape(slot.shape) if shard else slot.shape)
            assert np.shares_memory(actual, full)
            assert actual.flags.c_contiguous == (shard is None or shard.axis == 0)
            assert (rank_weights.location(slot.name) is None) == (shard is not None)


def test_validation_runs_the_ranks(shared: Shared, tmp_path: Path) -> None:
    """The demo at two ranks; with two ranks' parts of one weight exchanged it is refused."""
    results = Results(shared.folder("demo-ranks", _make_demo))
    name = "demo-llama"
    limits = DEMO_CONFIG.limits.plain()
    tolerance = DEMO_CONFIG.tolerance(name, "fp32")
    checked = functools.partial(_validate, results, tolerance, limits.max_seq_len)
    assert read_json(checked(results.assembly(name, "fp32"), tmp_path / "validate.json"))["result"] == "pass"
    wrong = results.assembly(name, "fp32").with_name("wrong.json")
    value = read_json(results.assembly(name, "fp32"))
    shards = value["tensor_parallel"]["classes"]["middle"]["weights"]
    shards["previous.mlp.gate_proj.weight"]["ranges"].reverse()
    write_json(wrong, value)
    with pytest.raises(CheckError, match=r"layer 0 \(block entry, attention\): hidden: expected an error"):
        checked(wrong, tmp_path / "wrong.json")


@pytest.mark.long
def test_the_demo_is_golden_and_served_on_two_ranks(references: Results, shared: Shared, tmp_path: Path) -> None:
    """With prefix reuse, under load, behind an engine that was killed; and by the command with its option."""
    from lockstep.verify.served import check as served  # loads what a server needs
    from lockstep_serve.checked import open_server

    results = Results(shared.folder("demo-ranks", _make_demo))
    name = "demo-llama"
    target = Target(name, "fp32", "all", "onnxruntime")
    limits = DEMO_CONFIG.limits.plain()
    tolerance = DEMO_CONFIG.tolerance(name, "fp32")
    assembly = results.assembly(name, "fp32")
    weights = results.weights(name, "fp32")
    engines = results.engines(name, "fp32", "onnxruntime")
    out = tmp_path / "golden.json"
    reference = references.reference(name, "all")
    checked = assembly, weights, engines, reference, target, tolerance, limits, out, tmp_path / "speed.json"
    check_engines(*checked, [prompt.expected["all"] for prompt in DEMO_CONFIG.models[name].golden.prompts])
    assert read_json(out)["result"] == "pass"
    arguments = {"limits": limits, "target": target, "tolerance": tolerance, "out": tmp_path / "served.json"}
    served.check(assembly, weights, engines, reference, out, threads=1, open_server=open_server, **arguments)
    report = ServedReport.load(tmp_path / "served.json")
    assert report.batch_invariant and report.tokens_differing == 0 and report.prefix_hit_tokens >= 64


@pytest.mark.long
def test_serve_takes_the_number_of_ranks_that_a_target_was_exported_for(shared: Shared, tmp_path: Path) -> None:
    tree = tmp_path / "results"
    shutil.copytree(shared.folder("demo-ranks", _make_demo), tree)
    write_json(Results(tree).config(), DEMO_CONFIG.dump())
    with RealServer(tree, "--tensor-parallel", 2) as server:
        body = {"model": "demo-llama", "prompt": "San Francisco is a", "max_tokens": 4, "temperature": 0}
        assert server.request("POST", "/v1/completions", body)[0] == 200
    command = [sys.executable, "-m", "lockstep", "serve", "demo-llama/fp32/all", "--results", str(tree)]
    ended = subprocess.run([*command, "--tensor-parallel", "4"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        2,
        "lockstep: error: --tensor-parallel: expected 2, for demo-llama/fp32/all/onnxruntime was exported for that "
        "many, found 4; set tensor_parallel: 4 for demo-llama in the config and run `lockstep run`\n",
    )


def _make_demo(folder: Path) -> None:
    results = Results(folder)
    checkpoint = resolve(str(DEMO), DEMO, results.checkpoint("demo-llama"))
    export(checkpoint, "fp32", results.assembly("demo-llama", "fp32"), 2)
    convert(checkpoint, "fp32", results.weights("demo-llama", "fp32"))
    assembly = results.assembly("demo-llama", "fp32")
    build(assembly, "onnxruntime", results.engines("demo-llama", "fp32", "onnxruntime"))


def _validate(results: Results, tolerance: Tolerances, length: int, assembly: Path, out: Path) -> Path:
    files = results.weights("demo-llama", "fp32"), results.checkpoint("demo-llama")
    return validate.run(assembly, *files, 2, tolerance, length, out)


# --- bad input


@pytest.mark.exports
@pytest.mark.parametrize(
    ("settings", "message"),
    some([
        ({"tensor_parallel": 3}, "expected a divisor of the 4 attention heads, and a divisor or a multiple of the 2 "),
        ({"tensor_parallel": 4, "intermediate_size": 66}, "mlp.down_proj.weight: 66 inputs do not divide by 4 ranks"),
    ]),
)  # fmt: skip
def test_a_model_that_does_not_divide_is_refused(settings: dict[str, Any], message: str) -> None:
    degree = settings.pop("tensor_parallel")
    config = {**CONFIG, **settings}
    with pytest.raises(InputError, match=r"^tensor_parallel: ") as refused:
        assemble(meta_model(config, "fp32"), config, "fp32", tensor_parallel=degree)
    assert message in str(refused.value)


@pytest.mark.parametrize(("lines", "message"), [
    ("tensor_parallel: 0", "expected at least 1; found 0"),
    ("tensor_parallel: 17", "expected at most 16; found 17"),
    ("tensor_parallel: two", "expected an integer; found 'two'"),
    ("tensor_parallel: 2\n    backends: [onnxruntime, openvino]",
        "expected 1 for backend openvino; several ranks"),
])  # fmt: skip
def test_a_config_that_asks_for_what_cannot_be_is_refused(lines: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"models:\n  m:\n    source: x\n    {lines}\n    golden: {{prompts: [{{text: a}}]}}\n")
    with pytest.raises(InputError, match=r"models\.m\.tensor_parallel: ") as refused:
        load.load(path)
    assert message in str(refused.value)


def some_shard(ranks: dict[str, Any]) -> dict[str, Any]:
    """Return the ranges of a weight of which each rank has another part."""
    weights = ranks["classes"]["entry"]["weights"]
    return next(shard for name, shard in weights.items() if "q_proj" in name)


def cut(ranges: list[list[list[int]]], rank: int, first: int, last: int) -> None:
    """Cut off the last number of a rank, and move both parts: they overlap another rank, and leave a hole.

    All ranks have as many numbers as before, and the first and the last number of all are there.
    """
    ((low, high),) = ranges[rank]
    ranges[rank] = [[low + first, high - 1 + first], [high - 1 + last, high + last]]


def damaged(change: Callable[[dict[str, Any]], None], tiny: Results, path: Path) -> str:
    value = read_json(tiny.assembly("tiny", "fp32"))
    change(value["tensor_parallel"])
    write_json(path, value)
    with pytest.raises(InputError) as refused:
        Assembly.load(path)
    return str(refused.value)


@pytest.mark.parametrize(("change", "message"), [
    (lambda ranks: ranks.update(degree=3), "tensor_parallel"),
    (lambda ranks: ranks["classes"].pop("middle"), "tensor_parallel.classes: expected entry, exit, middle"),
    (lambda ranks: ranks["kinds"]["attention"].update(num_heads=3), "tensor_parallel.kinds.attention"),
    (lambda ranks: ranks["classes"]["entry"]["weights"].popitem(), "tensor_parallel.graphs.entry.1: "),
    (lambda ranks: next(iter(ranks["classes"]["entry"]["weights"].values()))["ranges"][0][0].reverse(),
        "numbers within"),
    (lambda ranks: cut(some_shard(ranks)["ranges"], 0, 0, 1), "each at a rank or a group of them, found '"),
    (lambda ranks: cut(some_shard(ranks)["ranges"], 1, -1, 0), "at ranks none"),
    (lambda ranks: some_shard(ranks)["ranges"].__setitem__(1, some_shard(ranks)["ranges"][0]), "at ranks none"),
    (lambda ranks: ranks["classes"]["middle"]["pieces"].pop(), "tensor_parallel.classes.middle.pieces: slots"),
])  # fmt: skip
def test_a_damaged_table_is_one_line(
    change: Callable[[dict[str, Any]], None], message: str, tiny: Results, tmp_path: Path
) -> None:
    actual = damaged(change, tiny, tmp_path / "assembly.json")
    assert message in actual and "\n" not in actual
