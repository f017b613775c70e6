"""Planted faults: each is caught, and the first layer that it touches is named."""

import itertools
import shutil

import numpy as np
import onnx
import pytest
from demo_model import LIMITS, TOLERANCES
from graph_faults import change_file, change_input, mask_dropped, rename, replace_constant
from onnx import numpy_helper
from pipeline import run_validate

from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.errors import CheckError
from lockstep.targets import Target
from lockstep.verify.metrics import failed_path
from some import some, some_cases

FAULTY_LAYER = 3


@pytest.fixture(params=["fp32", pytest.param("fp16", marks=pytest.mark.long)])
def copy(demo, tmp_path, request):
    """A copy of the graphs to plant faults in: (folder of assembly.json, precision)."""
    graphs = demo.assembly("demo-llama", request.param).parent
    shutil.copytree(graphs, tmp_path / "graphs")
    return tmp_path / "graphs", request.param


def run(demo, copy, layers="all"):
    folder, precision = copy
    run_validate(
        demo, Target("demo-llama", precision, layers, "onnxruntime"), TOLERANCES[precision], LIMITS.max_seq_len,
        folder.parent, assembly_json=folder / "assembly.json", threads=1,
    )  # fmt: skip


def plant_in_attention(folder, change):
    """Give layer 3 its own kind whose prefill and decode graphs went through `change(graph)`."""
    assembly = read_json(folder / "assembly.json")
    kind = assembly["kinds"]["faulty"] = {**assembly["kinds"]["attention"]}
    for phase in ("prefill", "decode"):
        path = shutil.copyfile(folder / kind[phase]["graph"], folder / f"faulty.{phase}.onnx")
        kind[phase] = {**kind[phase], "graph": path.name, "sha256": change_file(path, change)}
    assembly["layers"][FAULTY_LAYER]["kind"] = "faulty"
    write_json(folder / "assembly.json", assembly)


SCALE = 40**-0.5
FREQUENCIES = 20
FAULTS = {
    "scale": (
        replace_constant(lambda array: not array.shape and abs(array - SCALE) < 1e-3, lambda array: array * 1.05),
        "prefill.attention",
    ),
    "mask dropped": (mask_dropped, "prefill.attention"),
    "mask one too far": (rename("Less", "LessOrEqual"), "prefill.attention"),
    "rotary dropped": (
        replace_constant(lambda array: array.dtype == np.float32 and array.size == FREQUENCIES, np.zeros_like),
        "prefill.key_out",
    ),
    "position off by one": (change_input("position_ids", "Add", 1), "prefill.key_out"),
}


@pytest.mark.parametrize(("fault", "tensor"), some_cases(FAULTS, "mask one too far", "position off by one"))
def test_a_fault_in_one_layers_attention_is_caught_and_the_layer_named(demo, copy, fault, tensor):
    plant_in_attention(copy[0], fault)
    with pytest.raises(
        CheckError,
        match=rf"^layer {FAULTY_LAYER} \(block middle, faulty\): {tensor}: "
        rf"expected an error of at most",
    ):
        run(demo, copy)
    report = read_json(failed_path(copy[0].parent / "validate.json"), "lockstep.validate/2")
    assert report["result"] == "fail" and report["first_failing_layer"] == FAULTY_LAYER
    assert not (copy[0].parent / "validate.json").exists()
    # Earlier layers are within tolerance, and so are later ones, by teacher forcing.
    over = []
    for block in report["blocks"]:
        if any(tensor["relative_error"] > tensor["tolerance"] for tensor in block["tensors"].values()):
            over.append(block["layer"])
    assert over == [FAULTY_LAYER]


@pytest.mark.parametrize("copy", ["fp32"], indirect=True)
@pytest.mark.parametrize("name", some(["mask dropped", "position off by one"]))
def test_a_fault_in_the_kind_of_all_layers_is_found_in_the_first(demo, copy, name):
    folder = copy[0]
    assembly = read_json(copy[0] / "assembly.json")
    plant_in_attention(folder, FAULTS[name][0])
    assembly["kinds"]["attention"] = read_json(folder / "assembly.json")["kinds"]["faulty"]
    write_json(folder / "assembly.json", assembly)
    with pytest.raises(CheckError, match="^layer 0 "):
        run(demo, copy, layers=2)


def swap(assembly, layer, first, other):
    """Bind two slots of the block behind `layer`'s attention to each other's tensors."""
    slots = assembly["layers"][layer + 1]["block"]["slots"]
    slots[first], slots[other] = slots[other], slots[first]


def test_a_swapped_weight_is_caught_in_the_layer_that_it_belongs_to(demo, copy):
    """Gate and up of layer 3 have one shape: only numbers can tell. The block before layer 4's attention computes
    them."""
    folder = copy[0]
    assembly = read_json(copy[0] / "assembly.json")
    swap(assembly, FAULTY_LAYER, "previous.mlp.gate_proj.weight", "previous.mlp.up_proj.weight")
    write_json(folder / "assembly.json", assembly)
    with pytest.raises(CheckError, match=rf"^layer {FAULTY_LAYER} .*: hidden: "):
        run(demo, copy)


KEYS = (4, "block", "current.self_attn.k_proj.weight", "model.layers.5.self_attn.k_proj.weight")
NORM = (1, "exit", "model.norm.weight", "model.layers.0.input_layernorm.weight")


@pytest.mark.parametrize(("copy", "layers", "bound", "message"), [
    ("fp32", "all", KEYS, r"^layer 4 .*: prefill.key_out: "),
    pytest.param("fp16", "all", KEYS, r"^layer 4 .*: prefill.key_out: ", marks=pytest.mark.long),
    ("fp32", 2, NORM, r"^layer 1 \(block exit, after the last attention\): logits: "),
], indirect=["copy"])  # fmt: skip
def test_a_weight_of_another_layer_is_caught(demo, copy, layers, bound, message):
    folder = copy[0]
    assembly = read_json(folder / "assembly.json")
    layer, part, slot, tensor = bound
    assembly["layers"][layer][part]["slots"][slot] = [tensor]
    write_json(folder / "assembly.json", assembly)
    with pytest.raises(CheckError, match=message):
        run(demo, copy, layers=layers)


@pytest.mark.parametrize("copy", ["fp32"], indirect=True)
def test_a_fault_in_the_uncut_graph_alone_is_caught(demo, copy):
    folder = copy[0]
    assembly = read_json(copy[0] / "assembly.json")
    path = folder / assembly["batchful"]["graph"]
    model = onnx.load(path)
    nodes = itertools.chain(*(function.node for function in model.functions))
    constants = [node.attribute[0].t for node in nodes if node.op_type == "Constant"]
    scale = next(
        tensor for tensor in constants if not tensor.dims and numpy_helper.to_array(tensor) == np.float32(SCALE)
    )
    scale.CopyFrom(numpy_helper.from_array(np.asarray(1.05 * numpy_helper.to_array(scale), np.float32), scale.name))
    onnx.save(model, path)
    assembly["batchful"]["sha256"] = sha256_file(path)
    write_json(folder / "assembly.json", assembly)
    with pytest.raises(CheckError, match=r"^whole forward \(batchful\)"):
        run(demo, copy)


@pytest.mark.parametrize("copy", ["fp32"], indirect=True)
def test_a_graph_that_was_edited_behind_the_assemblys_back_is_an_error(demo, copy):
    path = copy[0] / "middle.onnx"
    model = onnx.load(path)
    model.graph.node[0].name = "edited"
    onnx.save(model, path)
    with pytest.raises(CheckError, match="middle.onnx: sha256"):
        run(demo, copy, layers=2)
