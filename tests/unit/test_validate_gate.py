"""Names, dtypes and shapes that do not match are errors: in graphs, in arrays, and before and behind Polygraphy's
Comparator."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import onnx
import pytest

from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.reports import ForwardError, Inspected, Linted
from lockstep.artifacts.signature import IO, Signature, check_arrays
from lockstep.errors import CheckError
from lockstep.onnx_tools.signature import signature_of
from lockstep.verify.graphs import check_graph
from lockstep.verify.validate.polygraphy_checks import FunctionRunner, compare, inspect, lint

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


# --- Polygraphy's Comparator: what it would let pass ---


def runner(name, inputs=INPUTS[:1], factor=1.0, output="logits", rows=None):
    made = FunctionRunner(name, inputs, lambda feed: next(iter(feed.values()))[:rows] * np.float32(factor))
    if output != "logits":
        infer = made.infer_impl
        made.infer_impl = lambda feed_dict: OrderedDict({output: infer(feed_dict)["logits"]})
    return made


def feeds(name="hidden", dtype=np.float32, shape=(5, 4)):
    return [{name: np.ones(shape, dtype)}]


def test_equal_runners_pass_and_the_worst_feed_counts():
    both = [*feeds(), *feeds(shape=(2, 4))]
    result = compare([runner("a"), runner("torch")], INPUTS[:1], both, 1e-4)["a"]
    assert result == ForwardError(0.0, pytest.approx(1.0), 0.0, 1e-4, passed=True)
    result = compare([runner("a", factor=1.5), runner("torch")], INPUTS[:1], both, 1e-4)["a"]
    assert result.max_abs_error == pytest.approx(0.5) and not result.passed


def test_no_number_is_within_tolerance_when_one_is_nan():
    result = compare([runner("a", factor=np.nan), runner("torch")], INPUTS[:1], feeds(), 1e9)["a"]
    assert result.max_abs_error is None and not result.passed


@pytest.mark.parametrize(
    ("runners", "given", "message"),
    [
        ([runner("a"), runner("torch")], feeds("hiden"), "found no hidden and unexpected hiden"),
        ([runner("a"), runner("torch")], [{**feeds()[0], "more": np.ones(2)}], "unexpected more"),
        (
            [runner("a"), runner("torch")],
            feeds(shape=(5, 3)),
            r"expected float32 \[num_tokens=5, 4\], found "
            r"float32 \[5, 3\]",
        ),
        ([runner("a"), runner("torch")], feeds(dtype=np.float64), "found float64"),
        ([runner("a", [replace(INPUTS[0], name="hiden")]), runner("torch")], feeds(), "runner a: expected the inputs"),
        ([runner("a"), runner("torch", output="logit")], feeds(), "expected outputs of a as of torch"),
        ([runner("a", rows=2), runner("torch")], feeds(), "expected outputs of a as of torch"),
    ],
    ids=["renamed feed", "extra feed", "wrong shape", "wrong dtype", "renamed input", "renamed output", "fewer rows"],
)
def test_what_polygraphy_would_match_by_itself_is_an_error(runners, given, message):
    with pytest.raises(CheckError, match=message):
        compare(runners, INPUTS[:1], given, 1e-4)


def test_polygraphy_alone_passes_a_wrong_name():
    """Why the gate exists: two runners whose inputs have other names than the data, and the Comparator is content."""
    from polygraphy.comparator import Comparator

    renamed = [replace(INPUTS[0], name="hiden")]
    results = Comparator.run([runner("a", renamed), runner("torch", renamed)], data_loader=feeds())
    assert bool(Comparator.compare_accuracy(results))


# --- Polygraphy's lint and inspect ---


def saved(tmp_path, graph):
    onnx.save(graph, tmp_path / "g.onnx")
    return tmp_path / "g.onnx"


def test_lint_and_inspect_tell_what_a_graph_is_made_of(tmp_path):
    path = saved(tmp_path, model())
    assert lint(path, path, INPUTS) == Linted(1, ())
    assert inspect(path, model(), INPUTS, OUTPUTS) == Inspected(1, {"Gemm": 1})
    with pytest.raises(CheckError, match="found no weight"):
        inspect(path, model("hidden, hidden", "float[num_tokens,4] hidden"), INPUTS, OUTPUTS)


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
