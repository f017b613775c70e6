"""Planted faults: each is a change, is judged by its effect on users, and is caught only where a gate says so."""

import itertools
import shutil

import numpy as np
import onnx
import onnx.reference
import pytest
from click.testing import CliRunner
from demo_model import LIMITS, ROOT
from onnx import helper

from faults import harm, models, page
from faults import run as faults
from faults.__main__ import faults as command
from faults.case import Case, Setting, plant
from faults.edit import Edit
from faults.harm import SCENARIOS, largest_difference
from faults.table import FAULTS
from lockstep import Model, ModelOptions
from lockstep.artifacts.files import read_json
from lockstep.errors import CheckError

PARTS = ("data", "scales")


@pytest.fixture(scope="module")
def graphs(demo):
    """Have the benchmark take the graphs of the demo that other tests share, which it would export."""

    export = models.lockstep.export_graphs

    def take(checkpoint, precision, out, **options):
        if options:  # another form of a model than others share
            return export(checkpoint, precision, out, **options)
        shutil.copytree(demo.assembly("demo-llama", precision).parent, out.parent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.lockstep, "export_graphs", take)
        yield


@pytest.mark.long
@pytest.mark.exports
def test_a_harmful_fault_that_all_gates_let_through_ends_with_exit_code_1(graphs, tmp_path):
    docs = tmp_path / "docs"
    arguments = [
        "--only", "scale-1.01", "--precision", "fp32", "--backend", "onnxruntime", "--loosen", "1e9", "--work",
        str(tmp_path), "--write", str(docs),
    ]  # fmt: skip
    ended = CliRunner().invoke(command, arguments)
    record = read_json(docs / "bench" / "faults.json")
    assert record["score"] == 0 and record["harmful"] == 2 and record["harmful_caught"] == 0
    assert ended.exit_code == 1
    assert ended.stderr.splitlines()[-1].endswith(
        "found 2 that passed all: scale-1.01 (engine, fp32 on onnxruntime), scale-1.01 (graph, fp32 on onnxruntime)"
    )
    page = (docs / "faults.md").read_text()
    assert "| onnxruntime | others | fp32 | 1 | 2 | 2 | 0 | 0.0 % |" in page
    assert "| scale-1.01 | scores scaled by 1.01 | demo | graph, engine | 2 | 2 | 0.21 | none |" in page
    assert str(tmp_path) not in page


@pytest.fixture(scope="module")
def planted(demo, tmp_path_factory):
    """Return a function that plants a fault in the demo: name, precision -> the files of its assembly."""
    work = tmp_path_factory.mktemp("planted")
    (work / "right").mkdir()
    (work / "right" / "demo").symlink_to(demo.root / "demo-llama")

    setting = Setting(str(work), "onnxruntime", {}, {"fp16": {}, "fp32": {}}, {"fp16": 0, "fp32": 0})

    def planted_files(name, precision):
        case = Case(setting, "demo", precision, name)
        with case.cleared():
            plant(case)
            return {path.name: path.read_bytes() for path in case.assembly.parent.iterdir()}

    return planted_files


@pytest.mark.long
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "fp16"])
def test_each_fault_of_the_demo_changes_what_it_says_and_leaves_a_graph(planted, demo, precision):
    """`plant` refuses a fault without effect on the file, and what the ONNX checker refuses; digests are those of the
    files."""
    right = demo.assembly("demo-llama", precision)
    names = [
        fault.name
        for fault in FAULTS.values()
        if fault.model == "demo" and fault.place != "runtime" and precision in fault.precisions
    ]
    assert len(names) > 60
    for name in names:
        files = planted(name, precision)
        changed = {file for file, data in files.items() if data != (right.parent / file).read_bytes()}
        graphs = {file for file in changed if file.endswith(".onnx")}
        assert "assembly.json" in changed, name
        assert bool(graphs) == (FAULTS[name].place == "graph"), name


def test_a_fault_of_the_assembly_binds_data_and_scales_of_quantised_weights():
    slots = {f"mlp.down_proj.weight.{part}": [f"model.layers.1.mlp.down_proj.weight.{part}"] for part in PARTS}
    assembly = {"layers": [{}, {"exit": {"slots": slots}}]}
    FAULTS["layer-down"].change(assembly)
    assert sorted(slots.values()) == [[f"model.layers.0.mlp.down_proj.weight.{part}"] for part in PARTS]


RUN = [
    fault.name
    for fault in FAULTS.values()
    if fault.place == "runtime" and {fault.model, "onnxruntime"} <= {"demo", *fault.backends}
]


@pytest.mark.parametrize("name", RUN)
def test_a_fault_of_the_runtime_is_no_error_of_its_own(demo, name):
    """It patches existing names, and uses existing attributes."""
    files = (demo.engines("demo-llama", "fp32", "onnxruntime"), demo.assembly("demo-llama", "fp32"))
    sizes = {size: getattr(LIMITS, size) for size in ("max_batch_size", "max_seq_len", "max_num_tokens")}
    model = Model.open(*files, demo.weights("demo-llama", "fp32"), 2, ModelOptions(**sizes))
    scenario = FAULTS[name].shown_by or SCENARIOS["mixed"]
    with FAULTS[name].change():
        assert harm.run(model, {"its own": scenario})["its own"].size


def test_the_gate_of_each_row_is_the_one_that_caught_it_in_the_records():
    """Of all plantings in records/, and each row of the table has some."""
    records = [read_json(ROOT / "records" / "bench" / name) for name in page.RECORDS]
    rows = list(itertools.chain.from_iterable(record["faults"] for record in records))
    # Of fused attention on a GPU: younger than its record, or in a model that was not tried there.
    never_recorded = {"spec-window", "pages-copy", "pages-swap", "pages-last"}
    assert {row["fault"] for row in rows} | never_recorded == set(FAULTS)
    assert all(FAULTS[row["fault"]].about == row["about"] for row in rows)
    assert {faults.missed_by(row) for row in rows if row["harmful"]} == {None}


def test_a_harmful_fault_that_another_gate_caught_than_its_own_is_named():
    record = read_json(ROOT / "records" / "bench" / "faults.json")
    faults.check(record)
    record["faults"][0]["caught_by"] = ["golden"]
    with pytest.raises(CheckError, match=r"found scale-0.99 \(graph, w4a8 on onnxruntime\) by validate not to be"):
        faults.check(record)


def test_what_is_not_finite_is_the_largest_difference():
    right = {"a": np.zeros((2, 3)), "b": np.zeros((1, 3))}
    changed = {"a": np.full((2, 3), -0.5), "b": np.full((1, 3), 0.25)}
    assert largest_difference(right, changed) == (0.5, "a")
    assert largest_difference(right, {**changed, "b": np.array([[0, np.nan, 0]])}) == (None, "b")


@pytest.fixture
def graph():
    """y = (x + 1) * x, z = x + 1"""
    nodes = [
        helper.make_node("Add", ["x", "one"], ["z"], name="add"),
        helper.make_node("Mul", ["z", "x"], ["y"], name="mul"),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in ("x", "y", "z")]
    constants = [onnx.numpy_helper.from_array(np.float32(1), "one")]
    onnx_graph = helper.make_graph(nodes, "graph", values[:1], values[1:], constants)
    return helper.make_model(onnx_graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def run(data, x):
    return onnx.reference.ReferenceEvaluator(data).run(None, {"x": np.array(x, np.float32)})


def test_an_edit_rewires_readers_or_the_output_or_both(graph):
    edit = Edit(graph)
    edit.replace("z", lambda value: edit.times(value, 10.0))
    assert [out.tolist() for out in run(edit.done(), [2])] == [[60], [30]]
    edit = Edit(graph)
    edit.replace("z", lambda value: edit.times(value, 10.0), [edit.producer("y")])
    assert [out.tolist() for out in run(edit.done(), [2])] == [[60], [3]]
    edit = Edit(graph)
    edit.give("z", edit.times("x", 7.0))
    assert [out.tolist() for out in run(edit.done(), [2])] == [[6], [14]]


def test_an_edit_without_effect_or_with_a_circle_is_refused(graph):
    with pytest.raises(ValueError, match="expected a fault, found the graph as it was"):
        Edit(graph).done()
    edit = Edit(graph)
    edit.producer("z").input[1] = "y"
    with pytest.raises(ValueError, match="reads what nothing makes, or itself"):
        edit.done()
