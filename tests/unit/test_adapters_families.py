"""Adapters through all stages but the server, for models of other families than the demo's, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_model import CONFIG as DEMO_CONFIG
from demo_model import DEMO
from families import FAMILIES
from lora_folders import sizes, tensors, write

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.assembly import Assembly
from lockstep.backends import build
from lockstep.checkpoint import resolve
from lockstep.errors import InputError
from lockstep.export import export, random_model
from lockstep.targets import Limits, Results, Target
from lockstep.verify import validate
from lockstep.verify.compare import run as compare
from lockstep.verify.golden.adapted import check
from lockstep.verify.golden.adapted_reference import make_adapted_reference
from lockstep.verify.golden.terms import AdaptedTerms
from lockstep.weights import convert
from lockstep.weights.check_adapters import resolve_adapters

# Fused q, k, v and gate, up; tied and transposed; biases; tied, a soft cap and norms behind; experts.
CHOSEN = ("phi3", "gpt2", "qwen2", "gemma2", "mixtral")
LIMITS = Limits(max_batch_size=4, max_seq_len=64, max_num_tokens=64)
PRECISION = "fp32"


def made(family: str, root: Path) -> tuple[Results, dict[str, tuple[int, int]]]:
    """Results of "model" without adapters, whose graphs take two at a time; its linear layers."""
    config = {**FAMILIES[family].config, "vocab_size": 768}  # the tokenizer's
    (root / "shape.json").write_text(json.dumps(config))
    source = random_model.make(root / "shape.json", 0, root / "checkpoint")
    if not (source / "tokenizer.json").is_file():
        (source / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    results = Results(root / "results")
    resolve(str(source), source, results.checkpoint("model"))
    room = {"max_adapters": 2, "max_lora_rank": 8}
    export(results.checkpoint("model"), PRECISION, results.assembly("model", PRECISION), adapters=room)
    convert(results.checkpoint("model"), PRECISION, results.weights("model", PRECISION))
    build(results.assembly("model", PRECISION), "onnxruntime", results.engines("model", PRECISION, "onnxruntime"))
    return results, sizes(Assembly.load(results.assembly("model", PRECISION)))


def resolved(results: Results, folders: dict[str, Path]) -> Path:
    sources = {name: str(folder) for name, folder in folders.items()}
    return resolve_adapters(sources, folders, results.checkpoint("model"), 8, None, results.adapters("model"))


@pytest.mark.long
@pytest.mark.exports
@pytest.mark.parametrize("family", CHOSEN)
def test_a_family_goes_through_all_stages_with_three_adapters(family: str, tmp_path: Path) -> None:
    results, modules = made(family, tmp_path)
    kinds = {name.rpartition(".")[2] for name in modules}
    assert {"phi3": "qkv_proj", "gpt2": "c_attn", "mixtral": "o_proj"}.get(family, "q_proj") in kinds
    assert not any("experts" in name or name.endswith("gate") for name in modules)
    transposed = {"fan_in_fan_out": True} if family == "gpt2" else {}
    folders = {
        f"a{number}": write(tmp_path / f"a{number}", 8, tensors(modules, 8, seed=number), **transposed)
        for number in range(3)
    }
    resolved(results, folders)
    paths = {
        "assembly": results.assembly("model", PRECISION),
        "weights": results.weights("model", PRECISION),
        "engines": results.engines("model", PRECISION, "onnxruntime"),
    }
    tolerance = DEMO_CONFIG.tolerance("demo-llama", PRECISION)
    checkpoint = results.checkpoint("model")
    validate.run(paths["assembly"], paths["weights"], checkpoint, "all", tolerance, 64, tmp_path / "validate.json")
    compare(
        paths["assembly"], paths["weights"], paths["engines"], tolerance.beside_graph, LIMITS, tmp_path / "compare.json"
    )
    golden = AdaptedTerms(8, dict.fromkeys(("", *folders), ("Light", "San Francisco is a")))
    reference = make_adapted_reference(
        checkpoint, results.adapters("model"), "all", golden, results.adapted_reference("model", "all")
    )
    target = Target("model", PRECISION, "all", "onnxruntime")
    out = tmp_path / "adapted.json"
    found = AdaptedReport.load(
        check(
            paths["assembly"],
            paths["weights"],
            paths["engines"],
            results.adapters("model"),
            reference,
            target,
            tolerance,
            LIMITS,
            out,
        )
    )
    assert found.places == 2 and found.loads > 3 and all(entry.alone_equal for entry in found.prompts)
    assert all(entry.from_base for entry in found.prompts if entry.adapter)


@pytest.mark.long
@pytest.mark.exports
def test_adapted_experts_are_refused_by_name(tmp_path: Path) -> None:
    results, modules = made("mixtral", tmp_path)
    experts = {"model.layers.0.mlp.experts.0.w1": (80, 48)}
    for number, (arrays, settings, line) in enumerate(
        [
            (tensors(experts, 8, 0), {}, "model.layers.0.mlp.experts.0.w1"),
            (tensors(modules, 8, 0), {"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ]
    ):
        folder = write(tmp_path / f"experts{number}", 8, arrays, **settings)
        with pytest.raises(InputError, match=line) as found:
            resolved(results, {"experts": folder})
        assert "\n" not in str(found.value) and not results.adapters("model").exists()
