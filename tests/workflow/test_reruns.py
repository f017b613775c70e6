"""What a second run does: nothing, or what the change touches and nothing else."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from checkout import Checkout

REPORT = Counter(summary=1)
MODEL = "demo-llama"


def test_a_second_run_does_nothing(demo: Checkout) -> None:
    assert "Nothing to be done" in demo.finish()


def test_a_first_run_makes_each_result_once(fresh: Checkout) -> None:
    """Two layer counts in two precisions: one export and one engine set a precision, one reference a layer count."""
    expected = Counter(
        config=1,
        resolve=1,
        architecture=1,
        convert=2,
        export=2,
        build=2,
        compare=2,
        reference=2,
        validate=4,
        golden=4,
        served=4,
    )
    assert fresh.would_run() == expected + REPORT


def test_a_layer_count_builds_no_engine(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"][MODEL]["layers"].append(3))
    assert demo.would_run() == Counter(config=1, reference=1, validate=2, golden=2, served=2) + REPORT


@pytest.mark.long
def test_a_precision_adds_its_own_jobs_only(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"][MODEL].update(precisions=["fp32"]))
    without = demo.finish()
    assert "Export" not in without and "Golden" not in without
    for path in (demo.results / MODEL / "fp16").rglob("*.json"):
        path.unlink()
    demo.edit_config(lambda config: config["models"][MODEL].update(precisions=["fp32", "fp16"]))
    assert (
        demo.would_run()
        == Counter(config=1, convert=1, export=1, build=1, compare=1, validate=2, golden=2, served=2) + REPORT
    )


def test_a_model_adds_its_own_jobs_only(demo: Checkout) -> None:
    other = {"source": f"resources/{MODEL}", "golden": {"prompts": [{"text": "Light"}]}}
    demo.edit_config(lambda config: config["models"].update(other=other))
    expected = Counter(
        config=1,
        resolve=1,
        architecture=1,
        convert=1,
        export=1,
        build=1,
        compare=1,
        reference=1,
        validate=1,
        golden=1,
        served=1,
    )
    assert demo.would_run() == expected + REPORT


def test_a_tolerance_is_checked_again_and_nothing_is_made(demo: Checkout) -> None:
    demo.edit_config(lambda config: config.setdefault("tolerances", {}).update(fp16={"block": 0.09, "logits": 0.09}))
    assert demo.would_run() == Counter(config=1, compare=1, validate=2, golden=2, served=2) + REPORT


def test_limits_touch_what_is_checked_as_far_as_they_go(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["limits"].update(max_seq_len=200))
    assert demo.would_run() == Counter(config=1, compare=2, reference=2, validate=4, golden=4, served=4) + REPORT


def test_prompts_touch_reference_and_golden(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"][MODEL]["golden"]["prompts"].append({"text": "Light"}))
    assert demo.would_run() == Counter(config=1, reference=2, golden=4, served=4) + REPORT


def test_an_expected_text_touches_the_checks_of_its_layer_count(demo: Checkout) -> None:
    demo.edit_config(lambda config: config["models"][MODEL]["golden"]["prompts"][0].update(expected={2: "x"}))
    demo.edit_config(
        lambda config: config["models"][MODEL]["golden"]["prompts"].__setitem__(
            0, {"text": "San Francisco is a", "expected": {2: "x"}}
        )
    )
    assert demo.would_run()["golden"] >= 2
    assert set(demo.would_run()) == {"config", "golden", "served", "summary"}


@pytest.mark.long
def test_other_weights_need_no_new_graphs_and_no_new_engines(demo: Checkout) -> None:
    """A fine-tune of the same shapes: one bit of one weight."""
    weights = demo.folder / "resources" / MODEL / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    assert (
        demo.would_run()
        == Counter(resolve=1, convert=2, compare=2, reference=2, validate=4, golden=4, served=4) + REPORT
    )
    engines = {name: digest for name, digest in demo.digests().items() if "/engines/" in name or "/graphs/" in name}
    printed = demo.finish(f"results/{MODEL}/fp16/golden/onnxruntime/2.json")
    assert "] golden " in printed and "] export " not in printed and "] build " not in printed
    assert engines == {
        name: digest for name, digest in demo.digests().items() if "/engines/" in name or "/graphs/" in name
    }


def test_the_tokenizer_is_part_of_the_graphs(demo: Checkout) -> None:
    demo.append(f"resources/{MODEL}/tokenizer.json", "\n")
    made = Counter(
        resolve=1, architecture=1, convert=2, export=2, build=2, compare=2, reference=2, validate=4, golden=4, served=4
    )
    assert demo.would_run() == made + REPORT


def test_an_edited_module_reruns_the_stages_that_use_it_and_what_reads_them(demo: Checkout) -> None:
    demo.append("src/lockstep/serve/service.py", "EDITED = 1\n")
    assert set(demo.would_run()) == {"served", "summary"}


@pytest.mark.long
def test_a_module_of_no_stage_and_of_another_backend_reruns_nothing(demo: Checkout) -> None:
    for module in ("cli/main.py", "backends/tensorrt/program.py"):
        demo.append(f"src/lockstep/{module}", "EDITED = 1\n")
    assert not demo.would_run()


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "untouched"),
    [
        ("transformers", {"config", "resolve", "convert", "build", "golden", "served"}),
        ("rich", {"config", "resolve", "convert", "export", "build", "reference", "validate", "golden", "served"}),
        (
            "snakemake",
            {"config", "resolve", "convert", "export", "build", "reference", "validate", "golden", "served", "summary"},
        ),
    ],
)
def test_an_edited_pin_reruns_the_stages_that_import_the_package(
    demo: Checkout, package: str, untouched: set[str]
) -> None:
    pins = demo.folder / "envs" / "requirements.txt"
    pins.write_text(
        "".join(
            line.replace("==", "==9999.") if line.startswith(f"{package}==") else line
            for line in pins.read_text().splitlines(True)
        )
    )
    text = demo.snakemake("--dry-run", "--quiet", "host", "reason").stdout
    triggered = text.partition("params have changed since last execution:")[2].partition("\n\n")[0]
    assert {name for name in untouched if name in triggered.replace(",", " ").split()} == set()
    if package != "snakemake":
        assert triggered


def test_a_touched_checkpoint_reruns_nothing(demo: Checkout) -> None:
    os.utime(demo.folder / "resources" / MODEL / "model.safetensors")
    os.utime(demo.folder / "resources" / MODEL / "config.json")
    assert not demo.would_run()


@pytest.mark.long
def test_forced_jobs_compute(demo: Checkout) -> None:
    made = f"results/{MODEL}/fp16/golden/onnxruntime/2.json"
    speed = demo.folder / made.replace(".json", ".speed.json")
    before = speed.read_bytes()
    demo.finish("--forcerun", "golden", "--", made)
    assert speed.read_bytes() != before


@pytest.mark.long
def test_what_a_run_is_asked_for_is_made_again_where_it_was_deleted(demo: Checkout) -> None:
    before = demo.digests()
    engines = f"results/{MODEL}/fp16/engines/onnxruntime/engines.json"
    for path in (demo.results / "summary.json", demo.folder / engines):
        path.unlink()
    assert demo.would_run()["summary"] == 1
    demo.finish(engines)
    demo.finish()
    assert demo.digests() == before
