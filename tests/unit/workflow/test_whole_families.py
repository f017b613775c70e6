"""Every family shape through the whole workflow, on each backend that runs on a CPU: a family works when that passes.

`make test` takes `BY_DAY` in fp32 through every stage on ONNX Runtime, four on OpenVINO too, and one in small weights.
The rest runs at night.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from graph_faults import change_file, change_input
from tests.whole_workflow import GROUP, LIMITS, MODEL, failures, in_groups

from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.reports import ValidationReport
from lockstep.checkpoint import own_head
from lockstep.checkpoint.auto_config import is_tied
from lockstep.checkpoint.auto_tokenizer import load_auto
from lockstep.checkpoint.tokenizer_file import TokenizerOfTransformers
from lockstep.config.backends import backends
from lockstep.targets import Results, is_quantized
from lockstep.weights import Weights
from shared import Shared
from some import some

pytest.importorskip("openvino")
BACKENDS = ("onnxruntime", "openvino")
# By day on OpenVINO, whose stages take as long as all others: what the demo, a Llama, has not. Biases, learned
# positions, transposed weights; windows and caps; latent attention and a router with groups; states next to attention.
ON_OPENVINO = ("gpt2", "gemma2", "deepseek_v3", "qwen3_5_text")
# The package has no branch by type of model, so one of each structure runs by day. In addition to the above: two RoPEs;
# factors that change with the length; layers without RoPE; interleaved pairs; branches side by side; an offset and
# projections of embeddings; sinks; windows in the mask alone; a residual scaled by the depth; states of a convolution
# and of Mamba-2; two mixers in a layer, and none; attention in chunks.
BY_DAY = (
    *ON_OPENVINO, "gemma3_text", "phi3, longrope", "smollm3", "cohere", "gpt_neox", "opt", "gpt_oss", "qwen2_moe",
    "minicpm3", "lfm2", "falcon_h1", "nemotron_h", "llama4_text",
)  # fmt: skip
SERVED = "qwen3_5_text"  # a server starts for two seconds, and runs the steps that `golden` ran


@pytest.fixture(autouse=True)
def transformers_is_asked_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`resolve` asks it in a process of a second each, for damaged files that hang; here files are whole."""

    def load(folder: Path) -> TokenizerOfTransformers:
        tokenized = load_auto(folder)
        return TokenizerOfTransformers(tokenized.eos_token_id, tokenized.note)

    resolve = importlib.import_module("lockstep.checkpoint.resolve")  # the package has a function of that name too
    monkeypatch.setattr(resolve, "load_as_transformers", load)
    monkeypatch.setattr(own_head, "ties_head", lambda folder: is_tied(str(folder)))


def offered(quantized: bool) -> dict[str, list[str]]:
    """Return the precisions besides fp32 that each backend offers on this CPU."""
    precisions = {}
    for name in BACKENDS:
        settings = backends()[name]
        runs_here = [item for item in settings.precisions if item != "fp32" and not settings.lacks_here(item)]
        precisions[name] = [item for item in runs_here if is_quantized(item) == quantized]
    return precisions


def failed(config: Mapping[str, Any], folder: Path, targets: Mapping[str, Sequence[str]], **options: Any) -> list[str]:
    """Take a config.json with random weights through all stages."""
    (folder / "shape.json").write_text(json.dumps(config))
    return failures(folder / "results", f"random:{folder}/shape.json?seed=0", targets, **options)


@pytest.mark.parametrize("family", some(FAMILIES, *BY_DAY))
def test_a_family_passes_every_stage(shared: Shared, tmp_path: Path, family: str) -> None:
    targets = {"onnxruntime": ["fp32"]}
    if family in ON_OPENVINO:
        targets["openvino"] = ["fp32"]
    left_out = f"served {MODEL}/fp32/all/openvino" if family == SERVED else "served"
    assert not failed(FAMILIES[family].config, tmp_path, targets, left_out=left_out)


@pytest.mark.parametrize("family", some(FAMILIES, "gpt2"))
def test_a_family_passes_every_stage_in_w4a16(shared: Shared, tmp_path: Path, family: str) -> None:
    """GPT-2 holds its weights transposed."""
    targets = dict.fromkeys(BACKENDS, ["w4a16"])
    assert not failed(in_groups(FAMILIES[family].config), tmp_path, targets, left_out="served", group_size=GROUP)


@pytest.mark.parametrize("cached_rows", [61, pytest.param(60, marks=pytest.mark.long)])
def test_three_tokens_are_held_to_the_noise_of_many(shared: Shared, tmp_path: Path, cached_rows: int) -> None:
    """In the noise of OPT after a cache few activations of 8 bits are rounded to another integer; in the graph more.

    Attention to one row less of the cache is off by more.
    """
    options: dict[str, Any] = {"left_out": ("reference", "build", "compare", "golden", "served"), "group_size": GROUP}
    config = in_groups(FAMILIES["opt"].config)
    targets = {"onnxruntime": ["w8a8"]}
    assert not failed(config, tmp_path, targets, **options)
    results = Results(tmp_path / "results")
    report_file = results.validation(MODEL, "w8a8", "all")
    report = ValidationReport.load(report_file)
    assert report.long_context and [cache.num_past for cache in report.long_context.caches] == [61]
    if cached_rows < 61:
        report_file.unlink()
        assembly_file = results.assembly(MODEL, "w8a8")
        assembly = read_json(assembly_file)
        prefill = assembly["kinds"]["attention"]["prefill"]
        fault = change_input("past_lengths", "Min", cached_rows)
        prefill["sha256"] = change_file(assembly_file.with_name(prefill["graph"]), fault)
        write_json(assembly_file, assembly)
        (line,) = failed(config, tmp_path, targets, **options)
        assert "layer 0 (block entry, attention): after 61 cached tokens, chunked.attention: expected an" in line


def test_a_cut_without_attention_has_no_cache_to_follow(shared: Shared, tmp_path: Path) -> None:
    """Nemotron-H's first two layers are a state, and an MLP without a mixer."""
    left_out = ("reference", "build", "compare", "golden", "served")
    config = FAMILIES["nemotron_h"].config
    assert not failed(config, tmp_path, {"onnxruntime": ["fp32"]}, left_out=left_out, layers=[2])
    report = ValidationReport.load(Results(tmp_path / "results").validation(MODEL, "fp32", 2))
    assert report.result == "pass" and report.long_context is None


def test_the_biases_of_a_router_stay_float32_in_16_bits(shared: Shared, tmp_path: Path) -> None:
    """GLM-4.5, as transformers loads it."""
    glm = {"model_type": "glm4_moe", "partial_rotary_factor": 0.5, "first_k_dense_replace": 0, "num_hidden_layers": 1}
    config = {**FAMILIES["dots1"].config, **glm}
    backend, precision = ("onnxruntime", "fp16") if backends()["openvino"].lacks_here("bf16") else ("openvino", "bf16")
    assert not failed(config, tmp_path, {backend: [precision]}, left_out="served")
    weights = Weights.open(Results(tmp_path / "results").weights(MODEL, precision))
    router_biases = [name for name in weights.names() if weights.info(name).dtype == "F32"]
    assert router_biases and all(name.endswith("e_score_correction_bias") for name in router_biases)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_and_passes_in_16_bits(shared: Shared, tmp_path: Path, family: str) -> None:
    """Cut after two layers too, and up to the last position."""
    precisions = offered(quantized=False)
    targets = {**precisions, "openvino": ["fp32", *precisions["openvino"]]}
    limits = dict(LIMITS)
    if family != "phi3, longrope":  # whose factors change at 64
        limits["max_seq_len"] = 128
    assert not failed(FAMILIES[family].config, tmp_path, targets, limits=limits, layers=[2, "all"])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_passes_every_stage_in_small_weights(shared: Shared, tmp_path: Path, family: str) -> None:
    targets = offered(True)
    for precisions in targets.values():
        if "w4a16" in precisions:  # another test's
            precisions.remove("w4a16")
    assert not failed(in_groups(FAMILIES[family].config), tmp_path, targets, group_size=GROUP, layers=[2, "all"])
