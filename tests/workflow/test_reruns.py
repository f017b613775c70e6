"""What a second run does: nothing, or what the change touches and nothing else."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter

import pytest
from checkout import Checkout

REPORT = Counter(summary=1, plots=1)
MODEL = "demo-llama"


def test_a_second_run_does_nothing(demo: Checkout) -> None:
    assert "Nothing to be done" in demo.finish()


def test_a_first_run_makes_each_result_once(fresh: Checkout) -> None:
    """Two layer counts in two precisions: one export and one engine set a precision, one reference a layer count."""
    expected = Counter(config=1, resolve=1, convert=2, export=2, build=2, reference=2, validate=4, golden=4)
    assert fresh.would_run() == expected + REPORT


def test_a_layer_count_builds_no_engine(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"][MODEL]["layers"].append(3))
    assert demo.would_run() == Counter(config=1, reference=1, validate=2, golden=2) + REPORT


def test_a_precision_adds_its_own_jobs_only(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"][MODEL].update(precisions=["fp32"]))
    without = demo.finish()
    assert "Export" not in without and "Golden" not in without
    for path in (demo.results / MODEL / "fp16").rglob("*.json"):
        path.unlink()
    demo.edit_config(lambda config: config["models"][MODEL].update(precisions=["fp32", "fp16"]))
    assert demo.would_run() == Counter(config=1, convert=1, export=1, build=1, validate=2, golden=2) + REPORT


def test_a_model_adds_its_own_jobs_only(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"].update(other={**config["models"][MODEL], "layers": ["all"], "precisions": ["fp32"]}))
    demo.edit_config(lambda config: [prompt.pop("expected", None) for prompt in config["models"]["other"]["golden"]["prompts"]])
    assert demo.would_run() == Counter(config=1, resolve=1, convert=1, export=1, build=1, reference=1, validate=1, golden=1) + REPORT


def test_a_tolerance_is_checked_again_and_nothing_is_made(demo: Checkout) -> None:
    demo.edit_config(lambda config: config.setdefault("tolerances", {}).update(fp16={"block": 0.09, "logits": 0.09}))
    assert demo.would_run() == Counter(config=1, validate=2, golden=2) + REPORT


def test_limits_touch_the_golden_checks_only(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["limits"].update(max_seq_len=200))
    assert demo.would_run() == Counter(config=1, golden=4) + REPORT


def test_prompts_touch_reference_and_golden(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"][MODEL]["golden"]["prompts"].append({"text": "Light"}))
    assert demo.would_run() == Counter(config=1, reference=2, golden=4) + REPORT


def test_an_expected_text_touches_the_checks_of_its_layer_count(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"][MODEL]["golden"]["prompts"][0].update(expected={2: "x"}))
    demo.edit_config(lambda config: config["models"][MODEL]["golden"]["prompts"].__setitem__(0, {"text": "San Francisco is a", "expected": {2: "x"}}))
    assert demo.would_run()["golden"] >= 2
    assert set(demo.would_run()) == {"config", "golden", "summary", "plots"}


def test_other_weights_need_no_new_graphs_and_no_new_engines(demo: Checkout) -> None:
    """A fine-tune of the same shapes: one bit of one weight."""
    weights = demo.folder / "resources" / MODEL / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    assert demo.would_run() == Counter(resolve=1, convert=2, reference=2, validate=4, golden=4) + REPORT


def test_a_tensor_of_another_shape_needs_new_graphs(demo: Checkout) -> None:
    weights = demo.folder / "resources" / MODEL / "model.safetensors"
    data = weights.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(name for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) == 2)
    header[name]["shape"].reverse()
    text = json.dumps(header, separators=(",", ":")).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    changed = demo.would_run()
    if header[name]["shape"][0] != header[name]["shape"][1]:
        assert changed["export"] == changed["build"] == 2


def test_the_tokenizer_is_part_of_the_graphs(demo: Checkout) -> None:
    demo.append(f"resources/{MODEL}/tokenizer.json", "\n")
    assert demo.would_run()["export"] == 2


@pytest.mark.parametrize(
    ("module", "rules"),
    [
        ("plots.py", {"plots"}),
        ("summary.py", {"summary", "plots"}),
        ("golden/check.py", {"golden", "summary", "plots"}),
        ("runtime/model.py", {"golden", "summary", "plots"}),
        ("validate/__init__.py", {"validate", "summary", "plots"}),
        ("cli.py", set()),
    ],
)
def test_an_edited_module_reruns_the_stages_that_use_it(demo: Checkout, module: str, rules: set[str]) -> None:
    demo.append(f"src/lockstep/{module}", "# edited\n")
    assert set(demo.would_run()) == rules


@pytest.mark.parametrize(
    ("package", "untouched"),
    [
        ("transformers", {"config", "resolve", "convert", "build", "golden"}),
        ("matplotlib", {"config", "resolve", "convert", "export", "build", "reference", "validate", "golden", "summary"}),
        ("snakemake", {"config", "resolve", "convert", "export", "build", "reference", "validate", "golden", "summary", "plots"}),
    ],
)
def test_an_edited_pin_reruns_the_stages_that_import_the_package(demo: Checkout, package: str, untouched: set[str]) -> None:
    pins = demo.folder / "envs" / "requirements.txt"
    pins.write_text("".join(line.replace("==", "==9999.") if line.startswith(f"{package}==") else line for line in pins.read_text().splitlines(True)))
    text = demo.snakemake("--dry-run", "--quiet", "host", "reason").stdout
    triggered = text.partition("params have changed since last execution:")[2].partition("\n\n")[0]
    assert {name for name in untouched if name in triggered.replace(",", " ").split()} == set()
    if package != "snakemake":
        assert triggered


@pytest.mark.parametrize(
    "result",
    [
        "checkpoint.json", "fp32/weights.json", "fp32/graphs/assembly.json", "fp16/engines/onnxruntime/engines.json",
        "fp16/validate/2.json", "reference/all.json", "fp32/golden/onnxruntime/2.json", "fp32/golden/onnxruntime/2.speed.json",
    ],
)  # fmt: skip
def test_a_deleted_result_is_made_again(demo: Checkout, result: str) -> None:
    assert_restored(demo, f"{MODEL}/{result}")


@pytest.mark.parametrize("result", ["config.json", "summary.json", "summary.csv", "report/targets.html", "report/speed.svg"])
def test_a_deleted_report_is_made_again(demo: Checkout, result: str) -> None:
    assert_restored(demo, result)


@pytest.mark.parametrize("result", ["fp16/engines/onnxruntime/middle.onnx", "fp32/graphs/attention.decode.onnx", "fp32/weights.safetensors"])
def test_a_deleted_file_beside_a_manifest_is_made_again(demo: Checkout, result: str) -> None:
    """Snakemake knows manifests only."""
    assert_restored(demo, f"{MODEL}/{result}")


def assert_restored(demo: Checkout, result: str) -> None:
    before = demo.digests()
    os.remove(demo.results / result)
    demo.finish()
    assert (demo.results / result).is_file()
    assert demo.digests() == before
    assert not demo.would_run()
