"""Names, dtypes and shapes that do not match are errors: in graphs, in arrays, and behind Polygraphy's Comparator."""

import numpy as np
import onnx
import pytest

from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.reports import ForwardError, Linted
from lockstep.artifacts.signature import IO, Signature, check_arrays
from lockstep.errors import CheckError
from lockstep.onnx_tools.signature import signature_of
from lockstep.verify.graphs import check_graph
from lockstep.verify.validate.polygraphy_checks import FunctionRunner, compare, lint

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
    ("actual", "message"),
    [(model("hiden, weight", "float[num_tokens,4] hiden, float[3,4] weight"), "found no hidden and unexpected hiden"),
        (model(inputs="float[num_tokens,4] hidden, float[3,4] weight, float[1] more"), "unexpected more"),
        (model(outputs="float[num_tokens,3] logit", result="logit"), "found no logits and unexpected logit"),
        (model(inputs="float[num_tokens,4] hidden, float[4,4] weight"),
            r"'weight': expected float32 \[3, 4\], " r"found float32 \[4, 4\]"),
        (model(inputs="float[num_rows,4] hidden, float[3,4] weight"),
            r"expected float32 \[num_tokens, 4\], found " r"float32 \[num_rows, 4\]"),
        (model(inputs="float16[num_tokens,4] hidden, float[3,4] weight"),
            r"expected float32 \[num_tokens, " r"4\], found float16")],
    ids=["renamed input", "extra input", "missing output", "wrong shape", "renamed dimension", "wrong dtype"],
)  # fmt: skip
def test_a_graph_that_is_not_as_declared_is_an_error(actual, message):
    with pytest.raises(CheckError, match=message):
        DECLARED.check(signature_of(actual.graph), "g.onnx", "export again")


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
    feeds_made = {"hidden": np.zeros((5, 4), np.float32), "weight": np.zeros((3, 4), np.float32)} | changes
    return {name: array for name, array in feeds_made.items() if array is not None}


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


# --- Polygraphy's Comparator ---


def runner(name, factor=1.0):
    return FunctionRunner(name, INPUTS[:1], lambda feed: feed["hidden"] * np.float32(factor))


def feeds(shape=(5, 4)):
    return [{"hidden": np.ones(shape, np.float32)}]


def test_equal_runners_pass_and_the_worst_feed_counts():
    all_feeds = [*feeds(), *feeds((2, 4))]
    result = compare([runner("a"), runner("torch")], all_feeds, 1e-4)["a"]
    assert result == ForwardError(0.0, 0.0, 1e-4, passed=True)
    result = compare([runner("a", factor=1.5), runner("torch")], all_feeds, 1e-4)["a"]
    assert result.max_abs_error == pytest.approx(0.5) and not result.passed


def test_no_number_is_within_tolerance_when_one_is_nan():
    result = compare([runner("a", factor=np.nan), runner("torch")], feeds(), 1e9)["a"]
    assert result.max_abs_error is None and not result.passed


# --- Polygraphy's lint ---


def saved(tmp_path, graph):
    onnx.save(graph, tmp_path / "g.onnx")
    return tmp_path / "g.onnx"


def test_lint_counts_the_nodes_that_pass(tmp_path):
    path = saved(tmp_path, model())
    assert lint(path, path, INPUTS) == Linted(1, ())


def test_lint_names_the_node_that_fails(tmp_path):
    broken = model()
    broken.graph.node[0].name = "the_product"
    broken.graph.node[0].attribute[0].i = 0  # [3, 4] x [3, 4]
    with pytest.raises(CheckError, match="Polygraphy lint.*the_product"):
        file = saved(tmp_path, broken)
        lint(file, file, INPUTS)


def test_an_input_without_effect_fails_lint(tmp_path):
    extra = model(inputs="float[num_tokens,4] hidden, float[3,4] weight, int64[1] past_lengths")
    with pytest.raises(CheckError, match="'past_lengths' does not affect outputs"):
        file = saved(tmp_path, extra)
        lint(file, file, [*INPUTS, IO("past_lengths", "int64", (1,))])
