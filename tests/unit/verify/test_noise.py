"""Errors are judged by what the precision itself costs on the weights and tokens, not by a constant."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from demo_model import DEMO, GOLDEN
from pipeline import run_golden, run_validate
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.checkpoint import resolve
from lockstep.errors import CheckError
from lockstep.onnx_tools.judge import Spread, within
from lockstep.targets import Limits, Results, Target
from lockstep.tolerances import NOISE, Tolerances
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.teacher_forced import logit_noise
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.verify.noise import LogitBounds, LogitNoise
from lockstep.verify.rounded import Rounded
from lockstep.weights import convert

# channels of the residual stream, as trained models have them
OUTLIERS = (5, 77)
OUTLIER = 100.0
TARGET = Target("demo-llama", "fp16", 2, "onnxruntime")
FP16 = Tolerances("fp16")


# --- the numbers ---


def test_rows_behind_a_token_that_was_thrown_off_may_be_further_off():
    """Of SmolLM2 in w8a16 behind 255 tokens; an engine on an H100 was off by 0.0438, as transformers' own fp16 is."""
    usual = dict.fromkeys(range(3, 191), (0.05, 0.0171))
    refused, passed = (
        LogitBounds(LogitNoise({2: (1.0, rms), **usual}), FP16).rms(range(175, 191)) for rms in (0.1, 0.454)
    )
    assert refused == pytest.approx(0.0342) and 0.0438 < passed < NOISE * 0.0171


def test_a_row_is_held_to_its_own_noise_or_to_three_times_that_of_the_usual_row():
    """But to no more than any row has."""
    bounds = LogitBounds(LogitNoise({1: (1.0, 0.1), 2: (0.1, 0.01), 3: (0.001, 0.001)}), FP16)
    assert [bounds.at(count) for count in (1, 2, 3)] == pytest.approx([NOISE * 1.0, NOISE * 0.3, NOISE * 0.3])
    bounds = LogitBounds(LogitNoise({1: (0.2, 0.1), 2: (0.1, 0.01), 3: (0.001, 0.001)}), FP16)
    assert bounds.at(3) == pytest.approx(NOISE * 0.2)


def test_a_precision_with_finer_rounding_is_held_to_less():
    precisions = Tolerances("fp32"), Tolerances("w4a16", "onnxruntime"), FP16, Tolerances("bf16")
    bounds = [within(precision, Spread(0.01, 0.002)).largest for precision in precisions]
    assert bounds == sorted(bounds) and bounds[0] * 256 == bounds[2] == bounds[3] / 8


# --- measurements ---


def test_a_parameter_has_the_type_that_it_is_rounded_to():
    """Models cast to the type of their weights."""
    weight = torch.nn.Parameter(torch.ones(2))
    activation = torch.ones(2)
    with Rounded(torch.float16):
        assert (weight.dtype, activation.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rounded_model_is_as_far_off_as_transformers_own_in_16_bits(tmp_path, dtype):
    """Their rms is seen at 0.9 to 1.02 times that. Its own kernels would do, but are slow on many CPUs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15, attn_implementation="eager",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    exact, half = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=item, attn_implementation="eager").eval()
        for item in (torch.float32, dtype)
    )
    ids = torch.randint(0, 300, (1, 60))
    before = {name: value.clone() for name, value in exact.state_dict().items()}
    with torch.no_grad():
        right = exact(ids).logits[0]
        half_logits = half(ids).logits[0]
        with Rounded(dtype):
            actual = exact(ids).logits[0]
    rms, half_rms = ((logits.float() - right).square().mean().sqrt() for logits in (actual, half_logits))
    assert actual.dtype == dtype and 0.6 < rms / half_rms < 1.5
    assert all(torch.equal(value, before[name]) for name, value in exact.state_dict().items())


def test_a_model_that_leaves_fp16s_range_is_measured_in_bf16():
    """Its noise is that of the same digits; that fp16 itself fails is for the engines to show."""
    exact = {1: np.ones(8, np.float32)}

    def model(input_ids, **_):
        hidden = torch.nn.functional.linear(torch.ones(1, 1, 4), torch.nn.Parameter(torch.full((8, 4), 30000.0)))
        return SimpleNamespace(logits=(hidden / 120000.0).float() + 2.0**-7, past_key_values=None)

    model.config = LlamaConfig(num_hidden_layers=1)  # attention, so that there is a cache
    noise = logit_noise(model, [0], exact)
    assert np.isfinite(noise).all() and 0 < noise[0, 0] < 2.0**-8


# --- a model with the activations of a trained one ---


def checkpoint(folder, change):
    """The demo's checkpoint with changed weights."""
    shutil.copytree(DEMO, folder)
    (path,) = folder.glob("*.safetensors")
    weights = {name: array.astype(np.float32) for name, array in load_file(path).items()}
    change(weights)
    save_file(
        {name: np.ascontiguousarray(array, np.float16) for name, array in weights.items()}, path, {"format": "pt"}
    )
    return folder


def with_outliers(weights):
    """Two channels of the residual stream are 100 times the others, and logits have a standard deviation of 7."""
    embedding = weights["model.embed_tokens.weight"]
    for channel in OUTLIERS:
        embedding[:, channel] = OUTLIER * np.sign(embedding[:, channel])
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] *= 3 if name == "model.norm.weight" else 10


def with_small_values(weights):
    """Attention gives a thousandth of the numbers, and its projection takes them a thousandfold: the same model."""
    for layer in range(2):
        weights[f"model.layers.{layer}.self_attn.v_proj.weight"] /= 1024
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"] *= 1024


def noisy_results(demo, folder, change):
    """Results of the demo's graphs and engines on other weights, with the reference of these."""
    results = Results(folder / "results")
    source = checkpoint(folder / "source", change)
    for path in (demo.assembly("demo-llama", "fp16").parent, demo.engines("demo-llama", "fp16", "onnxruntime").parent):
        shutil.copytree(path, results.root / path.relative_to(demo.root))
    resolve(str(source), source, results.checkpoint("demo-llama"))
    convert(results.checkpoint("demo-llama"), "fp16", results.weights("demo-llama", "fp16"))
    return results


def validated(results, tolerance=FP16):
    out = results.validation("demo-llama", "fp16", 2)
    return run_validate(results, TARGET, tolerance, 128, out.parent, out=out, threads=1)


@pytest.fixture(scope="module")
def trained(demo, tmp_path_factory):
    """The demo with outlier channels, and its reference."""
    results = noisy_results(demo, tmp_path_factory.mktemp("trained"), with_outliers)
    terms = GoldenTerms(8, tuple(prompt.text for prompt in GOLDEN.prompts), 100)
    make_reference(results.checkpoint("demo-llama"), 2, terms, results.reference("demo-llama", 2))
    return results


def check(results, out, tolerance=FP16):
    return run_golden(results, TARGET, tolerance, Limits(4, 128, 128, 512), out.parent, out=out)


@pytest.mark.long
def test_right_graphs_and_engines_pass_on_the_activations_of_trained_models(trained, tmp_path):
    validated(trained)
    report = check(trained, tmp_path / "golden.json")
    assert report["result"] == "pass"
    # The model is one that a constant of 0.05, as of random weights, refuses.
    assert 0.05 < report["max_logit_error"] < report["tolerance"]
    assert report["max_logit_error"] < 2 * report["logit_noise"]


def test_an_engine_that_is_a_little_wrong_everywhere_is_refused_by_its_rms(trained, tmp_path, monkeypatch):
    """Errors within what one logit may be off, but in all of them."""
    from lockstep.runtime import Model

    right = Model.step
    random = np.random.default_rng(0)
    noise = check(trained, tmp_path / "right.json")["prompts"][3]["logit_noise"]

    def wrong(self, advances, *arguments):
        logits = right(self, advances, *arguments)
        return logits + np.float32(noise) * np.sign(random.standard_normal(logits.shape, np.float32))

    monkeypatch.setattr(Model, "step", wrong)
    with pytest.raises(
        CheckError, match=r"expected an rms error of at most \S+ of the logits of the median of \d+ steps, "
    ):
        check(trained, tmp_path / "wrong.json")


def test_a_wrong_graph_on_small_activations_is_refused(demo, tmp_path):
    """Its values are 0.001: wholly wrong ones are off by no more than an absolute bound of 0.01 lets through."""
    results = noisy_results(demo, tmp_path, with_small_values)
    report = validated(results)
    attention = [block["tensors"]["prefill.attention"] for block in report["blocks"]]
    assert all(tensor["noise"] < 0.01 for tensor in attention)
    path = results.assembly("demo-llama", "fp16")
    assembly = read_json(path)
    (kind,) = assembly["kinds"]
    for phase in ("prefill", "decode"):
        entry = assembly["kinds"][kind][phase]
        half_of_the_values(path.parent / entry["graph"])
        entry["sha256"] = sha256_file(path.parent / entry["graph"])
    write_json(path, assembly)
    with pytest.raises(
        CheckError, match=r"^layer 0 .*prefill.value_out: expected an error of at most 0\.0\d+, found 0\.5"
    ):
        validated(results)
    report = json.loads(results.validation("demo-llama", "fp16", 2).with_name("2.failed.json").read_text())
    assert report["blocks"][0]["tensors"]["prefill.value_out"]["max_abs_error"] < 0.01


def half_of_the_values(path):
    """Halve the values that an attention graph is given."""
    import onnx

    model = onnx.load(path)
    for node in model.graph.node:
        node.input[:] = ["halved" if name == "value" else name for name in node.input]
    half = onnx.numpy_helper.from_array(np.array(0.5, np.float16), "half")
    model.graph.initializer.append(half)
    model.graph.node.insert(0, onnx.helper.make_node("Mul", ["value", "half"], ["halved"], name="halved"))
    onnx.save(model, path)
