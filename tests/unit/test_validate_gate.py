"""Names, dtypes and shapes that do not match are errors, in graphs and in arrays; so is what has no effect."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.signature import IO, Signature, check_arrays
from lockstep.errors import CheckError
from lockstep.onnx_tools.signature import signature_of
from lockstep.verify.graphs import check_graph
from lockstep.verify.validate.run import check_model

INPUTS = (IO("hidden", "float32", ("num_tokens", 4)), IO("weight", "float32", (3, 4)))
OUTPUTS = (IO("logits", "float32", ("num_tokens", 3)),)
DECLARED = Signature(INPUTS, OUTPUTS)


def model(
    text="hidden, weight",
    inputs="float[num_tokens,4] hidden, float[3,4] weight",
    outputs="float[num_tokens,3] logits",
    result="logits",
):
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g ({inputs}) => ({outputs}) {{ {result} = Gemm<transB=1>({text}) }}'
    )


def test_a_graph_as_declared_passes():
    DECLARED.check(signature_of(model().graph), "g.onnx", "export again")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            model("hiden, weight", "float[num_tokens,4] hiden, float[3,4] weight"),
            "found no hidden and unexpected hiden",
        ),
        (model(inputs="float[num_tokens,4] hidden, float[3,4] weight, float[1] more"), "unexpected more"),
        (model(outputs="float[num_tokens,3] logit", result="logit"), "found no logits and unexpected logit"),
        (
            model(inputs="float[num_tokens,4] hidden, float[4,4] weight"),
            r"'weight': expected float32 \[3, 4\], "
            r"found float32 \[4, 4\]",
        ),
        (
            model(inputs="float[num_rows,4] hidden, float[3,4] weight"),
            r"expected float32 \[num_tokens, 4\], found "
            r"float32 \[num_rows, 4\]",
        ),
        (
            model(inputs="float16[num_tokens,4] hidden, float[3,4] weight"),
            r"expected float32 \[num_tokens, "
            r"4\], found float16",
        ),
    ],
    ids=["renamed input", "extra input", "missing output", "wrong shape", "renamed dimension", "wrong dtype"],
)
def test_a_graph_that_is_not_as_declared_is_an_error(found, message):
    with pytest.raises(CheckError, match=message):
        DECLARED.check(signature_of(found.graph), "g.onnx", "export again")


def test_a_graph_file_that_changed_since_the_export_is_an_error(tmp_path):
    path = tmp_path / "g.onnx"
    onnx.save(model(), path)
    digest = sha256_file(path)
    assert check_graph(path, digest, DECLARED).graph.node[0].op_type == "Gemm"
    path.write_bytes(path.read_bytes() + b"\n\0")
    with pytest.raises(CheckError, match="changed since the export"):
        check_graph(path, digest, DECLARED)
    path.unlink()
    with pytest.raises(CheckError, match="found no file"):
        check_graph(path, digest, DECLARED)


def arrays(**changes):
    given = {"hidden": np.zeros((5, 4), np.float32), "weight": np.zeros((3, 4), np.float32)} | changes
    return {name: array for name, array in given.items() if array is not None}


def test_arrays_as_declared_pass_and_bind_the_free_dimensions():
    assert check_arrays("g", "input", INPUTS, arrays()) == {"num_tokens": 5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": None, "hiden": np.zeros((5, 4), np.float32)}, "found no hidden and unexpected hiden"),
        ({"more": np.zeros(1)}, "unexpected more"),
        ({"weight": None}, "found no weight"),
        ({"weight": np.zeros((4, 3), np.float32)}, r"expected float32 \[3, 4\], found float32 \[4, 3\]"),
        ({"hidden": np.zeros((5, 4, 1), np.float32)}, r"found float32 \[5, 4, 1\]"),
        ({"hidden": np.zeros((5, 4), np.float64)}, "found float64"),
    ],
    ids=["renamed", "extra", "missing", "wrong shape", "wrong rank", "wrong dtype"],
)
def test_arrays_that_are_not_as_declared_are_errors(changes, message):
    with pytest.raises(CheckError, match=message):
        check_arrays("g", "input", INPUTS, arrays(**changes))


def test_a_free_dimension_has_one_size_everywhere():
    declared = [*INPUTS, IO("position_ids", "int64", ("num_tokens",))]
    with pytest.raises(CheckError, match=r"'position_ids': expected int64 \[num_tokens=5\], found int64 \[4\]"):
        check_arrays("g", "input", declared, arrays(position_ids=np.zeros(4, np.int64)))


def test_a_graph_whose_every_input_and_node_affects_an_output_is_well_formed():
    check_model(Path("g.onnx"), model())
    broken = model()
    broken.graph.node[0].attribute[0].i = 0  # [3, 4] x [3, 4]
    with pytest.raises(CheckError, match=r"g\.onnx: the ONNX checker refuses this graph: .*Gemm"):
        check_model(Path("g.onnx"), broken)
    extra = model(inputs="float[num_tokens,4] hidden, float[3,4] weight, int64[1] past_lengths")
    with pytest.raises(CheckError, match="that affect an output, found input 'past_lengths'"):
        check_model(Path("g.onnx"), extra)
    idle = model()
    idle.graph.node.append(onnx.helper.make_node("Neg", ["hidden"], ["nothing"], "idle"))
    with pytest.raises(CheckError, match=r"that affect an output, found node 'idle' \(Neg\)"):
        check_model(Path("g.onnx"), idle)
