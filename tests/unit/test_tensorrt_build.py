"""Building with TensorRT, as far as it goes without a GPU: profiles, what the inspector's listing is read for, records
of tactics, refusals.

Listings are written by hand in the inspector's format, but for those in tests/data, which TensorRT wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx.parser
import pytest

import lockstep.gpu
from lockstep.artifacts.files import read_json, sha256_file, sha256_json
from lockstep.backends.profiles import decode_ranges, profiles, prompt_ranges
from lockstep.backends.tensorrt import backend as tensorrt_backend
from lockstep.backends.tensorrt import compat
from lockstep.backends.tensorrt.backend import TensorRTBackend
from lockstep.backends.tensorrt.compat import TENSORRT, Tensor
from lockstep.backends.tensorrt.contract import check_contract, tensor_types
from lockstep.backends.tensorrt.layers import (
    check_precision,
    datatype,
    differences,
    fingerprint,
    fp16_sums,
    read_layers,
)
from lockstep.backends.tensorrt.memory import PeakMemory
from lockstep.backends.tensorrt.tactics import CACHE, RECORD, Tactics, compare
from lockstep.backends.tensorrt.v8_6.regions import region_layers
from lockstep.errors import CheckError, InputError
from lockstep.gpu.describe import driver_version, gpu_key
from lockstep.gpu.libraries import require_capability, require_cudnn
from lockstep.targets import Limits

LIMITS = Limits(max_batch_size=8, max_num_tokens=64, max_seq_len=32)
BLOCK = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]> g (float16[num_tokens, 16] hidden, int64[num_tokens] rows, float16[32, 16] weight) => (float16[num_tokens, 32] out)
    { taken = Gather(hidden, rows)  out = Gemm<transB = 1>(taken, weight) }"""  # noqa: E501
)
BLOCK.graph.node[1].name = "product"
HALF, FLOAT = "Row major linear FP16 format", "Row major linear FP32"


def graph(*inputs: str) -> onnx.ModelProto:
    names = ", ".join(f"float[{shape}] x{i}" for i, shape in enumerate(inputs))
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({names}) => (float[n] y) {{ y = Identity(x0) }}'
    )


# --- profiles


def test_a_block_has_profiles_for_one_request_for_several_and_for_prompts():
    one, several, more, prefill = profiles(BLOCK, LIMITS)
    assert one == {"hidden": ((1, 16),) * 3, "rows": ((1,),) * 3}
    assert several == {"hidden": ((2, 16), (4, 16), (4, 16)), "rows": ((2,), (4,), (4,))}
    assert more == {"hidden": ((5, 16), (8, 16), (8, 16)), "rows": ((5,), (8,), (8,))}
    # a step of max_num_tokens, and a token of each row that decodes
    assert prefill["hidden"] == ((1, 16), (64, 16), (72, 16))
    assert len(profiles(BLOCK, replace(LIMITS, max_batch_size=1))) == 2


def test_an_exit_has_profiles_for_one_row_and_for_several_and_an_embedding_one():
    one, several, more = profiles(graph("num_tokens, 4", "num_requests"), LIMITS)
    assert one == {"x0": ((1, 4),) * 3, "x1": ((1,),) * 3}
    # a step that brings prompts may ask for one row
    assert several == {"x0": ((1, 4), (64, 4), (72, 4)), "x1": ((1,), (4,), (4,))}
    assert more == {"x0": ((5, 4), (64, 4), (72, 4)), "x1": ((5,), (8,), (8,))}
    embedding = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[num_tokens] '
        "token_ids, float[9, 4] table) => (float[num_tokens, 4] y) { y = Gather(table, token_ids) }"
    )
    assert profiles(embedding, LIMITS) == [{"token_ids": ((1,), (64,), (72,))}]


@pytest.mark.parametrize(("rows", "ranges"), [
    (1, [(1, 1)]), (2, [(1, 1), (2, 2)]), (8, [(1, 1), (2, 4), (5, 8)]), (9, [(1, 1), (2, 4), (5, 8), (9, 9)]),
    (100, [(1, 1), (2, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 100)]),
])  # fmt: skip
def test_rows_that_decode_come_in_ranges_up_to_the_limit(rows, ranges):
    assert decode_ranges(rows) == ranges


def test_each_range_of_rows_has_a_profile_that_is_tuned_for_its_top():
    limits = replace(LIMITS, max_batch_size=10, max_num_tokens=64)
    _, *decode, prefill = [profile["rows"] for profile in profiles(BLOCK, limits)]
    assert decode == [((2,), (4,), (4,)), ((5,), (8,), (8,)), ((9,), (10,), (10,))]
    assert prefill == ((1,), (64,), (74,))
    one, *several = profiles(graph("num_tokens, 4", "num_requests"), limits)
    assert one["x1"] == ((1,),) * 3
    assert [profile["x1"] for profile in several] == [((1,), (4,), (4,)), ((5,), (8,), (8,)), ((9,), (10,), (10,))]
    assert [profile["x0"] for profile in several] == [((low, 4), (64, 4), (74, 4)) for low in (1, 5, 9)]


@pytest.mark.parametrize(("rows", "tokens", "ranges"), [
    (4, 512, []), (16, 2048, [(17, 512), (513, 1024)]), (256, 1000, [(257, 512)]), (512, 4096, [(513, 1024)]),
    (1024, 8192, []),
])  # fmt: skip
def test_prompts_come_in_ranges_between_the_rows_that_decode_and_the_limit(rows, tokens, ranges):
    assert prompt_ranges(rows, tokens) == ranges


def test_a_prompt_takes_the_profile_that_is_tuned_for_the_next_larger_size():
    limits = replace(LIMITS, max_batch_size=256, max_num_tokens=2048)
    found = [profile["rows"] for profile in profiles(BLOCK, limits)]
    first = lambda tokens: next(best[0] for low, best, high in found if low[0] <= tokens <= high[0])
    sizes = (1, 64, 100, 256, 257, 512, 513, 1024, 1025, 2048, 2304)
    assert [first(tokens) for tokens in sizes] == [1, 64, 128, 256, 512, 512, 1024, 1024, 2048, 2048, 2048]
    assert len(found) == 8 + 2 + 1  # 8 of rows that decode
    assert len(profiles(graph("num_tokens, 4", "num_requests"), limits)) == 8  # an exit computes rows of requests


def test_kinds_have_the_dimensions_that_they_name():
    (decode,) = profiles(graph("num_requests, 4", "num_requests, 2, past_capacity, 4", "1"), LIMITS)
    assert decode == {"x0": ((1, 4), (8, 4), (8, 4)), "x1": ((1, 2, 1, 4), (8, 2, 32, 4), (8, 2, 32, 4))}
    (prefill,) = profiles(graph("num_tokens, 4", "1, 2, past_capacity, 4"), LIMITS)
    assert prefill["x1"][2] == (1, 2, 32, 4) and prefill["x0"] == ((1, 4), (64, 4), (72, 4))


def test_a_graph_of_fixed_sizes_has_one_profile_that_says_nothing():
    assert profiles(graph("3, 4"), LIMITS) == [{}]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size: expected at least 1, found 0"),
        ({"max_seq_len": "all"}, "max_seq_len: expected at least 1, found 'all'"),
        ({"max_num_tokens": 4}, r"max_num_tokens: expected at least max_batch_size \(8\), found 4"),
    ],
)
def test_limits_without_room_are_refused(limits, message):
    with pytest.raises(InputError, match=message):
        profiles(BLOCK, replace(LIMITS, **limits))


def test_a_dimension_without_a_limit_is_named():
    with pytest.raises(
        InputError, match="dimension: expected one of num_tokens, num_requests, past_capacity, found experts"
    ):
        profiles(graph("num_tokens, experts"), LIMITS)


# --- contract


def engine_tensors() -> list[Tensor]:
    """What an engine of BLOCK says of itself, on a version that has no int64."""
    bounds = profiles(BLOCK, LIMITS)
    fixed = (((32, 16),) * 3,) * len(bounds)
    return [
        Tensor("hidden", True, np.dtype("float16"), (-1, 16), tuple(profile["hidden"] for profile in bounds)),
        Tensor("rows", True, np.dtype("int32"), (-1,), tuple(profile["rows"] for profile in bounds)),
        Tensor("weight", True, np.dtype("float16"), (32, 16), fixed),
        Tensor("out", False, np.dtype("float16"), (-1, 32), ()),
    ]


def changed(position: int, **values) -> list[Tensor]:
    tensors = engine_tensors()
    tensors[position] = Tensor(**{**vars(tensors[position]), **values})
    return tensors


def test_an_engine_that_is_its_graph_passes():
    check_contract(engine_tensors(), BLOCK, profiles(BLOCK, LIMITS), False, "x.engine")


def test_beside_a_profile_of_one_size_an_output_may_be_told_with_that_size():
    """Found on a GPU: TensorRT 8.6 gives [1, 32] for the output of an engine whose first profile is for one token."""
    check_contract(changed(3, shape=(1, 32)), BLOCK, profiles(BLOCK, LIMITS), False, "x.engine")
    with pytest.raises(
        CheckError,
        match=r"output out: expected float16 \[-1, 32\] as in the assembly, found "
        r"float16 \[1, 16\]",
    ):
        check_contract(changed(3, shape=(1, 16)), BLOCK, profiles(BLOCK, LIMITS), False, "x.engine")


@pytest.mark.parametrize(("tensors", "message"), [
    (engine_tensors()[:-1], "x.engine: outputs: expected out as in the assembly, found $"),
    (changed(0, name="hiden"), "inputs: expected hidden, rows, weight as in the assembly, found hiden, rows, weight"),
    (changed(3, dtype=np.dtype("float32")),
        r"output out: expected float16 \[-1, 32\] as in the " r"assembly, found float32 \[-1, 32\]"),
    (changed(2, shape=(16, 32)),
        r"input weight: expected float16 \[32, 16\] as in the assembly, found " r"float16 \[16, 32\]"),
    (changed(1, dtype=np.dtype("int64")), r"input rows: expected int32 \[-1\] as in the assembly, found int64"),
    (changed(0, profiles=(((1, 16), (8, 16), (8, 16)),)), "expected 4 optimization profiles, found 1"),
    (changed(1, profiles=(((1,),) * 3, ((2,), (4,), (4,)), ((5,), (8,), (8,)), ((1,), (64,), (64,)))),
        r"input rows, profile 3: expected \[1\] to \[72\], tuned " r"for \[64\], found \[1\] to \[64\]"),
])  # fmt: skip
def test_an_engine_that_is_not_its_graph_is_refused(tensors, message):
    with pytest.raises(CheckError, match=message):
        check_contract(tensors, BLOCK, profiles(BLOCK, LIMITS), False, "x.engine")


# --- layers


def listing(*layers: dict) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": []})


def layer(
    name="product",
    kind="gemm",
    tactic="sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64",
    value="0x5f7e2a1b3c4d5e6f",
    source=("taken", HALF),
    made=("out", HALF),
) -> dict:
    tensor = lambda pair: {"Name": pair[0], "Location": "Device", "Dimensions": [-1, 16], "Format/Datatype": pair[1]}
    return {
        "Name": name, "LayerType": kind, "Inputs": [tensor(source), tensor(("weight", HALF))],
        "Outputs": [tensor(made)], "TacticName": tactic, "TacticValue": value,
    }  # fmt: skip


def read(*layers: dict):
    return read_layers(listing(*layers), "x.engine")


def test_the_listing_may_hold_raw_control_characters():
    text = listing(layer(name="a\nb")).replace("\\n", "\n\x01")
    assert read_layers(text, "x")[0].name == "a\n\x01b"


@pytest.mark.parametrize("text", ["", "{}", '{"Layers": ["product"]}', '{"Layers": [{"LayerType": "gemm"}]}'])
def test_a_listing_without_detail_is_refused(text):
    with pytest.raises(CheckError, match="x.engine: expected the layers of the engine in detail"):
        read_layers(text, "x.engine")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (HALF, "float16"), (FLOAT, "float32"), ("Half", "float16"), ("Float", "float32"), ("Row major linear BF16", "bfloat16"), ("BFloat16", "bfloat16"),  # noqa: E501
        ("Channel major FP16 format where channel % "
"8 == 0", "float16"), ("Row major Int32 format", None), ("Int64", None), ("", None), ("Row major linear TF32", "float32"),  # noqa: E501
    ],
)  # fmt: skip
def test_datatypes_are_read_from_formats(text, dtype):
    assert datatype(text) == dtype


def test_half_precision_products_pass():
    check_precision(
        read(layer(), layer(name="{ForeignNode[a...b]}", kind="Myelin", tactic="", value="")),
        BLOCK,
        tensor_types(BLOCK),
        "x.engine",
    )


def test_a_fused_kernel_may_read_fp32_beside_its_product_but_not_compute_the_product_in_it():
    fused = layer(name="__myl_FcCastMul_myl0_3", kind="kgen", source=("__myln_k_arg__bb1_12", "Float"))
    check_precision(read(fused), BLOCK, tensor_types(BLOCK), "x.engine")
    with pytest.raises(CheckError, match="layer __myl_FcCastMul_myl0_3: expected a matrix product in float16"):
        check_precision(
            read({**fused, "TacticName": "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n"}),
            BLOCK,
            tensor_types(BLOCK),
            "x.engine",
        )


@pytest.mark.parametrize(("found", "message"), [
    (layer(source=("taken", FLOAT)),
        "x.engine: layer product: tensor taken: expected float16 as in the graph, found Row major linear FP32"),
    (layer(made=("out", "Float")), "layer product: tensor out: expected float16 as in the graph, found Float"),
    (layer(source=("Reformatted Input Tensor 0 to product", FLOAT)),
        "layer product: expected a matrix product in float16 as in the graph, found tactic sm80_xmma"),
    (layer(tactic="ampere_sgemm_128x64_tn"),
        "layer product: expected a matrix product in float16 as in the graph, found tactic ampere_sgemm_128x64_tn"),
    (layer(tactic="sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n"), "expected a matrix product in float16 as in the graph"),
])  # fmt: skip
def test_a_product_in_fp32_fails_with_its_layer(found, message):
    with pytest.raises(CheckError, match=message):
        check_precision(read(layer(name="before"), found), BLOCK, tensor_types(BLOCK), "x.engine")


def real_listing(name: str) -> str:
    """What TensorRT 8.6.0 said of a Llama-2-7B block, one token, fp16, built without asking for sums in fp32 (H200)."""
    return (Path(__file__).parents[1] / "data" / name).read_text()


def test_products_summed_in_fp16_are_found_in_a_real_listing():
    layers = read_layers(real_listing("layers_8.6_level_3.json"), "middle.engine")
    assert fp16_sums(layers) == ["gemm_0", "gemm_1/fused", "gemm_3", "gemm_4/fused"]
    assert (
        fp16_sums(
            [
                dataclasses.replace(layer, tactic=layer.tactic.replace("f16f16_f16f16_f16", "f16f16_f16f32_f32"))
                for layer in layers
            ]
        )
        == []
    )
    # fused: TensorRT is told, and does not tell
    assert fp16_sums(read_layers(real_listing("layers_8.6_level_5.json"), "middle.engine")) == []
    assert fp16_sums(
        read(layer(tactic="turing_h1688gemm_128x128_ldg8_tn"), layer(tactic="ampere_s16816gemm_fp16_64x64_tn"))
    ) == ["product"]


def real_plan() -> bytes:
    """Two of the three regions' listings of a plan of TensorRT 8.6.0 (level 4, H200): a Llama-2-7B block for one token,
    and for up to 2064; other bytes around them."""
    return (
        b"\x00\x7fptrt\xff main {"
        + (Path(__file__).parents[1] / "data" / "regions_8.6.txt").read_bytes()
        + (b"shape_main {\n label bb0: \n}\x01")
    )


def half_plan() -> bytes:
    return real_plan().replace(b"f16f16_f16f32_f32", b"f16f16_f16f16_f16")


def test_the_kernels_of_fused_regions_are_read_from_the_plan():
    layers = region_layers(real_plan())
    products = {layer.name: layer.tactic for layer in layers if "gemm" in layer.tactic}
    assert list(products) == [
        "gemm_3_matrix_multiply",
        *(f"{name} [profile 2]_matrix_multiply" for name in ("gemm_0", "gemm_1/fused", "gemm_3", "gemm_4/fused")),
    ]
    assert products["gemm_3_matrix_multiply"] == (
        "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16, its sum in 4 parts"
    )
    assert (
        len(layers) == 16 and layers[0].name == "fc_mul+fc_sum+*" and layers[0].tactic == "grid 4096 1 1, block 128 1 1"
    )
    assert (
        next(layer.tactic for layer in layers if layer.name.startswith("add_2 [profile 2]"))
        == "grid 2064 1 1, block 128 1 1"
    )
    check_precision(layers, BLOCK, tensor_types(BLOCK), "x")
    assert fp16_sums(layers) == []


FUSED = """  fusion={ name=__myl_bb0_1_FcCas args={ "__myln_k_arg__bb0_20" "__myln_k_arg__bb0_21" } kernel=sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize64x128x32_fused11 binary=2 \
metadata={ 0 64062 } stream=0 layers="gemm_4_matrix_multiply+logits' castToActType" }"""  # noqa: E501


def test_products_with_something_fused_to_them_and_statements_of_other_forms_are_not_passed_over():
    """The first is of a real plan: an lm_head whose sums `-cask:fp16_acc=off` did not reach."""
    listing = (
        f'x\nmain {{\n label bb0: \n{FUSED}\n  another={{ form=1 }}\n  wait={{ name="a" layers="a" '
        f"}}\n}}\nmain {{\n}}\nmain {{\n  last={{ 1 }}\n}}\n"
    )
    fused, another, last = region_layers(listing.encode())
    assert fp16_sums([fused]) == [fused.name] == [
        "gemm_4_matrix_multiply+logits' castToActType"
    ] and fused.tactic.endswith("_fused11")
    assert (another.name, another.kind, another.tactic) == ("another", "another in a fused region", "")
    assert last.name == "last"
    assert region_layers(b"") == region_layers(b"\nmain {\n  cut off") == []


def test_products_in_fused_regions_are_held_to_the_graph_too():
    half = region_layers(half_plan())
    assert fp16_sums(half) == [layer.name for layer in half if "gemm" in layer.tactic] != []
    with pytest.raises(
        CheckError,
        match="x: layer gemm_3_matrix_multiply: expected a matrix product in "
        "float16 as in the graph, found tactic sm80_xmma_gemm_f32f32.* 4 parts; the engine",
    ):
        check_precision(
            region_layers(real_plan().replace(b"f16f16_f16f32_f32", b"f32f32_f32f32_f32")),
            BLOCK,
            tensor_types(BLOCK),
            "x",
        )


def test_another_kernel_in_a_fused_region_is_another_choice():
    """Found on a GPU: from one record, engines came out whose layers were the same, and the kernels in their regions
    were not."""
    first = fingerprint(region_layers(real_plan()))
    again = fingerprint(region_layers(real_plan().replace(b"__mye1", b"__mye2")))
    other = fingerprint(region_layers(real_plan().replace(b"sk_factor=4", b"sk_factor=1")))
    assert first == again and list(differences(first, again, "x")) == []
    assert [line.partition(" as recorded, found ")[2] for line in differences(first, other, "middle.engine")] == [
        "tactic sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16, "
        "its sum in 1 part"
    ]
    with pytest.raises(
        CheckError,
        match="middle.engine: layer gemm_3_matrix_multiply: expected tactic .* "
        "its sum in 4 parts as recorded, .*; TensorRT 8.6 chooses the kernels of fused",
    ):
        compare(first, other, "middle.engine")


def test_a_fused_region_is_known_by_its_tensors_not_by_the_nodes_that_name_it():
    """Found on a GPU: a second build from the same timing cache listed the same region under another first node."""
    text = real_listing("layers_8.6_level_5.json")
    assert "[(Unnamed Layer* 42) [Shuffle]...gemm_4/parts]" in text
    first, again = (
        read_layers(said, "x") for said in (text, text.replace("(Unnamed Layer* 42) [Shuffle]...", "gemm_0..."))
    )
    again[0] = dataclasses.replace(again[0], inputs=again[0].inputs[::-1])
    assert fingerprint(first) == fingerprint(again) and fingerprint(first)[0].name == (
        "fused region that gives hidden_out, key, query, value"
    )
    smaller = [dataclasses.replace(first[0], outputs=first[0].outputs[1:])]
    assert fingerprint(smaller) != fingerprint(first)
    with pytest.raises(
        CheckError,
        match="expected layer fused region that gives hidden_out, key, query, "
        "value .* found layer fused region that gives key, query, value",
    ):
        compare(fingerprint(first), fingerprint(smaller), "x")


def test_an_engine_without_layers_fails():
    with pytest.raises(CheckError, match="expected layers, among them the matrix product product; found none"):
        check_precision([], BLOCK, tensor_types(BLOCK), "x.engine")


def test_what_the_graph_computes_in_fp32_may_be_fp32():
    model = onnx.ModelProto()
    model.CopyFrom(BLOCK)
    for value in (model.graph.input[0], model.graph.input[2], model.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    check_precision(
        read(layer(tactic="ampere_sgemm_128x64_tn", source=("taken", FLOAT), made=("out", FLOAT))),
        model,
        tensor_types(model),
        "x",
    )


def test_fingerprints_leave_out_pointers_and_keep_tactics():
    first = fingerprint(read(layer(name="__myl_FcMul_0x7f3a5c001230", tactic="__myl_Fc_140234567890123_x")))
    again = fingerprint(read(layer(name="__myl_FcMul_0x7f99aa124560", tactic="__myl_Fc_140999999990123_x")))
    assert first == again and first[0].tactic.endswith("0x5f7e2a1b3c4d5e6f")
    assert fingerprint(read(layer(value="0x1111111111111111"))) != fingerprint(read(layer()))
    assert fingerprint(read(layer(source=("taken", FLOAT)))) != fingerprint(read(layer()))
    hashed = lambda digit: fingerprint(
        read(layer(tactic=f"__myl_AddCastMean_0xf2543c36ff9f104bbb1655b0183afb4{digit}"))
    )
    assert hashed(7) != hashed(8)  # of the fused operators: no address is that long
    assert fingerprint(read(layer(name="block_16x16_64"))) != fingerprint(read(layer(name="block_16x16_32")))


@pytest.mark.parametrize(("version", "set_by_user", "told", "recorded"), [
    ("8.6.0", "", "-cask:fp16_acc=off", None),
    ("8.6.0", " -cask:fp16_acc=off ", "-cask:fp16_acc=off", None),
    ("8.6.0", "-peep:transpose_elim=off", "-peep:transpose_elim=off -cask:fp16_acc=off",
        "-peep:transpose_elim=off -cask:fp16_acc=off"),
    ("8.6.0", "-cask:fp16_acc=on", "-cask:fp16_acc=on", "-cask:fp16_acc=on"),
    ("10.8.0", "", "", None),
    ("10.8.0", "-cask:fp16_acc=on", "-cask:fp16_acc=on", "-cask:fp16_acc=on"),
])  # fmt: skip
def test_fused_regions_are_told_to_add_up_in_fp32_beside_what_the_user_tells_them(
    monkeypatch, version, set_by_user, told, recorded
):
    """TensorRT reads the variable; what the user set there decides numbers, and is an option that engines are made
    with."""
    monkeypatch.setenv("__LUNOWUD", set_by_user)
    api = SimpleNamespace(__version__=version, Builder=lambda logger: os.environ["__LUNOWUD"])
    monkeypatch.setitem(vars(TENSORRT), "api", api)
    monkeypatch.setattr(TENSORRT, "logger", lambda: None)
    before = TensorRTBackend().default_options()
    assert TENSORRT.create_builder() == TENSORRT.create_builder() == told
    assert TensorRTBackend().default_options() == before and before.get("compiler_flags") == recorded
    assert ("compiler_flags" in before) == (recorded is not None)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("[E] 4: The timing cache will not be used!", "_REFUSED_CACHE"),
        ("Detected invalid timing cache, setup a local cache instead", "_REFUSED_CACHE"),
        ("No implementation of layer 417 obeys the requested constraints in strict mode. No conforming "
"implementation was found i.e. requested layer\n"
         "computation precision and output precision types are ignored, using the fastest "
"implementation.", "_IGNORED_PRECISION"),
        ("Your ONNX model has been generated with INT64 weights, while TensorRT does not natively support "
"INT64.", None),
        ("Local timing cache in use. Profiling results in this builder pass will not be stored.", None),
        ("Unable to determine GPU memory usage", None),
    ],
)  # fmt: skip
def test_warnings_that_are_failures_are_told_from_others(said, found):
    log = compat.Log()
    log.warnings.append(said)
    assert [name for name in ("_REFUSED_CACHE", "_IGNORED_PRECISION") if log.first(getattr(compat, name))] == (
        [found] if found else []
    )
    assert "\n" not in log.first_error()


REFUSED = [
    "1: [myelinCache.h::deserializeFromBuffer::52] Error Code 1: Myelin (Myelin error from unknown graph)",
    "4: The timing cache will not be used!",
]


@pytest.mark.parametrize(("version", "said", "taken", "whole"), [
    ("8.6.0", [], True, True), ("8.6.0", REFUSED, True, False), ("8.6.0", REFUSED[1:], False, False),
    ("10.8.0", REFUSED, False, False),
])  # fmt: skip
def test_what_is_refused_of_a_timing_cache_is_seen_when_it_is_read(monkeypatch, version, said, taken, whole):
    """What 8.6.0 says of each of its own caches, as errors, while it gives a cache all the same: found on a GPU."""
    monkeypatch.setitem(vars(TENSORRT), "api", SimpleNamespace(__version__=version))
    given = object()
    config = SimpleNamespace(create_timing_cache=lambda data: TENSORRT.log.errors.extend(said) or given)
    assert TENSORRT.create_timing_cache(config, b"cache") == (given if taken else None, whole)


def without_tensorrt(monkeypatch, version="8.6.0", **answers):
    """Building with all but what TensorRT itself does. answers: {method of the library: what it gives}; gives them,
    with those that each test shares."""
    region = listing(layer(name="{ForeignNode[a...b]}", kind="Myelin", tactic="", value="", source=("taken", HALF)))
    answers = {
        "create_timing_cache": (object(), True),
        "build_plan": real_plan(),
        "layer_information": region,
        "serialize_timing_cache": b"",
        "cached_tactics": {},
    } | answers
    monkeypatch.setitem(vars(TENSORRT), "api", SimpleNamespace(__version__=version))
    for name in (
        "create_builder",
        "create_network",
        "parse",
        "create_config",
        "constrain_precision",
        "add_profile",
        "use_timing_cache",
        "deserialize",
        "tensors",
        *answers,
    ):
        answer = answers.get(name, True)
        monkeypatch.setattr(TENSORRT, name, answer if callable(answer) else lambda *arguments, answer=answer: answer)
    monkeypatch.setattr(tensorrt_backend, "check_contract", lambda *arguments: None)
    monkeypatch.setattr(tensorrt_backend, "PeakMemory", lambda: contextlib.nullcontext(SimpleNamespace(nbytes=None)))
    return answers


@pytest.mark.parametrize(("plan", "whole", "note"), [
    ("real", True, None),
    ("real", False,
        "TensorRT 8.6.0 does not read what the timing cache says of fused regions: their kernels were chosen anew"),
    ("half", True, "products that TensorRT accumulates in fp16: gemm_3_matrix_multiply, gemm_0 .*"),
    ("", True, "fused regions whose kernels cannot be read: they are not held to the graph"),
])  # fmt: skip
def test_a_build_takes_the_kernels_of_regions_for_layers(tmp_path, monkeypatch, plan, whole, note):
    """All but what TensorRT itself does."""
    data = {"real": real_plan(), "half": half_plan(), "": b"another plan"}[plan]
    said = without_tensorrt(monkeypatch, create_timing_cache=(object(), whole), build_plan=data)
    onnx.save(BLOCK, tmp_path / "block.onnx")
    library = TensorRTBackend()
    built = library.build(tmp_path / "block.onnx", tmp_path / "block.engine", library.default_options())
    region = said["layer_information"]
    assert built.note is note is None or re.fullmatch(note, built.note)
    chosen = fingerprint(read_layers(region, "x") + region_layers(data))
    assert built.about["tactics_sha256"] == sha256_json([layer.to_json() for layer in chosen])
    assert (tmp_path / "block.engine").read_bytes() == data
    assert len(built.about.get("fp16_sums", [])) == (5 if plan == "half" else 0)


def attempts(
    monkeypatch,
    folder: Path,
    graph: onnx.ModelProto = BLOCK,
    refuses=lambda operator: False,
    fp32=lambda operator: False,
    version="8.6.0",
    plan=real_plan,
    **options,
):
    """A build, and the list of its attempts: the level and the last operator of each. `refuses`: TensorRT does not
    build it; `fp32`: it computes its product in fp32."""
    tried = []

    def build_plan(builder, network, config, where):
        if refuses(tried[-1][1]):
            raise compat.GraphRefusedError(
                f"{where}: TensorRT 8.6.0 cannot build this graph: 10: Could not "
                f"find any implementation for node {tried[-1][1]}"
            )
        return plan()

    product = {"name": "product", "kind": "gemm"}
    without_tensorrt(
        monkeypatch,
        version,
        parse=lambda network, data, where: tried.append([None, onnx.load_from_string(data).graph.node[-1].op_type]),
        create_config=lambda builder, workspace, level, sources: tried[-1].__setitem__(0, level),
        build_plan=build_plan,
        layer_information=lambda engine: listing(
            layer(**product, **({"tactic": "ampere_sgemm_64x64_tn"} if fp32(tried[-1][1]) else {}))
        ),
    )
    onnx.save(graph, folder / "block.onnx")
    library = TensorRTBackend()
    return lambda: library.build(
        folder / "block.onnx", folder / "block.engine", {**library.default_options(), **options}
    ), tried


@pytest.mark.parametrize(("version", "options", "tried"), [
    ("8.6.0", {}, [[3, "Gather"]]), ("8.6.0", {"optimization_level": 2}, [[2, "Gather"]]),
    ("8.6.0", {"one_region": False}, [[4, "Gemm"]]),
    ("8.6.0", {"one_region": False, "optimization_level": 5}, [[5, "Gemm"]]), ("10.8.0", {}, [[4, "Gemm"]]),
    ("11.0.0", {}, [[4, "Gemm"]]),
])  # fmt: skip
def test_a_graph_is_built_as_one_region_where_that_is_asked_for(tmp_path, monkeypatch, version, options, tried):
    build, found = attempts(monkeypatch, tmp_path, version=version, **options)
    built = build()
    assert built.note is None and "not_one_region" not in built.about and found == tried


def test_traced_attention_is_built_as_it_is(tmp_path, monkeypatch):
    decode = onnx.ModelProto.FromString(BLOCK.SerializeToString())
    decode.graph.name = "decode"
    build, found = attempts(monkeypatch, tmp_path, decode)
    assert build().note is None and found == [[3, "Gemm"]]


def test_what_cannot_be_one_region_is_built_as_it_is_and_said(tmp_path, monkeypatch):
    build, found = attempts(monkeypatch, tmp_path, refuses=lambda last: last == "Gather", plan=half_plan)
    built, why = (
        build(),
        ("TensorRT 8.6.0 cannot build this graph: 10: Could not find any implementation for node Gather"),
    )
    assert found == [[3, "Gather"], [4, "Gemm"]] and built.about["not_one_region"] == why
    assert built.note.startswith(
        f"not built as one region, but as it is at level 4: {why}; products that TensorRT accumulates in fp16: gemm_3"
    )


def test_a_region_of_another_precision_is_not_taken(tmp_path, monkeypatch):
    build, found = attempts(monkeypatch, tmp_path, fp32=lambda last: last == "Gather")
    assert (
        "layer product: expected a matrix product in float16 as in the graph, found tactic ampere_sgemm"
    ) in build().note and len(found) == 2


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("refuses", "cannot build this graph: .* node Gemm"),
        ("fp32", "expected a matrix product in float16 as in the graph, found tactic ampere_sgemm"),
    ],
)
def test_what_cannot_be_built_at_all_fails_with_what_is_wrong_with_the_graph(tmp_path, monkeypatch, wrong, found):
    build, tried = attempts(monkeypatch, tmp_path, **{wrong: lambda last: True})
    with pytest.raises(CheckError, match=f"block.engine: .*{found}"):
        build()
    assert len(tried) == 2 and not (tmp_path / "block.engine").exists()


def test_what_is_no_refusal_of_the_graph_is_not_tried_again(tmp_path, monkeypatch):
    build, tried = attempts(monkeypatch, tmp_path)

    def wrong(*arguments):
        raise CheckError("output out: expected float16")

    monkeypatch.setattr(tensorrt_backend, "check_contract", wrong)
    with pytest.raises(CheckError, match="output out: expected float16"):
        build()
    assert len(tried) == 1 and not (tmp_path / "block.engine").exists()


# --- tactics

MADE_BY = {
    "version": "8.6.0",
    "device": {"name": "NVIDIA H200", "compute_capability": "9.0", "driver": "570.1"},
    "options": {"workspace_mb": 4096},
}


@pytest.fixture
def recorded(tmp_path):
    tactics = Tactics("record", tmp_path, MADE_BY)
    tactics.take("middle", "g" * 64, fingerprint(read(layer())), "middle.engine")
    tactics.take_cache(b"cache", {"key": "0x01"}, "middle.engine")
    assert tactics.finish(["middle"])["files"] == [
        {"file": name, "sha256": sha256_file(tmp_path / name)} for name in (CACHE, RECORD)
    ]
    return tmp_path


def test_a_record_is_replayed(recorded):
    tactics = Tactics("verified", recorded, MADE_BY)
    before = {path.name: path.read_bytes() for path in recorded.iterdir()}
    assert tactics.cache == b"cache"
    digest = tactics.take("middle", "g" * 64, fingerprint(read(layer())), "middle.engine")
    tactics.take_cache(b"cache with more", {"key": "0x01"}, "middle.engine")
    assert (
        tactics.keeps("middle", digest) and not tactics.keeps("middle", "other") and not tactics.keeps("entry", digest)
    )
    tactics.finish(["middle"])
    assert {path.name: path.read_bytes() for path in recorded.iterdir()} == before


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer(tactic="other_gemm")], "m: layer product: expected tactic "
"sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64 0x5f7e2a1b3c4d5e6f, Row major linear FP16 format as "
"recorded, found tactic other_gemm 0x5f7e2a1b3c4d5e6f"),
        ([layer(), layer()], "m: expected 1 layers as recorded, found 2"),
        ([layer(name="another")], r"m: expected layer product \(tactic .*\) as recorded, found layer another"),
    ],
)  # fmt: skip
def test_another_tactic_fails_with_its_layer_and_both(recorded, layers, message):
    with pytest.raises(CheckError, match=message):
        Tactics("verified", recorded, MADE_BY).take("middle", "g" * 64, fingerprint(read(*layers)), "m")


def test_another_tactic_in_the_cache_fails(recorded):
    with pytest.raises(CheckError, match="m: timing cache, key: expected tactic 0x01 as recorded, found 0x02"):
        Tactics("verified", recorded, MADE_BY).take_cache(b"", {"key": "0x02"}, "m")
    with pytest.raises(CheckError, match="m: timing cache, new: expected tactic none as recorded, found 0x02"):
        Tactics("verified", recorded, MADE_BY).take_cache(b"", {"key": "0x01", "new": "0x02"}, "m")


def test_a_record_of_another_graph_engine_version_or_device_is_refused(recorded):
    with pytest.raises(
        CheckError, match="expected the tactics of entry, found none of this engine; build with tactics: record"
    ):
        Tactics("verified", recorded, MADE_BY).take("entry", "g" * 64, [], "m")
    with pytest.raises(CheckError, match="expected the tactics of middle, found those of another graph"):
        Tactics("verified", recorded, MADE_BY).take("middle", "h" * 64, [], "m")
    with pytest.raises(
        CheckError, match="tactics.json: version: expected 10.8.0, found 8.6.0; build with tactics: record"
    ):
        Tactics("verified", recorded, MADE_BY | {"version": "10.8.0"})
    device = MADE_BY["device"] | {"compute_capability": "8.9"}
    with pytest.raises(CheckError, match="device: expected compute_capability 8.9, found compute_capability 9.0;"):
        Tactics("verified", recorded, MADE_BY | {"device": device})


@pytest.mark.parametrize("name", [CACHE, RECORD])
def test_a_damaged_or_absent_record_is_an_error_when_verified_and_made_anew_when_recorded(recorded, name):
    (recorded / name).write_bytes(b"damaged")
    for _ in range(2):
        with pytest.raises(CheckError, match=f"{name}: expected .*build with tactics: record"):
            Tactics("verified", recorded, MADE_BY)
        anew = Tactics("record", recorded, MADE_BY)
        assert anew.cache == b"" and not anew.engines
        (recorded / name).unlink(missing_ok=True)


def test_recording_goes_on_from_what_an_interrupted_build_left(recorded):
    tactics = Tactics("record", recorded, MADE_BY)
    assert tactics.cache == b"cache" and "middle" in tactics.engines
    tactics.take("exit", "e" * 64, [], "exit.engine")
    tactics.take_cache(b"more", {}, "exit.engine")
    tactics.finish(["exit"])
    assert list(read_json(recorded / RECORD)["engines"]) == ["exit"] and (recorded / CACHE).read_bytes() == b"more"


def test_free_tactics_leave_nothing_behind(tmp_path):
    tactics = Tactics("free", tmp_path, MADE_BY)
    tactics.take("middle", "g" * 64, [], "m")
    tactics.take_cache(b"cache", {}, "m")
    assert tactics.finish(["middle"]) == {"mode": "free"} and not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="tactics: expected one of free, record, verified, found 'some'"):
        Tactics("some", tmp_path, MADE_BY)


# --- device


def test_the_driver_is_told_by_its_kernel_module_or_by_cuda():
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan  9 01:45:55 UTC 2025\nGCC version: ..."
    assert driver_version(12080, text) == "570.86.15"
    assert (
        driver_version(12080, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build")
        == "580.95.05"
    )
    assert driver_version(12080, "") == "CUDA 12.8"


def test_an_engine_depends_on_name_capability_and_driver_alone():
    device = {"type": "gpu", "name": "NVIDIA H200", "compute_capability": "9.0", "driver": "570.1", "memory": 1}
    assert gpu_key(device) == gpu_key(device | {"memory": 2}) != gpu_key(device | {"driver": "570.2"})
    assert gpu_key({"type": "cpu"}) == {"name": None, "compute_capability": None, "driver": None}


# --- what fused attention needs. What packages and libraries that are not there say is of nvidia-cudnn-frontend 1.26.0
# and cuda-bindings 12.9.4.


def cudnn(version=91900, **methods):
    module = ModuleType("cudnn")
    module.backend_version, module.create_handle, module.destroy_handle = (lambda: version), object, lambda handle: None
    vars(module).update(methods)
    return module


def raises(error):
    def method():
        raise error

    return method


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (
            None,
            ", found: import of cudnn halted; None in sys.modules; install what is missing, or build with "
            "attention: traced",
        ),
        (
            cudnn(backend_version=raises(RuntimeError("Unable to find symbol cudnnGetVersion"))),
            ", found: Unable to find symbol cudnnGetVersion; install what is missing, or build with attention: traced",
        ),
        (
            cudnn(8907),
            ", found cuDNN 8.9; name the folder of libcudnn.so.9 in LD_LIBRARY_PATH, or build with attention: traced",
        ),
        (
            cudnn(create_handle=raises(RuntimeError("CUDNN_STATUS_NOT_INITIALIZED"))),
            ", found one that does not start: CUDNN_STATUS_NOT_INITIALIZED; install one for this driver, or "
            "build with attention: traced",
        ),
    ],
)
def test_what_fused_attention_lacks_is_one_line_of_package_and_library(monkeypatch, module, found):
    monkeypatch.setitem(sys.modules, "cudnn", module)
    with pytest.raises(InputError) as error:
        require_cudnn("build with attention: traced")
    assert str(error.value) == (
        "expected the Python package nvidia-cudnn-frontend and the library cuDNN 9, which compute attention" + found
    )


def test_a_gpu_that_is_too_old_for_fused_attention_is_one_line():
    require_capability({"name": "NVIDIA A100", "compute_capability": "8.0"}, "build with attention: traced")
    require_capability({"name": "NVIDIA B200", "compute_capability": "10.0"}, "build with attention: traced")
    with pytest.raises(InputError) as error:
        require_capability({"name": "Tesla T4", "compute_capability": "7.5"}, "build with attention: traced")
    assert str(error.value) == (
        "expected a GPU of compute capability 8.0 or higher, found Tesla T4 of 7.5; build with attention: traced"
    )


def test_cudnn_9_is_taken(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", cudnn())
    assert require_cudnn() is sys.modules["cudnn"]


def test_cudnn_does_not_bring_torch_along(tmp_path: Path) -> None:
    """Its module takes torch's tensors where there is a torch, and imports it: seconds of a server's start."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "cudnn.py").write_text(
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n"
        "backend_version = lambda: 90100\ncreate_handle = lambda: None\ndestroy_handle = lambda handle: None\n"
    )
    code = (
        "import sys; from lockstep.gpu.libraries import library_versions, require_cudnn\n"
        "assert require_cudnn().torch is None and 'torch' not in sys.modules; library_versions(); import torch"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_without_nvrtc_no_engines_are_opened(monkeypatch):
    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = SimpleNamespace(
        nvrtcVersion=raises(RuntimeError('Failure finding "libnvrtc.so.13 or libnvrtc.so.12"'))
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    with pytest.raises(InputError) as error:
        TensorRTBackend.executor(None, None, 1, 1, 1, None)  # before anything of the backend is looked at
    assert str(error.value) == (
        "expected the package cuda-bindings and the library NVRTC of the CUDA toolkit (nvidia-cuda-nvrtc), which "
        "compiles the kernels of attention and of the KV cache, "
        'found: Failure finding "libnvrtc.so.13 or libnvrtc.so.12"; install it for this Python, or name its '
        "folder in LD_LIBRARY_PATH"
    )


# --- memory of a build


@pytest.mark.parametrize(
    ("used", "found"),
    [([100, 150, 400, 120], 300), ([100, 400, CheckError("CUDA: cudaErrorIllegalAddress"), 900], None)],
)
def test_the_peak_is_what_was_used_at_most_and_none_where_cuda_failed(monkeypatch, capfd, used, found):
    """After a failure nothing is known of what was used, and the build says what failed."""
    looked, answers = threading.Event(), itertools.chain(used, itertools.repeat(used[-1]))

    def memory_used():
        answer = next(answers)
        if answer == used[-1] or isinstance(answer, CheckError):
            looked.set()
        if isinstance(answer, CheckError):
            raise answer
        return answer

    module = ModuleType("lockstep.gpu.cuda")
    module.memory_used = memory_used
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(lockstep.gpu, "cuda", module, raising=False)
    with PeakMemory() as peak:
        assert looked.wait(60)
    assert peak.nbytes == found and not capfd.readouterr().err


def test_modules_of_the_backend_load_without_tensorrt_and_cuda():
    modules = [
        *(f"backends.tensorrt.{name}" for name in "backend compat contract features layers memory tactics".split()),
        *("backends.cuda.backend", "gpu.describe", "gpu.libraries"),
    ]
    code = ("import sys; sys.modules['tensorrt'] = sys.modules['cuda'] = None\n") + "".join(
        f"import lockstep.{name}\n" for name in modules
    )
    subprocess.run([sys.executable, "-c", code], check=True)
