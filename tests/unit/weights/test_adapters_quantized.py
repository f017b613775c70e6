"""Adapters on quantised weights: a base of floats that is quantised here, and one that its checkpoint has quantised."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from demo_model import DEMO
from lora_folders import ADAPTERS, CONFIG, NAMES, ROOM, logits_of, requests, sizes, tensors, write
from packed_checkpoints import GPTQ, Layout, write_packed
from pipeline import write_assembly

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.quantized import is_data
from lockstep.artifacts.reference import ReferenceManifest
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve
from lockstep.errors import CheckError
from lockstep.export.lora import with_adapters
from lockstep.export.quantize import quantize
from lockstep.runtime import Model, ModelOptions
from lockstep.targets import Limits, Results, Target
from lockstep.verify.golden.adapted import check
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.weights import adapters as loading
from lockstep.weights import convert
from lockstep.weights.adapters import open_adapters
from lockstep.weights.check_adapters import resolve_adapters
from shared import Shared
from some import some

CONFIG_JSON = json.loads((DEMO / "config.json").read_text())
LIMITS = {"max_batch_size": 4, "max_seq_len": 128, "max_num_tokens": 128}
# Whose weights: the demo's, quantised here, or packed in its checkpoint.
BASES: dict[str, tuple[str, Layout | None]] = {
    "w4a16": ("w4a16", None),
    "w8a16": ("w8a16", None),
    "gptq": ("w4a16", replace(GPTQ, zero_points=True)),
}


def adapted_results(shared: Shared, base: str) -> tuple[Results, str]:
    """Results of "model" whose graphs take two adapters at a time and none, and three adapters; its precision."""
    precision, layout = BASES[base]

    def make(root: Path) -> None:
        results = Results(root)
        source = DEMO
        if layout is not None:
            source = root / "checkpoint"
            write_packed(DEMO, source, layout)
        resolve(str(source), source, results.checkpoint("model"))
        already = CheckpointManifest.load(results.checkpoint("model")).quantization
        plain = shared.assembled(CONFIG_JSON, "fp32")
        for name, (files, assembly) in (("model", with_adapters(*plain, ROOM)), ("plain", plain)):
            graphs = quantize(files, assembly, precision, already.group_size if already else 16, already)
            out = write_assembly(*graphs, source, results.assembly(name, precision))
            build(out, "onnxruntime", results.engines(name, precision, "onnxruntime"))
        convert(results.checkpoint("model"), precision, results.weights("model", precision), out)
        taking = Assembly.load(results.assembly("model", precision))
        folders = {name: ADAPTERS / name for name in NAMES}
        folders["random"] = write(root / "random", 16, tensors(sizes(taking), 16, seed=3))
        sources = {name: str(folder) for name, folder in folders.items()}
        resolve_adapters(sources, folders, results.checkpoint("model"), 16, None, results.adapters("model"))
        prompts = {}
        for name, adapter_prompts in CONFIG.adapter_prompts("demo-lora").items():
            prompts[name] = tuple(prompt.text for prompt in adapter_prompts)
        make_reference(
            results.checkpoint("model"), "all", GoldenTerms(12, adapted={**prompts, "random": ("Light",)}),
            results.quantized_adapted_reference("model", precision, "all"), results.weights("model", precision),
            results.adapters("model"),
        )  # fmt: skip

    return Results(shared.folder(f"lora-quantized/{base}", make)), precision


def checked(results: Results, precision: str, out: Path) -> AdaptedReport:
    return AdaptedReport.load(
        check(
            results.assembly("model", precision), results.weights("model", precision),
            results.engines("model", precision, "onnxruntime"), results.adapters("model"),
            results.quantized_adapted_reference("model", precision, "all"),
            Target("model", precision, "all", "onnxruntime"), CONFIG.tolerance("demo-lora", precision, "onnxruntime"),
            Limits(**LIMITS), out,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("base", some(["w4a16", "w8a16", "gptq"]))
def test_engines_say_what_transformers_says_on_the_dequantised_weights(
    shared: Shared, tmp_path: Path, base: str
) -> None:
    results, precision = adapted_results(shared, base)
    report = checked(results, precision, tmp_path / "report.json")
    texts = {(entry.adapter, entry.text): entry.text_out for entry in report.prompts}
    assert texts["shakespeare", "Light"].startswith(" doth outrun all") and texts["", "Light"].startswith(" travels")
    assert report.places == 2 and report.loads > 3 and all(entry.alone_equal for entry in report.prompts)
    assert all(entry.from_base and entry.from_base > 1 for entry in report.prompts if entry.adapter in NAMES)


@pytest.mark.parametrize("base", some(["w4a16", "w8a16"]))
def test_a_request_without_adapter_has_the_bits_of_the_quantised_model(shared: Shared, base: str) -> None:
    results, precision = adapted_results(shared, base)
    logits = []
    for name, adapters in (("plain", None), ("model", results.adapters("model"))):
        paths = (results.engines(name, precision, "onnxruntime"), results.assembly(name, precision))
        model = Model.open(
            *paths, results.weights("model", precision), options=ModelOptions(**LIMITS, adapters_json=adapters)
        )
        logits.append(logits_of(model, [(ids, None) for ids, _ in requests()]))
        if adapters is not None:
            mixed = [
                item if name is None else None for item, (_, name) in zip(logits_of(model, requests()), requests())
            ]
            assert all(a is None or np.array_equal(a, b) for a, b in zip(mixed, logits[0]))
    assert all(map(np.array_equal, *logits))


def test_the_check_finds_a_forgotten_scale_and_a_reference_in_full_precision(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, precision = adapted_results(shared, "w4a16")
    path = results.quantized_adapted_reference("model", precision, "all")
    golden = GoldenTerms(1, adapted={"": ("Light",)})
    files = results.checkpoint("model"), results.adapters("model")
    full = make_reference(files[0], "all", golden, tmp_path / "full.json", adapters_json=files[1])
    reference = ReferenceManifest.load(path)
    other = ReferenceManifest.load(full)
    assert reference.logits.sha256 != other.logits.sha256
    write_adapter = loading.write_adapter
    monkeypatch.setattr(
        "lockstep.runtime.adapters.write_adapter",
        lambda adapter, *arguments: write_adapter(replace(adapter, scale=1.0), *arguments),
    )
    with pytest.raises(CheckError, match="adapter 'captain', prompt .* decoding freely: expected token"):
        checked(results, precision, tmp_path / "report.json")


def test_adapters_go_beside_the_integers_in_full_precision(shared: Shared) -> None:
    """A and B are float32, and each is of the layer whose integers its slot names."""
    results, precision = adapted_results(shared, "w4a16")
    assembly = Assembly.load(results.assembly("model", precision))
    assert assembly.adapters is not None
    for name, slots in assembly.adapters.classes.items():
        assert slots and all(map(is_data, slots))
        inputs = {io.name: io.dtype for io in assembly.classes[name].signature.inputs}
        keys = {key for key in inputs if key.endswith((A_SUFFIX, B_SUFFIX))}
        assert len(keys) == 2 * len(slots) and {inputs[key] for key in keys} == {"float32"}
    assert set(sizes(assembly)) == set(open_adapters(results.adapters("model"))["random"].modules)
