"""The validate stage on the demo."""

import itertools

import pytest
from demo_model import LIMITS, TOLERANCES
from pipeline import run_validate

from lockstep.errors import InputError
from lockstep.targets import Target
from lockstep.verify import validate
from lockstep.verify.metrics import failed_path
from some import some


def run(results, precision, layers, out, **changes):
    target = Target("demo-llama", precision, layers, "onnxruntime")
    options = {"out": out, "threads": 1, **changes}
    return run_validate(results, target, TOLERANCES[precision], LIMITS.max_seq_len, out.parent, **options)


@pytest.mark.parametrize("layers", some([2, "all"]))
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_demos_graphs_compute_what_torch_computes(demo, tmp_path, precision, layers):
    out = tmp_path / "validate.json"
    failed_path(out).write_text("of an earlier run")
    report = run(demo, precision, layers, out, model="demo")
    assert report["format"] == "lockstep.validate/2"
    assert report["target"] == {"model": "demo", "precision": precision, "layers": layers}
    assert report["result"] == "pass" and report["first_failing_layer"] is None and not failed_path(out).exists()
    depth = 6 if layers == "all" else layers
    assert [block["layer"] for block in report["blocks"]] == list(range(depth))
    phases = itertools.product(("prefill", "chunked", "decode"), ("key_out", "value_out", "attention"))
    outputs = {f"{phase}.{name}" for phase, name in phases}
    for block in report["blocks"]:
        # The last layer's output is seen in the logits of the exit block.
        assert set(block["tensors"]) - {"hidden"} == outputs
        assert ("hidden" in block["tensors"]) == (block["layer"] < depth - 1)
        for tensor in block["tensors"].values():
            assert tensor["relative_error"] <= tensor["tolerance"] and tensor["cosine"] > 0.9999
    uncut = {"batchful"} if layers == "all" else set()
    assert set(report["forward"]) == {"split"} | uncut
    graphs = {"attention.decode", "attention.prefill", "embedding", "entry", "exit", "middle"} | uncut
    assert all(set(report["checks"][check]) == graphs for check in ("checker", "lint"))


def test_fp32_graphs_are_exact_to_rounding(demo, tmp_path):
    """Far below the tolerance: a looser figure here would be a change in what the graphs compute. Measured 2e-6 and
    1.4e-5."""
    report = run(demo, "fp32", "all", tmp_path / "validate.json")
    for block in report["blocks"]:
        assert max(tensor["max_abs_error"] for tensor in block["tensors"].values()) < 1e-5
    assert max(runner["max_abs_error"] for runner in report["forward"].values()) < 1e-4


def test_one_layer_is_a_model_too(demo, tmp_path):
    report = run(demo, "fp32", 1, tmp_path / "validate.json")
    assert [block["block"] for block in report["blocks"]] == ["entry"] and report["exit"]["layer"] == 0


def test_inputs_that_do_not_fit_together_are_refused(demo, tmp_path):
    out = tmp_path / "validate.json"
    graphs = demo.assembly("demo-llama", "fp16")
    checkpoint = demo.checkpoint("demo-llama")
    with pytest.raises(InputError, match="precision: expected fp16 as in .*, found fp32"):
        validate.run(graphs, demo.weights("demo-llama", "fp32"), checkpoint, 2, TOLERANCES["fp16"], 256, out)
    with pytest.raises(InputError, match="layers: expected 1 to 6 or 'all', found 7"):
        run(demo, "fp16", 7, out)
    assert not list(tmp_path.iterdir())
