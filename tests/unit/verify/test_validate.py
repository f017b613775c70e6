"""The validate stage on the demo, and on small random models of other architectures."""

import pytest
import transformers
from demo_model import LIMITS, TOLERANCES

from lockstep.artifacts.files import read_json
from lockstep.errors import InputError
from lockstep.verify import validate
from lockstep.verify.metrics import failed_path
from some import some


def run(results, precision, layers, out, **changes):
    paths = (
        results.assembly("demo-llama", precision),
        results.weights("demo-llama", precision),
        results.checkpoint("demo-llama"),
    )
    return validate.run(*paths, layers, TOLERANCES[precision], LIMITS.max_seq_len, out, threads=1, **changes)


@pytest.mark.parametrize("layers", some([2, "all"]))
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_demos_graphs_compute_what_torch_computes(demo, tmp_path, precision, layers):
    out = tmp_path / "validate.json"
    failed_path(out).write_text("of an earlier run")
    report = read_json(run(demo, precision, layers, out, model="demo"), "lockstep.validate/2")
    assert report["target"] == {"model": "demo", "precision": precision, "layers": layers}
    assert report["result"] == "pass" and report["first_failing_layer"] is None and not failed_path(out).exists()
    depth = 6 if layers == "all" else layers
    assert [block["layer"] for block in report["blocks"]] == list(range(depth))
    phases = {
        f"{phase}.{name}"
        for phase in ("prefill", "chunked", "decode")
        for name in ("key_out", "value_out", "attention")
    }
    for block in report["blocks"]:
        # What leaves the last layer is seen in the logits of the exit block.
        assert set(block["tensors"]) == phases | ({"hidden"} if block["layer"] < depth - 1 else set())
        assert all(
            tensor["relative_error"] <= tensor["tolerance"] and tensor["cosine"] > 0.9999
            for tensor in block["tensors"].values()
        )
    assert set(report["forward"]) == ({"split", "batchful"} if layers == "all" else {"split"})
    graphs = {"attention.decode", "attention.prefill", "embedding", "entry", "exit", "middle"} | (
        {"batchful"} if layers == "all" else set()
    )
    assert all(set(report["checks"][check]) == graphs for check in ("checker", "lint"))


def test_fp32_graphs_are_exact_to_rounding(demo, tmp_path):
    """Far below the tolerance: a looser figure here would be a change in what the graphs compute. Measured 2e-6 and
    1.4e-5."""
    report = read_json(run(demo, "fp32", "all", tmp_path / "validate.json"))
    assert max(tensor["max_abs_error"] for block in report["blocks"] for tensor in block["tensors"].values()) < 1e-5
    assert max(runner["max_abs_error"] for runner in report["forward"].values()) < 1e-4


def test_one_layer_is_a_model_too(demo, tmp_path):
    report = read_json(run(demo, "fp32", 1, tmp_path / "validate.json"))
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


# --- other architectures: what the stage must not trip over ---

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.1, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "windows and soft caps": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=5, attn_logit_softcapping=20.0
    ),
    "norms of queries and keys": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "learned positions": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=64, initializer_range=0.1
    ),
    "fused projections": lambda: transformers.Phi3Config(**SMALL),
}
