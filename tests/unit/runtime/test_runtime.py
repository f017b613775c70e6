"""The step: any mix of requests, in any order and any chunks, gives what each gives alone, and what a forward by hand
gives."""

import shutil

import numpy as np
import onnx
import pytest
from handmade import CONFIG, llama, make

from lockstep.artifacts.files import read_json, write_json
from lockstep.errors import InputError
from lockstep.runtime import Advance, Model, ModelOptions
from lockstep.targets import Results
from lockstep.weights import Weights

# Largest error of logits of standard deviation 1. fp32: sums of some hundred products in another order, 1e-6 seen.
# fp16: weights are the rounded ones on both sides; the rest is rounding of the values between engines, 2**-11 each,
# 3e-3 seen.
TOLERANCE = {"fp32": 2e-5, "fp16": 2e-2}


@pytest.fixture(scope="module")
def tiny(shared):
    return Results(shared.folder("tiny", lambda folder: make(folder, ["fp32", "fp16"])) / "results")


def open_model(tiny, precision="fp32", layers="all", **limits):
    return Model.open(
        tiny.engines("tiny", precision, "onnxruntime"), tiny.assembly("tiny", precision),
        tiny.weights("tiny", precision), layers, ModelOptions(**{"max_batch_size": 4, "max_seq_len": 256} | limits),
    )  # fmt: skip


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG["vocab_size"], count)


def alone(tiny, sequence, precision="fp32", layers="all"):
    """Logits [len(sequence), vocab]: the first 3 tokens as a prompt, then one at a time."""
    model = open_model(tiny, precision, layers)
    rows = [model.step([Advance(0, sequence[:3], 0)])[0]]
    rows += [model.step([Advance(0, sequence[i : i + 1], i)])[0] for i in range(3, len(sequence))]
    return np.stack(rows)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("layers", [1, 2, "all"])
def test_logits_are_those_of_a_forward_by_hand(tiny, precision, layers):
    sequence = tokens(24)
    expected = llama(Weights.open(tiny.weights("tiny", precision)), CONFIG, sequence, 3 if layers == "all" else layers)[
        2:
    ]
    actual = alone(tiny, sequence, precision, layers)
    assert actual.dtype == np.float32 and 0.5 < expected.std() < 2  # the tolerance is for this scale
    assert abs(actual - expected).max() < TOLERANCE[precision]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_low_memory_gives_the_same(tiny, precision):
    advance = [Advance(0, tokens(9), 0)]
    full, low = (open_model(tiny, precision, low_memory=low).step(advance) for low in (False, True))
    assert abs(full - low).max() < TOLERANCE[precision]


def test_chunks_give_what_the_whole_prompt_gives(tiny):
    prompt = tokens(50)
    model = open_model(tiny)
    full = model.step([Advance(0, prompt, 0)])
    for cuts in ([0, 20, 50], [0, 1, 2, 30, 31, 50], [0, 49, 50]):
        for start, end in zip(cuts, cuts[1:]):
            actual = model.step([Advance(2, prompt[start:end], start)])
        assert abs(actual - full).max() < TOLERANCE["fp32"], cuts


@pytest.mark.long
@pytest.mark.parametrize("heads, kv_heads, dim", [(2, 2, 64), (4, 2, 64), (2, 2, 128), (8, 2, 128)])
def test_a_prompt_in_odd_chunks_has_the_same_bits_beside_others(tmp_path, heads, kv_heads, dim):
    """With heads of checkpoints' sizes, as onnxruntime computes a prompt's attention in one node."""
    sizes = {"hidden_size": 64, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    config = CONFIG | sizes
    results = make(tmp_path / "tiny", ["fp32"], config)
    engines = results.engines("tiny", "fp32", "onnxruntime").parent
    assert "GroupQueryAttention" in {node.op_type for node in onnx.load(engines / "attention.prefill.onnx").graph.node}
    prompt = tokens(307)
    decoded = tokens(80, 1)
    chunked = tokens(300, 2)
    ends = [1, 7, 40, 41, 130, 259, 306, 307]
    pieces = [*zip([0, *ends], ends)]
    model = open_model(results, max_seq_len=512)
    alone = [model.step([Advance(0, prompt[start:end], start)])[0] for start, end in pieces]
    weights = Weights.open(results.weights("tiny", "fp32"))
    expected = llama(weights, config, prompt, config["num_hidden_layers"])[np.array(ends) - 1]
    assert abs(np.stack(alone) - expected).max() < TOLERANCE["fp32"]

    model.step([Advance(1, decoded[:50], 0), Advance(3, chunked[:3], 0)])
    past = 3
    for step, (start, end) in enumerate(pieces):
        beside = (5, 31, 1, 17, 2, 64, 9, 3)[step]
        actual = model.step([
            Advance(3, chunked[past : past + beside], past), Advance(2, prompt[start:end], start),
            Advance(1, decoded[50 + step : 51 + step], 50 + step),
        ])  # fmt: skip
        past += beside
        np.testing.assert_array_equal(actual[1], alone[step], err_msg=f"tokens {start} to {end}")


def test_a_batch_gives_what_each_request_gives_alone(tiny):
    sequences = [tokens(length, seed) for seed, length in enumerate((30, 12, 21))]
    expected = [alone(tiny, sequence) for sequence in sequences]
    model = open_model(tiny)
    logits = model.step([Advance(slot, sequence[:3], 0) for slot, sequence in enumerate(sequences)])
    for position in range(3, 30):
        for row, slot in enumerate(s for s in range(3) if position - 1 < len(sequences[s])):
            assert abs(logits[row] - expected[slot][position - 3]).max() < TOLERANCE["fp32"]
        going = [slot for slot in range(3) if position < len(sequences[slot])]
        logits = model.step([Advance(slot, sequences[slot][position : position + 1], position) for slot in going])


def test_prefill_and_decode_mix_in_one_step_in_any_order(tiny):
    first, two, three, four = (tokens(40, seed) for seed in range(4))
    expected = [alone(tiny, sequence) for sequence in (first, two, three, four)]
    model = open_model(tiny)
    model.step([Advance(3, first[:10], 0), Advance(0, two[:7], 0)])
    # slots 0 and 3 decode with a gap between them that a prompt and the next chunk of another fill
    actual = model.step(
        [Advance(3, first[10:11], 10), Advance(1, three[:20], 0), Advance(0, two[7:8], 7), Advance(2, four[:1], 0)]
    )
    assert abs(actual[0] - expected[0][8]).max() < TOLERANCE["fp32"]
    assert abs(actual[1] - expected[1 + 1][17]).max() < TOLERANCE["fp32"]
    assert abs(actual[2] - expected[1][5]).max() < TOLERANCE["fp32"]
    actual = model.step([Advance(2, four[1:30], 1), Advance(1, three[20:21], 20), Advance(3, first[11:13], 11)])
    assert abs(actual[0] - expected[3][27]).max() < TOLERANCE["fp32"]
    assert abs(actual[1] - expected[2][18]).max() < TOLERANCE["fp32"]
    assert abs(actual[2] - expected[0][10]).max() < TOLERANCE["fp32"]


def test_decoding_with_a_gap_gives_what_decoding_without_gives(tiny):
    sequence = tokens(8)
    expected = alone(tiny, sequence)[-1]
    model = open_model(tiny)
    model.step([Advance(slot, sequence[:7], 0) for slot in (0, 1, 3)])
    for slots in ([0, 3], [3, 1, 0], [1, 3]):  # again at the same place: a step is taken back by going on from there
        for slot in slots:
            model.step([Advance(slot, sequence[:7], 0)])
        actual = model.step([Advance(slot, sequence[7:], 7) for slot in slots])
        assert abs(actual - expected).max() < TOLERANCE["fp32"], slots


def test_rows_in_a_gap_keep_what_they_hold(tiny):
    lengths = (10, 20, 64, 12)  # the third fills its row
    prompts = [Advance(slot, tokens(length, slot), 0) for slot, length in enumerate(lengths)]
    with_gap = open_model(tiny)
    plain = open_model(tiny)
    with_gap.step(prompts), plain.step(prompts)
    with_gap.step([Advance(slot, tokens(1), lengths[slot]) for slot in (0, 3)])
    behind = [Advance(slot, tokens(1), lengths[slot]) for slot in (1, 2)]
    np.testing.assert_array_equal(with_gap.step(behind), plain.step(behind))


def test_a_slot_used_again_forgets_what_it_held(tiny):
    model = open_model(tiny)
    fresh = model.step([Advance(1, tokens(6, 1), 0)])
    model.step([Advance(0, tokens(90, 2), 0)])
    assert model.length(0) == 90
    np.testing.assert_array_equal(model.step([Advance(0, tokens(6, 1), 0)]), fresh)
    assert model.length(0) == 6
    first, second = (model.step([Advance(slot, tokens(1, 3), 6)]) for slot in (0, 1))
    np.testing.assert_array_equal(first, second)


def test_values_that_are_not_finite_do_not_outlive_their_request(tiny):
    model = open_model(tiny)
    expected = model.step([Advance(0, tokens(6), 0)]), model.step([Advance(0, tokens(1), 6)])
    model.step([Advance(0, tokens(40), 0)])
    rows = model.executor.cache.rows[64]
    for array in (*rows.keys, *rows.values):
        array[:, 0, :, :40] = np.nan
    np.testing.assert_array_equal(model.step([Advance(0, tokens(6), 0)]), expected[0])
    np.testing.assert_array_equal(model.step([Advance(0, tokens(1), 6)]), expected[1])


def test_the_cache_grows_up_to_the_limit_and_shrinks_again(tiny):
    sequence = tokens(200)
    expected = llama(Weights.open(tiny.weights("tiny", "fp32")), CONFIG, sequence, 3)
    page = open_model(tiny).tables.pool.page_nbytes
    model = open_model(tiny, max_seq_len=200, kv_bytes=4 * page)
    capacities = []
    model.step([Advance(1, sequence[:60], 0)])
    for i in range(60, 200):
        actual = model.step([Advance(1, sequence[i : i + 1], i)])
        assert abs(actual[0] - expected[i]).max() < TOLERANCE["fp32"], i
        capacities.append(model.executor.cache.row_of(1).capacity)
    assert sorted(set(capacities)) == [64, 128, 200]
    model.release(1)
    model.step([Advance(0, sequence[:5], 0)])
    assert sorted(model.executor.cache.rows) == [64]
    with pytest.raises(InputError, match=r"at most 200 tokens \(max_seq_len\), found 201"):
        model.step([Advance(1, tokens(201), 0)])


def test_rows_are_kept_for_the_next_request_and_are_as_new(tiny):
    model = open_model(tiny, max_seq_len=200)
    sequence = tokens(190)
    expected = [model.step([Advance(slot, sequence, 0)]) for slot in (0, 1)]
    cache = model.executor.cache
    arrays = [cache.rows[200].keys[0], cache.rows[200].values[0]]
    for slot in (0, 1):
        model.release(slot)
    assert not any(array.any() for array in arrays)
    actual = [model.step([Advance(slot, sequence, 0)]) for slot in (0, 1)]
    assert cache.rows[200].keys[0] is arrays[0]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("advances", "message"),
    [
        ([(4, [1], 0)], "slot: expected 0 to 3, found 4"),
        ([(-1, [1], 0)], "slot: expected 0 to 3, found -1"),
        ([(0, [1], 0), (0, [2], 0)], "slot 0: expected once in a step, found twice"),
        ([(0, [1], 4)], "slot 0: start: expected 0 or 5, the tokens it holds, found 4"),
        ([(1, [1], 5)], "slot 1: start: expected 0 or 0, the tokens it holds, found 5"),
        ([(1, [], 0)], "slot 1: expected at least one token, found none"),
        ([(1, [96], 0)], "slot 1: tokens: expected 0 to 95, found 96"),
        ([(1, [3, -2, 4], 0)], "slot 1: tokens: expected 0 to 95, found -2"),
        ([(1, [3] * 252, 0), (0, [2] * 252, 5)], "slot 0: expected at most 256 tokens (max_seq_len), found 257"),
        ([(1, [3] * 200, 0), (0, [2] * 101, 0)], "expected at most 300 tokens (max_num_tokens), found 301"),
        ([(1, [1.5], 0)], "slot 1: tokens: expected a list of integers, found float64 [1]"),
        ([(1, [[1]], 0)], "slot 1: tokens: expected a list of integers, found int64 [1, 1]"),
        ([], "expected at least one request, found none"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_taken_is_refused_and_changes_nothing(tiny, advances, message):
    model = open_model(tiny, max_num_tokens=300)
    model.step([Advance(0, tokens(5), 0)])
    with pytest.raises(InputError) as error:
        model.step([Advance(slot, np.array(ids), start) for slot, ids, start in advances])
    assert message in str(error.value)
    assert [model.length(slot) for slot in range(4)] == [5, 0, 0, 0]


@pytest.mark.parametrize(("limits", "message"), [
    ({"layers": 4}, "layers: expected 1 to 3 or 'all', found 4"),
    ({"layers": 0}, "layers: expected 1 to 3 or 'all', found 0"),
    ({"max_seq_len": 1025}, "max_seq_len: expected at most 1024"),
    ({"max_batch_size": 0}, "max_batch_size: expected at least 1, found 0"),
    ({"max_num_tokens": 0}, "max_num_tokens: expected at least 1, found 0"),
    ({"threads": 0}, "threads: expected 1 to .*, found 0"),
    ({"threads": -1}, "threads: expected 1 to .*, found -1"),
    ({"threads": 100_000},
        r"threads: expected 1 to \d+ \(\d+ CPUs are here\), found 100000; more only " r"wait for each other"),
])  # fmt: skip
def test_limits_that_the_model_does_not_allow_are_refused(tiny, limits, message):
    with pytest.raises(InputError, match=message):
        open_model(tiny, **limits)


def test_limits_are_those_that_the_engines_were_built_for(tiny, tmp_path):
    """Profiles end there, and rotary encodings were checked up to there."""
    folder = shutil.copytree(tiny.engines("tiny", "fp32", "onnxruntime").parent, tmp_path / "engines")
    manifest = read_json(folder / "engines.json")
    built = {"max_batch_size": 3, "max_num_tokens": 40, "max_seq_len": 64}
    write_json(folder / "engines.json", {**manifest, "options": {**manifest["options"], **built}})
    paths = folder / "engines.json", tiny.assembly("tiny", "fp32"), tiny.weights("tiny", "fp32")
    model = Model.open(*paths)
    assert (model.max_batch_size, model.max_num_tokens, model.max_seq_len) == (3, 40, 64)
    with pytest.raises(InputError, match=r"expected at most 40 tokens \(max_num_tokens\), found 41"):
        model.step([Advance(0, tokens(41), 0)])
    for name, limit in built.items():
        assert getattr(Model.open(*paths, options=ModelOptions(**{name: limit - 1})), name) == limit - 1
        with pytest.raises(
            InputError,
            match=f"{name}: expected at most {limit}, which .*engines.json was "
            f"built for, found {limit + 1}; raise limits.{name} and build again",
        ):
            Model.open(*paths, options=ModelOptions(**{name: limit + 1}))


def test_weights_of_another_precision_or_model_are_refused(tiny, tmp_path):
    arguments = tiny.engines("tiny", "fp32", "onnxruntime"), tiny.assembly("tiny", "fp32")
    with pytest.raises(InputError, match="precision: expected fp32 as in the assembly, found fp16"):
        Model.open(*arguments, tiny.weights("tiny", "fp16"))
    manifest = read_json(tiny.weights("tiny", "fp32"))
    for file in manifest["files"]:
        file["path"] = str((tiny.weights("tiny", "fp32").parent / file["path"]).resolve())
    del manifest["tensors"]["model.layers.1.mlp.up_proj.weight"]
    write_json(tmp_path / "weights.json", manifest)
    with pytest.raises(InputError, match=r"expected tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        Model.open(*arguments, tmp_path / "weights.json")
