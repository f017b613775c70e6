"""Building with TensorRT, as far as it goes without a GPU: profiles, what the inspector's listing is read for, records
of tactics, refusals.

Listings are written by hand in the inspector's format, but for those in tests/data, which TensorRT 10.6 wrote on an
H200.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx.parser
import pytest

import lockstep_gpu
from lockstep.artifacts.files import read_json, sha256_file, sha256_json
from lockstep.backends.profiles import decode_ranges, profiles, prompt_ranges
from lockstep.errors import CheckError, InputError
from lockstep.targets import Limits
from lockstep_gpu.backends.tensorrt import backend as tensorrt_backend
from lockstep_gpu.backends.tensorrt import compat
from lockstep_gpu.backends.tensorrt.backend import TensorRTBackend
from lockstep_gpu.backends.tensorrt.compat import TENSORRT, Tensor
from lockstep_gpu.backends.tensorrt.contract import check_contract, tensor_types
from lockstep_gpu.backends.tensorrt.layers import check_precision, datatype, fingerprint, fp16_sums, read_layers
from lockstep_gpu.backends.tensorrt.memory import PeakMemory
from lockstep_gpu.backends.tensorrt.tactics import CACHE, RECORD, Tactics
from lockstep_gpu.describe import driver_version, gpu_key
from lockstep_gpu.libraries import require_capability, require_cudnn

LIMITS = Limits(max_batch_size=8, max_num_tokens=64, max_seq_len=32)
BLOCK = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]> g (float16[num_tokens, 16] hidden, int64[num_tokens] rows, float16[32, 16] weight) => (float16[num_tokens, 32] out)
    { taken = Gather(hidden, rows)  out = Gemm<transB = 1>(taken, weight) }"""  # noqa: E501
)
BLOCK.graph.node[1].name = "product"
DATA = Path(__file__).parents[2] / "data"
HALF = "Row major linear FP16 format"
FLOAT = "Row major linear FP32"


def graph(*inputs: str) -> onnx.ModelProto:
    names = ", ".join(f"float[{shape}] x{i}" for i, shape in enumerate(inputs))
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({names}) => (float[n] y) {{ y = Identity(x0) }}'
    )


# --- profiles


def test_a_block_has_profiles_for_one_request_for_several_and_for_prompts():
    single, several, many, prefill = profiles(BLOCK, LIMITS)
    assert single == {"hidden": ((1, 16),) * 3, "rows": ((1,),) * 3}
    assert several == {"hidden": ((2, 16), (4, 16), (4, 16)), "rows": ((2,), (4,), (4,))}
    assert many == {"hidden": ((5, 16), (8, 16), (8, 16)), "rows": ((5,), (8,), (8,))}
    # a step of max_num_tokens, and a token of each row that decodes
    assert prefill["hidden"] == ((1, 16), (64, 16), (72, 16))
    assert len(profiles(BLOCK, replace(LIMITS, max_batch_size=1))) == 2


def test_an_exit_has_profiles_for_one_row_and_for_several_and_an_embedding_one():
    single, several, many = profiles(graph("num_tokens, 4", "num_requests"), LIMITS)
    assert single == {"x0": ((1, 4),) * 3, "x1": ((1,),) * 3}
    # a step that brings prompts may ask for one row
    assert several == {"x0": ((1, 4), (64, 4), (72, 4)), "x1": ((1,), (4,), (4,))}
    assert many == {"x0": ((5, 4), (64, 4), (72, 4)), "x1": ((5,), (8,), (8,))}
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
    single, *several = profiles(graph("num_tokens, 4", "num_requests"), limits)
    assert single["x1"] == ((1,),) * 3
    assert [profile["x1"] for profile in several] == [((1,), (4,), (4,)), ((5,), (8,), (8,)), ((9,), (10,), (10,))]
    assert [profile["x0"] for profile in several] == [((low, 4), (64, 4), (74, 4)) for low in (1, 5, 9)]


def test_a_block_that_applies_rope_has_no_profile_of_one_size():
    """TensorRT 10.6 computes it wrong in one."""
    rope = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[num_tokens] position_ids) => (int64[num_tokens] y) '
        "{ y = Identity(position_ids) }"
    )
    found = [profile["position_ids"] for profile in profiles(rope, replace(LIMITS, max_batch_size=5))]
    assert found == [((1,), (1,), (2,)), ((2,), (4,), (4,)), ((4,), (5,), (5,)), ((1,), (64,), (69,))]


@pytest.mark.parametrize(("rows", "tokens", "ranges"), [
    (4, 512, []), (16, 2048, [(17, 512), (513, 1024)]), (256, 1000, [(257, 512)]), (512, 4096, [(513, 1024)]),
    (1024, 8192, []),
])  # fmt: skip
def test_prompts_come_in_ranges_between_the_rows_that_decode_and_the_limit(rows, tokens, ranges):
    assert prompt_ranges(rows, tokens) == ranges


def test_a_prompt_takes_the_profile_that_is_tuned_for_the_next_larger_size():
    limits = replace(LIMITS, max_batch_size=256, max_num_tokens=2048)
    results = [profile["rows"] for profile in profiles(BLOCK, limits)]
    tuned = []
    for tokens in (1, 64, 100, 256, 257, 512, 513, 1024, 1025, 2048, 2304):
        tuned.append(next(best[0] for low, best, high in results if low[0] <= tokens <= high[0]))
    assert tuned == [1, 64, 128, 256, 512, 512, 1024, 1024, 2048, 2048, 2048]
    assert len(results) == 8 + 2 + 1  # 8 of rows that decode
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
    """What an engine of BLOCK says of itself."""
    bounds = profiles(BLOCK, LIMITS)
    fixed = (((32, 16),) * 3,) * len(bounds)
    return [
        Tensor("hidden", True, np.dtype("float16"), (-1, 16), tuple(profile["hidden"] for profile in bounds)),
        Tensor("rows", True, np.dtype("int64"), (-1,), tuple(profile["rows"] for profile in bounds)),
        Tensor("weight", True, np.dtype("float16"), (32, 16), fixed),
        Tensor("out", False, np.dtype("float16"), (-1, 32), ()),
    ]


def changed(position: int, **values) -> list[Tensor]:
    tensors = engine_tensors()
    tensors[position] = Tensor(**{**vars(tensors[position]), **values})
    return tensors


def test_an_engine_that_is_its_graph_passes():
    check_contract(engine_tensors(), BLOCK, profiles(BLOCK, LIMITS), "x.engine")


def test_beside_a_profile_of_one_size_an_output_may_have_that_size():
    """TensorRT 10.6 on a GPU: [1, 240] where the first profile has one token."""
    check_contract(changed(3, shape=(1, 32)), BLOCK, profiles(BLOCK, LIMITS), "x.engine")
    with pytest.raises(CheckError, match=r"output out: expected float16 \[-1, 32\]"):
        check_contract(changed(3, shape=(1, 16)), BLOCK, profiles(BLOCK, LIMITS), "x.engine")


@pytest.mark.parametrize(("tensors", "message"), [
    (engine_tensors()[:-1], "x.engine: outputs: expected out as in the assembly, found $"),
    (changed(0, name="hiden"), "inputs: expected hidden, rows, weight as in the assembly, found hiden, rows, weight"),
    (changed(3, dtype=np.dtype("float32")),
        r"output out: expected float16 \[-1, 32\] as in the " r"assembly, found float32 \[-1, 32\]"),
    (changed(2, shape=(16, 32)),
        r"input weight: expected float16 \[32, 16\] as in the assembly, found " r"float16 \[16, 32\]"),
    (changed(1, dtype=np.dtype("int32")), r"input rows: expected int64 \[-1\] as in the assembly, found int32"),
    (changed(0, profiles=(((1, 16), (8, 16), (8, 16)),)), "expected 4 optimization profiles, found 1"),
    (changed(1, profiles=(((1,),) * 3, ((2,), (4,), (4,)), ((5,), (8,), (8,)), ((1,), (64,), (64,)))),
        r"input rows, profile 3: expected \[1\] to \[72\], tuned " r"for \[64\], found \[1\] to \[64\]"),
])  # fmt: skip
def test_an_engine_that_is_not_its_graph_is_refused(tensors, message):
    with pytest.raises(CheckError, match=message):
        check_contract(tensors, BLOCK, profiles(BLOCK, LIMITS), "x.engine")


# --- layers


def listing(*layers: dict) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": []})


def layer(
    name="product",
    kind="gemm",
    tactic="sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64",
    value="0x5f7e2a1b3c4d5e6f",
    source=("taken", HALF),
    output=("out", HALF),
) -> dict:
    def tensor(name: str, dtype: str) -> dict:
        return {"Name": name, "Location": "Device", "Dimensions": [-1, 16], "Format/Datatype": dtype}

    return {
        "Name": name, "LayerType": kind, "Inputs": [tensor(*source), tensor("weight", HALF)],
        "Outputs": [tensor(*output)], "TacticName": tactic, "TacticValue": value,
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


@pytest.mark.parametrize(("actual", "message"), [
    (layer(source=("taken", FLOAT)),
        "x.engine: layer product: tensor taken: expected float16 as in the graph, found Row major linear FP32"),
    (layer(output=("out", "Float")), "layer product: tensor out: expected float16 as in the graph, found Float"),
    (layer(source=("Reformatted Input Tensor 0 to product", FLOAT)),
        "layer product: expected a matrix product in float16 as in the graph, found tactic sm80_xmma"),
    (layer(tactic="ampere_sgemm_128x64_tn"),
        "layer product: expected a matrix product in float16 as in the graph, found tactic ampere_sgemm_128x64_tn"),
    (layer(tactic="sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n"), "expected a matrix product in float16 as in the graph"),
])  # fmt: skip
def test_a_product_in_fp32_fails_with_its_layer(actual, message):
    with pytest.raises(CheckError, match=message):
        check_precision(read(layer(name="before"), actual), BLOCK, tensor_types(BLOCK), "x.engine")


def test_kernels_that_accumulate_in_fp16_are_found_by_their_names():
    """Of 10.6 by the types of factors, result and accumulator; of 11.2 by one for each; of cuBLAS by a letter."""
    named = [
        "sm80_xmma_gemm_f16f16_f16f16_f16_tn_n_tilesize64x64x64_stage6_warpsize2x2x1_tensor16x8x16",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1",
        "cutlass3x_sm90_tensorop_gemm_f16_f16_f16_f16_f16_64x64x64",
        "turing_h1688gemm_128x128_ldg8_tn",
        "ampere_s16816gemm_fp16_64x64_tn",
    ]
    layers = read(*(layer(name=str(number), tactic=tactic) for number, tactic in enumerate(named)))
    assert fp16_sums(layers) == ["0", "2", "3"]


@pytest.mark.parametrize(("form", "accumulated_in_fp16"), [
    ("plain", ["__myl_FcAdd_myl1_1", "gemm_1/fused [profile 1]_myl1_3", "__myl_FcAdd_myl1_5",
        "gemm_4/fused [profile 1]_myl1_7", "__myl_FcAdd_myl2_1", "gemm_1/fused [profile 2]_myl2_3",
        "__myl_FcAdd_myl2_5", "gemm_4/fused [profile 2]_myl2_7"]),
    ("casts", []),
])  # fmt: skip
def test_tensorrt_10_6_accumulates_products_between_casts_in_fp32(form, accumulated_in_fp16):
    """The demo's middle block in fp16, as exported and by `Fp32Sums`: four products in each of two profiles.

    The profile of one row has kernels that are generated, and do not tell (`__myl_MulSum`).
    """
    layers = read_layers((DATA / f"layers_10.6_{form}.json").read_text(encoding="utf-8"), form)
    assert sum(layer.is_product for layer in layers) == 8 and fp16_sums(layers) == accumulated_in_fp16


def test_an_engine_without_layers_fails():
    with pytest.raises(CheckError, match="expected layers, among them the matrix product product; found none"):
        check_precision([], BLOCK, tensor_types(BLOCK), "x.engine")


def test_an_engine_whose_layers_tell_no_types_fails():
    text = listing(layer(source=("taken", ""), output=("out", ""))).replace(HALF, "")
    with pytest.raises(CheckError, match="x.engine: expected the datatypes of tensors .*, found none in 1 layers"):
        check_precision(read_layers(text, "x.engine"), BLOCK, tensor_types(BLOCK), "x.engine")


def split_types(text: str) -> str:
    """A listing as TensorRT 11 writes it: the datatype apart from the format."""
    value = json.loads(text)
    for entry in value["Layers"]:
        for tensor in (*entry["Inputs"], *entry["Outputs"]):
            tensor["Datatype"] = "Float" if "FP32" in tensor.pop("Format/Datatype") else "Half"
            tensor["Format"] = "Row major"
    return json.dumps(value)


def test_types_are_read_from_listings_of_tensorrt_11_too():
    right, wrong = (split_types(listing(layer(output=("out", dtype)))) for dtype in (HALF, FLOAT))
    check_precision(read_layers(right, "x"), BLOCK, tensor_types(BLOCK), "x")
    with pytest.raises(CheckError, match="tensor out: expected float16 as in the graph, found Row major Float"):
        check_precision(read_layers(wrong, "x"), BLOCK, tensor_types(BLOCK), "x")


def with_scalars(factor: str) -> dict:
    """A product as TensorRT 10.6 lists it: alpha and beta are inputs, and fp32."""
    scalars = [{"Name": name, "Format/Datatype": "Float"} for name in ("alpha", "beta")]
    gemm = layer(source=("Reformatted Input Tensor 0 to product", factor))
    return {**gemm, "Inputs": [*gemm["Inputs"], *scalars]}


def test_the_scalars_of_a_product_may_be_fp32_and_its_factors_may_not():
    check_precision(read(with_scalars("Half")), BLOCK, tensor_types(BLOCK), "x")
    with pytest.raises(CheckError, match="layer product: expected a matrix product in float16"):
        check_precision(read(with_scalars("Float")), BLOCK, tensor_types(BLOCK), "x")


def test_a_generated_kernel_of_a_product_reads_something_in_half_precision():
    """It has no library's kernel, and its name alone says that it multiplies."""
    generated = layer(name="__myl_FcAdd_myl1_1", kind="kgen", tactic="__myl_FcAdd_0x1234", source=("a", "Float"))
    check_precision(read(generated), BLOCK, tensor_types(BLOCK), "x")
    text = listing(generated).replace(HALF, "Float").replace('"weight"', '"b"').replace('"out"', '"c"')
    with pytest.raises(CheckError, match="layer __myl_FcAdd_myl1_1: expected a matrix product in float16"):
        check_precision(read_layers(text, "x"), BLOCK, tensor_types(BLOCK), "x")


def test_what_the_graph_computes_in_fp32_may_be_fp32():
    model = onnx.ModelProto()
    model.CopyFrom(BLOCK)
    for value in (model.graph.input[0], model.graph.input[2], model.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    check_precision(
        read(layer(tactic="ampere_sgemm_128x64_tn", source=("taken", FLOAT), output=("out", FLOAT))),
        model,
        tensor_types(model),
        "x",
    )


def test_fingerprints_leave_out_pointers_and_keep_tactics():
    """And the numbers that the compiler gives to names."""
    counted = [fingerprint(read(layer(source=(f"__mye{number}_hidden", HALF)))) for number in (12, 345)]
    assert counted[0] == counted[1]
    numbered = [fingerprint(read(layer(name=f"__mye{number}+product"))) for number in (12, 345)]
    assert numbered[0] == numbered[1]
    first = fingerprint(read(layer(name="__myl_FcMul_0x7f3a5c001230", tactic="__myl_Fc_140234567890123_x")))
    again = fingerprint(read(layer(name="__myl_FcMul_0x7f99aa124560", tactic="__myl_Fc_140999999990123_x")))
    assert first == again and first[0].tactic.endswith("0x5f7e2a1b3c4d5e6f")
    assert fingerprint(read(layer(value="0x1111111111111111"))) != fingerprint(read(layer()))
    assert fingerprint(read(layer(source=("taken", FLOAT)))) != fingerprint(read(layer()))
    # A hash of the fused operators: no address is that long.
    tactic = "__myl_AddCastMean_0xf2543c36ff9f104bbb1655b0183afb4"
    assert fingerprint(read(layer(tactic=f"{tactic}7"))) != fingerprint(read(layer(tactic=f"{tactic}8")))
    assert fingerprint(read(layer(name="block_16x16_64"))) != fingerprint(read(layer(name="block_16x16_32")))


@pytest.mark.parametrize(("set_by_user", "recorded"), [
    (None, None), ("", None), (" -cask:fp16_acc=on  -peep:x=off", "-cask:fp16_acc=on -peep:x=off"),
])  # fmt: skip
def test_flags_of_the_compiler_are_the_users_and_an_option_of_the_build(monkeypatch, set_by_user, recorded):
    """TensorRT reads the variable, and its flags change results."""
    monkeypatch.delenv("__LUNOWUD", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("__LUNOWUD", set_by_user)
    monkeypatch.setitem(vars(TENSORRT), "api", SimpleNamespace(__version__="10.6.0", Builder=lambda logger: "builder"))
    monkeypatch.setattr(compat, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(TENSORRT, "logger", lambda: None)
    assert TENSORRT.create_builder() == "builder" and os.environ.get("__LUNOWUD") == set_by_user
    assert TensorRTBackend().default_options().get("compiler_flags") == recorded


def test_without_a_gpu_no_builder_is_started(monkeypatch):
    """Found on a machine without one: TensorRT 10.6 ends the process there, later versions raise TypeError."""
    started = []
    monkeypatch.setitem(vars(TENSORRT), "api", SimpleNamespace(__version__="10.6.0", Builder=started.append))
    monkeypatch.setattr(compat, "compute_capability", lambda: None)
    with pytest.raises(InputError) as error:
        TENSORRT.create_builder()
    assert not started and str(error.value) == (
        "backend tensorrt: TensorRT 10.6.0 cannot start here: expected an NVIDIA GPU and its driver, found none"
    )


@pytest.mark.parametrize(
    ("message", "is_refusal"),
    [
        ("[E] 4: The timing cache will not be used!", True),
        ("Detected invalid timing cache, setup a local cache instead", True),
        ("Failed to deserialize timing cache. Returning an empty timing cache.", True),
        ("The incoming cache will not be used!", True),
        ("Local timing cache in use. Profiling results in this builder pass will not be stored.", False),
        ("Unable to determine GPU memory usage", False),
    ],
)
def test_a_refused_timing_cache_is_told_from_other_warnings(message, is_refusal):
    log = compat.Log()
    log.warnings.append(message)
    assert bool(log.first(compat.REFUSED_CACHE)) == is_refusal and "\n" not in log.first_error()


@pytest.mark.parametrize("message", [[], ["4: The timing cache will not be used!"]])
def test_what_is_refused_of_a_timing_cache_is_seen_when_it_is_read(monkeypatch, message):
    """TensorRT gives a cache all the same."""
    monkeypatch.setitem(vars(TENSORRT), "api", SimpleNamespace(__version__="10.6.0"))
    cache = object()
    config = SimpleNamespace(create_timing_cache=lambda data: TENSORRT.log.errors.extend(message) or cache)
    assert TENSORRT.create_timing_cache(config, b"cache") is (None if message else cache)


def without_tensorrt(monkeypatch, **answers):
    """Building without TensorRT; answers: {method of the library: its return value}."""
    answers = {
        "create_timing_cache": object(),
        "build_plan": b"plan",
        "layer_information": listing(layer()),
        "serialize_timing_cache": b"",
        "cached_tactics": {},
    } | answers
    monkeypatch.setitem(vars(TENSORRT), "api", SimpleNamespace(__version__="10.6.0"))
    for name in (
        "create_builder",
        "create_network",
        "parse",
        "create_config",
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


def built_block(folder: Path, graph: onnx.ModelProto = BLOCK, **options):
    onnx.save(graph, folder / "block.onnx")
    library = TensorRTBackend()
    return library.build(folder / "block.onnx", folder / "block.engine", {**library.default_options(), **options})


@pytest.mark.parametrize(("tactic", "note"), [
    ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n", None),
    ("sm80_xmma_gemm_f16f16_f16f16_f16_tn_n", "products that TensorRT accumulates in fp16: product"),
])  # fmt: skip
def test_a_build_names_the_products_that_are_accumulated_in_fp16(tmp_path, monkeypatch, tactic, note):
    text = listing(layer(tactic=tactic))
    without_tensorrt(monkeypatch, layer_information=text)
    built = built_block(tmp_path)
    assert built.note == note and built.about.get("fp16_sums") == (["product"] if note else None)
    chosen = fingerprint(read_layers(text, "x"))
    assert built.about["tactics_sha256"] == sha256_json([layer.to_json() for layer in chosen])
    assert (tmp_path / "block.engine").read_bytes() == b"plan"


@pytest.mark.parametrize(("name", "options", "level"), [
    ("g", {}, 4), ("g", {"optimization_level": 5}, 5), ("decode", {}, 3), ("prefill", {"optimization_level": 2}, 2),
])  # fmt: skip
def test_traced_attention_is_built_at_level_3_at_most(tmp_path, monkeypatch, name, options, level):
    graph = onnx.ModelProto.FromString(BLOCK.SerializeToString())
    graph.graph.name = name
    levels = []
    without_tensorrt(monkeypatch, create_config=lambda builder, workspace, level: levels.append(level))
    built_block(tmp_path, graph, **options)
    assert levels == [level]


def test_an_engine_of_another_precision_is_not_kept(tmp_path, monkeypatch):
    without_tensorrt(monkeypatch, layer_information=listing(layer(tactic="ampere_sgemm_64x64_tn")))
    with pytest.raises(CheckError, match="block.engine: .*expected a matrix product in float16 as in the graph, found"):
        built_block(tmp_path)
    assert not (tmp_path / "block.engine").exists()


# --- tactics

MADE_BY = {
    "version": "10.6.0",
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
    with pytest.raises(CheckError, match="m: timing cache: expected the recorded bytes after the build, found others"):
        Tactics("verified", recorded, MADE_BY).take_cache(b"cache with more", {}, "m")  # its entries cannot be read
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
        CheckError, match="tactics.json: version: expected 10.8.0, found 10.6.0; build with tactics: record"
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
    defaults = {"backend_version": lambda: version, "create_handle": object, "destroy_handle": lambda handle: None}
    vars(module).update(defaults | methods)
    return module


def raises(error):
    def method():
        raise error

    return method


@pytest.mark.parametrize(
    ("module", "actual"),
    [
        (
            None,
            ", found: import of cudnn halted; None in sys.modules; install "
            "what is missing, or build with attention: traced",
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
def test_what_fused_attention_lacks_is_one_line_of_package_and_library(monkeypatch, module, actual):
    monkeypatch.setitem(sys.modules, "cudnn", module)
    with pytest.raises(InputError) as error:
        require_cudnn("build with attention: traced")
    assert str(error.value) == (
        "expected the Python package nvidia-cudnn-frontend and the library cuDNN 9, which compute attention" + actual
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
        "import sys; from lockstep_gpu.libraries import library_versions, require_cudnn\n"
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
    ("used", "actual"),
    [([100, 150, 400, 120], 300), ([100, 400, CheckError("CUDA: cudaErrorIllegalAddress"), 900], None)],
)
def test_the_peak_is_what_was_used_at_most_and_none_where_cuda_failed(monkeypatch, capfd, used, actual):
    """After a failure the peak is unknown, and the build says what failed."""
    looked = threading.Event()
    answers = itertools.chain(used, itertools.repeat(used[-1]))

    def memory_used():
        answer = next(answers)
        if answer == used[-1] or isinstance(answer, CheckError):
            looked.set()
        if isinstance(answer, CheckError):
            raise answer
        return answer

    module = ModuleType("lockstep_gpu.cuda")
    module.memory_used = memory_used
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(lockstep_gpu, "cuda", module, raising=False)
    with PeakMemory() as peak:
        assert looked.wait(60)
    assert peak.nbytes == actual and not capfd.readouterr().err


def test_modules_of_the_backend_load_without_tensorrt_and_cuda():
    modules = [
        *(f"backends.tensorrt.{name}" for name in "backend compat contract layers memory tactics".split()),
        *("backends.cuda.backend", "describe", "libraries"),
    ]
    code = ("import sys; sys.modules['tensorrt'] = sys.modules['cuda'] = None\n") + "".join(
        f"import lockstep_gpu.{name}\n" for name in modules
    )
    subprocess.run([sys.executable, "-c", code], check=True)
