"""RoPE as two numbers for each position and element, read from graphs of many families.

Compared with the graphs and with transformers. Other forms are rejected with their description.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from families import FAMILIES, WITH_STATES

from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.errors import CheckError
from lockstep.export.run import assemble
from lockstep.export.tracer import meta_model
from lockstep.onnx_tools.rope import rotary
from lockstep.onnx_tools.sessions import open_session
from lockstep_gpu.attention.rope_tables import HeadTables, check_rope_tables, read_rope_tables
from lockstep_gpu.attention.variants import why_not_fused
from some import some

pytestmark = pytest.mark.exports

POSITIONS = 100
# Halves, with frequencies and weights scaled.
ALWAYS = {"llama, yarn rope"}
TWO_KINDS = {"qwen2", "gemma2", "gemma3_text", "smollm3"}
# positions in the embedding; queries and keys normalised after the encoding, which then stays in the block
WITHOUT = {"gpt2", "opt", "hunyuan_v1_dense", "llama4_text"}
# keys get theirs in the block; deepseek_v3 writes neighbours of queries into halves
OF_QUERIES = {"deepseek_v3", "minicpm3"}


@dataclass
class Cut:
    """A family's RoPE graphs in fp16, by kind, with the config they are of."""

    family: str
    config: dict
    kinds: dict
    graphs: dict[str, onnx.ModelProto]


def executable(model: onnx.ModelProto, folder: Path):
    path = folder / "x.onnx"
    onnx.save(model, path)
    return OnnxRuntimeBackend().load(path, (), None, False).bind(None, {})


def of(names) -> list:
    return some([name for name in FAMILIES if name in names], *ALWAYS)


@pytest.fixture(scope="module", params=of(FAMILIES.keys() - WITH_STATES))
def cut(request) -> Cut:
    """One layer of each kind."""
    config = {**FAMILIES[request.param].config, "dtype": "float16"}
    layers = 2 if request.param in TWO_KINDS else 1
    config |= {"n_layer": layers} if "n_layer" in config else {"num_hidden_layers": layers}
    config |= {name: config[name][:layers] for name in ("layer_types", "no_rope_layers") if name in config}
    # as fused attention asks for
    config |= {"head_dim": 16} if request.param in ("cohere", "llama, yarn rope", "smollm3", "olmo2") else {}
    files, assembly = assemble(meta_model(config, "fp16"), config, "fp16")
    graphs = {
        name: rotary(onnx.load_from_string(files[kind.decode.file]), kind) for name, kind in assembly.variants.items()
    }
    return Cut(request.param, config, assembly.variants, graphs)


def applied(head: HeadTables, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """As the kernel does it: x [num_tokens, heads, head_dim] of any type, in float32."""
    x = x.astype(np.float32)
    return (
        x[:, :, head.first] * head.first_weight[positions][:, None]
        + x[:, :, head.second] * head.second_weight[positions][:, None]
    )


def test_the_tables_turn_as_the_graph_does(cut, tmp_path) -> None:
    for name, model in cut.graphs.items():
        run = executable(model, tmp_path)
        check_rope_tables(run, POSITIONS, "here")
        tables = read_rope_tables(run, POSITIONS, "here")
        random = np.random.default_rng(1)
        positions = np.array([99, 0, 7, 7, 64, 31])
        kind = cut.kinds[name]
        arrays = [
            random.standard_normal((len(positions), heads, kind.head_dim), np.float32).astype(np.float16)
            for heads in (kind.num_heads, kind.num_kv_heads)
        ]
        types = {io.name: io.dtype for io in kind.decode.signature.inputs}
        # a sink stands after the numbers of a head, without RoPE
        query = np.pad(arrays[0], [(0, 0), (0, 0), (0, kind.query_dim - kind.head_dim)])
        feeds = {name: x.reshape(len(x), -1).astype(types[name]) for name, x in (("query", query), ("key", arrays[1]))}
        feeds |= {"position_ids": positions}
        session = open_session(model.SerializeToString())
        results = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
        for head, x, rotated in zip((tables.query, tables.key), arrays, results):
            # Numbers up to 4: the products and their sum are rounded to fp16 by the graph, each by 2^-11 of its size at
            # most.
            assert np.abs(applied(head, x, positions) - rotated.astype(np.float32)).max() < 3 * 4 * 2**-11
        assert tables.separate == (cut.family in OF_QUERIES)
        turns = (tables.query.second != np.arange(kind.head_dim)).any()
        assert turns == ("position_ids" in feeds.keys() & {value.name for value in model.graph.input})
        assert turns != (cut.family in WITHOUT or cut.family == "smollm3" and name == "attention_2")


@pytest.mark.parametrize(
    "cut", of(["llama, llama3 rope", "llama, yarn rope", "mistral", "cohere", "glm"]), indirect=True
)
def test_the_tables_turn_as_transformers_does(cut, tmp_path) -> None:
    """Its own function on its own cosines, in float64. The graph has these in fp16, each rounded by at most 2^-11."""
    module = importlib.import_module(
        f"transformers.models.{cut.config['model_type']}.modeling_{cut.config['model_type']}"
    )
    encoding = next(
        value for value in meta_model(cut.config, "fp32").modules() if type(value).__name__.endswith("RotaryEmbedding")
    )
    positions = np.arange(POSITIONS)
    random = np.random.default_rng(2)
    (_, model), kind = *cut.graphs.items(), next(iter(cut.kinds.values()))
    query, key = (
        torch.from_numpy(random.standard_normal((1, heads, POSITIONS, kind.head_dim)))
        for heads in (kind.num_heads, kind.num_kv_heads)
    )
    cos, sin = encoding(torch.zeros(1, dtype=torch.float64), torch.from_numpy(positions)[None])
    tables = read_rope_tables(executable(model, tmp_path), POSITIONS, "here")
    for x, expected in zip((query, key), module.apply_rotary_pos_emb(query, key, cos, sin)):
        actual = applied(tables.query, x[0].numpy().swapaxes(0, 1), positions)
        # of random numbers up to 4.5
        assert np.abs(actual - expected[0].numpy().swapaxes(0, 1)).max() < 2 * 2**-11 * 4.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "factor", "positions"),
    [
        # At position 30744 an angle of Llama-2-7B is next to pi/2: its cosine is -2.9e-6, below fp16's smallest normal
        # number.
        ({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}, 1.0, 30745),
        # all numbers of the encoding are below it
        ({"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}, 1e-05, POSITIONS),
    ],
)
def test_numbers_below_the_smallest_normal_one_are_no_other_numbers(tmp_path, sizes, factor, positions) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 65536,
        "attention_factor": factor,
    }  # fmt: skip
    config = {
        **FAMILIES["llama"].config, **sizes, "dtype": "float16", "num_hidden_layers": 1,
        "max_position_embeddings": 65536, "rope_parameters": rope,
    }  # fmt: skip
    files, assembly = assemble(meta_model(config, "fp16"), config, "fp16")
    (kind,) = assembly.variants.values()
    check_rope_tables(
        executable(rotary(onnx.load_from_string(files[kind.decode.file]), kind), tmp_path), positions, "here"
    )


def test_what_fused_attention_can_run_is_known_by_types_too(cut) -> None:
    for kind in cut.kinds.values():
        types = {io.name: io.dtype for io in kind.decode.signature.inputs}
        assert {types[name] for name in ("query", "key", "value")} == {"float16"}
        fits = kind.head_dim == 16
        assert (why_not_fused(kind, "float16") is None) == fits
        values = [replace(io, dtype="float32") if io.name == "value" else io for io in kind.decode.signature.inputs]
        signature = replace(kind.decode.signature, inputs=tuple(values))
        assert why_not_fused(replace(kind, decode=replace(kind.decode, signature=signature)), "float16")


# --- graphs of another form

ANGLE = "angle = Cast<to = 1>(position_ids)"
HALVES = """
    flat = Unsqueeze(angle, one)  angles = Mul(flat, frequencies)
    c = Cos(angles)  s = Sin(angles)  cosines = Concat<axis = -1>(c, c)  sines = Concat<axis = -1>(s, s)
    wide_cosines = Unsqueeze(cosines, one)  wide_sines = Unsqueeze(sines, one)"""
TURN = """
    {x} = Reshape({name}, {heads})
    {x}_low, {x}_high = Split<axis = -1, num_outputs = 2>({x})  {x}_minus = Neg({x}_high)  {x}_half = Concat<axis = -1>({x}_minus, {x}_low)
    {x}_one = Mul({x}, wide_cosines)  {x}_two = Mul({x}_half, wide_sines)  {name}_rope = Add({x}_one, {x}_two)"""  # noqa: E501


def handmade(
    query: str = "query_out = Identity(query_rope)",
    key: str = "key_out = Identity(key_rope)",
    angle: str = ANGLE,
    inputs: str = "",
    heads: int = 2,
) -> onnx.ModelProto:
    """Heads of four elements, one of the key; halves rotated by the position. query, key: what gives query_out,
    key_out."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        rotary (float[num_tokens, {4 * heads}] query, float[num_tokens, 4] key, int64[num_tokens] position_ids{inputs})
            => (float[num_tokens, {heads}, 4] query_out, float[num_tokens, 1, 4] key_out)
        <int64[1] one = {{1}}, int64[3] query_heads = {{-1, {heads}, 4}}, int64[3] key_heads = {{-1, 1, 4}}, float[2] frequencies = {{1, 0.01}}>
        {{ {angle} {HALVES} {TURN.format(x="q", name="query", heads="query_heads")} {TURN.format(x="k", name="key", heads="key_heads")} {query} {key} }}"""  # noqa: E501
    )


@pytest.mark.parametrize("heads", [1, 2])
def test_a_handmade_encoding_is_read(tmp_path, heads) -> None:
    run = executable(handmade(heads=heads), tmp_path)
    check_rope_tables(run, POSITIONS, "here")
    tables = read_rope_tables(run, POSITIONS, "here")
    angles = (np.arange(POSITIONS, dtype=np.float32)[:, None] * np.array([1, 0.01], np.float32)).astype(np.float64)
    assert not tables.separate
    assert tables.query.second.tolist() == [2, 3, 0, 1]
    # cosine and sine in float32: the last bit of theirs
    np.testing.assert_allclose(tables.query.first_weight, np.cos(np.tile(angles, 2)), atol=2**-23)
    np.testing.assert_allclose(
        tables.query.second_weight, np.concatenate([-np.sin(angles), np.sin(angles)], axis=1), atol=2**-23
    )
    assert read_rope_tables(run, 1, "here").query.first_weight.tolist() == [[1, 1, 1, 1]]


ORDER = "order = Constant<value_ints = [1, 2, 3, 0]>()  moved = Gather<axis = -1>"


@pytest.mark.parametrize(
    "changes",
    [
        {"query": "query_out = Identity(q)"},
        {"key": "key_out = Identity(k)"},
        {"query": f"{ORDER}(query_rope, order)  query_out = Identity(moved)"},
        {"query": f"{ORDER}(q, order)  query_out = Identity(moved)"},
    ],
)
def test_queries_and_keys_may_differ_and_elements_may_move(tmp_path, changes) -> None:
    run = executable(handmade(**changes), tmp_path)
    check_rope_tables(run, POSITIONS, "here")
    tables = read_rope_tables(run, POSITIONS, "here")
    first_weight, other, partner = tables.arrays()
    assert tables.separate and first_weight.shape == other.shape == (POSITIONS, 2, 4) and partner.shape == (2, 2, 4)
    plain = read_rope_tables(executable(handmade(), tmp_path), POSITIONS, "here").query
    is_of_keys = "query" in changes  # which did not change
    np.testing.assert_array_equal(first_weight[:, int(is_of_keys)], plain.first_weight)
    np.testing.assert_array_equal(partner[int(is_of_keys)], [plain.first, plain.second])


@pytest.mark.parametrize(
    ("changes", "actual"),
    [
        ({"key": "key_out = Relu(key_rope)"}, "element 1 made of 1 and 1, which others mix otherwise"),
        (
            {
                "query": "square = Mul(query_rope, query_rope)  mean = ReduceMean(square)  query_out = "
                "Div(query_rope, mean)"
            },
            "other numbers at position 0",
        ),
        # heads differ
        (
            {"query": "two = Constant<value = float[2, 1] {1, 1.0001}>()  query_out = Mul(query_rope, two)"},
            "other numbers at position 0",
        ),
        ({"query": f"{ORDER}(q, order)  query_out = Add(query_rope, moved)"}, "element 0 made of 3 others"),
        (
            {"query": f"{ORDER}(q, order)  query_out = Add(q, moved)"},
            "element 0 made of 0 and 1, which others mix otherwise",
        ),
        (
            {"angle": "angle = Cast<to = 1>(past_lengths)", "inputs": ", int64[num_tokens] past_lengths"},
            "one that depends on past_lengths",
        ),
    ],
)
def test_another_form_is_refused(tmp_path, changes, actual) -> None:
    with pytest.raises(CheckError) as error:
        check_rope_tables(executable(handmade(**changes), tmp_path), POSITIONS, "x/attention.rotary.onnx")
    assert str(error.value) == (
        "x/attention.rotary.onnx: expected RoPE that mixes pairs of elements, in all heads "
        "alike, by their position alone, "
        f"found {actual}; build with attention: traced"
    )


@pytest.mark.parametrize("limit", [1, 3, 60, 98])
def test_an_encoding_that_depends_on_the_length_is_refused(tmp_path, limit) -> None:
    """As of dynamic NTK scaling, or with other frequencies for long prompts: the largest position of a step turns all
    of it."""
    angle = f"""largest = ReduceMax(position_ids)  limit = Constant<value_int = {limit}>()  long = Greater(largest, limit)  plain = Cast<to = 1>(position_ids)
    scale = Constant<value_float = 0.25>()  scaled = Mul(plain, scale)  angle = Where(long, scaled, plain)"""  # noqa: E501
    run = executable(handmade(angle=angle), tmp_path)
    with pytest.raises(CheckError, match="found other numbers at position [0-9]+; build with attention: traced"):
        check_rope_tables(run, POSITIONS, "here")
    check_rope_tables(run, limit + 1, "here")  # no step is longer: it is one encoding


def test_rope_is_applied_in_pieces(tmp_path, monkeypatch) -> None:
    run = executable(handmade(), tmp_path)
    full = read_rope_tables(run, POSITIONS, "here")
    monkeypatch.setattr("lockstep_gpu.attention.rope_tables.BATCH_ELEMENTS", 7 * 12)
    check_rope_tables(run, POSITIONS, "here")
    for values, expected in zip(read_rope_tables(run, POSITIONS, "here").arrays(), full.arrays()):
        # sine of one number or of eight at a time: the last bit
        np.testing.assert_allclose(values, expected, rtol=0, atol=2**-23)
