"""What a second run does: nothing, or what the change touches and nothing else."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from checkout import Checkout

from lockstep.pipeline.stages import REPORTS, STAGES
from lockstep.provenance.code_identity import code_files

REPORT = Counter(summary=1, plots=1)
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
    assert set(demo.would_run()) == {"config", "golden", "served", "summary", "plots"}


@pytest.mark.long  # test_dates.py plans it
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
    assert "Golden check" in printed and "Export graphs" not in printed and "Build engines" not in printed
    assert engines == {
        name: digest for name, digest in demo.digests().items() if "/engines/" in name or "/graphs/" in name
    }


def test_the_tokenizer_is_part_of_the_graphs(demo: Checkout) -> None:
    demo.append(f"resources/{MODEL}/tokenizer.json", "\n")
    made = Counter(
        resolve=1, architecture=1, convert=2, export=2, build=2, compare=2, reference=2, validate=4, golden=4, served=4
    )
    assert demo.would_run() == made + REPORT


@pytest.mark.parametrize(
    ("module", "stages"),
    [
        ("report/plots.py", {"plots"}),
        ("report/summary.py", {"summary"}),
        ("verify/golden/check.py", {"golden"}),
        ("runtime/model.py", {"golden", "served", "adapted"}),
        ("serve/service.py", {"served"}),
        ("verify/validate/__init__.py", {"validate"}),
        ("cli/main.py", set()),
        ("backends/tensorrt/executor.py", set()),
    ],
)
def test_a_module_is_part_of_the_keys_of_the_stages_that_use_it(module: str, stages: set[str]) -> None:
    """Of those that the demo has, whose backend is ONNX Runtime."""
    codes = {
        stage.name: code_files(stage.code, "onnxruntime" if "backend" in stage.wildcards else None)
        for stage in STAGES.values()
    } | {rule: code_files(code) for rule, code in REPORTS.items()}
    assert {name for name, code in codes.items() if module in code} == stages


def test_an_edited_module_reruns_the_stages_that_use_it_and_what_reads_them(demo: Checkout) -> None:
    demo.append("src/lockstep/verify/golden/check.py", "EDITED = 1\n")
    assert set(demo.would_run()) == {"golden", "served", "summary", "plots"}


def test_a_comment_a_docstring_and_a_module_of_no_stage_rerun_nothing(demo: Checkout) -> None:
    module = demo.folder / "src/lockstep/verify/metrics.py"
    module.write_text(module.read_text().replace('"""', '"""Edited. ', 1) + "# edited\n")
    for module in ("cli/main.py", "backends/tensorrt/executor.py"):
        demo.append(f"src/lockstep/{module}", "EDITED = 1\n")
    assert not demo.would_run()


@pytest.mark.parametrize(
    ("package", "untouched"),
    [
        ("transformers", {"config", "resolve", "convert", "build", "golden", "served"}),
        pytest.param(
            "rich",
            {"config", "resolve", "convert", "export", "build", "reference", "validate", "golden", "served", "plots"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "snakemake",
            {
                "config",
                "resolve",
                "convert",
                "export",
                "build",
                "reference",
                "validate",
                "golden",
                "served",
                "summary",
                "plots",
            },
            marks=pytest.mark.long,
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


RESULTS = {
    "config.json": "config",
    f"{MODEL}/checkpoint.json": "resolve",
    f"{MODEL}/architecture.json": "architecture",
    f"{MODEL}/fp32/weights.json": "convert",
    f"{MODEL}/fp32/graphs/assembly.json": "export",
    f"{MODEL}/fp16/engines/onnxruntime/engines.json": "build",
    f"{MODEL}/fp16/validate/2.json": "validate",
    f"{MODEL}/reference/all.json": "reference",
    f"{MODEL}/reference/all.safetensors": "reference",
    f"{MODEL}/fp32/golden/onnxruntime/2.json": "golden",
    f"{MODEL}/fp32/golden/onnxruntime/2.speed.json": "golden",
    f"{MODEL}/fp32/served/onnxruntime/2.json": "served",
    "summary.json": "summary",
    "summary.csv": "summary",
    "report/index.html": "summary",
    f"report/targets/{MODEL}-fp16-all-onnxruntime.html": "summary",
    "report/speed.svg": "plots",
    # Files that Snakemake does not know, for they lie beside a manifest.
    f"{MODEL}/fp16/engines/onnxruntime/middle.onnx": "build",
    f"{MODEL}/fp32/graphs/attention.decode.onnx": "export",
    f"{MODEL}/fp32/weights.safetensors": "convert",
}


# One of each kind: those that are known to Snakemake, that lie beside a manifest, and that nothing reads.
ALWAYS = (
    "config.json",
    f"{MODEL}/reference/all.safetensors",
    f"{MODEL}/fp16/engines/onnxruntime/middle.onnx",
    "summary.csv",
)


@pytest.mark.parametrize(
    "result", [pytest.param(name, marks=[pytest.mark.long] * (name not in ALWAYS)) for name in RESULTS]
)
def test_a_deleted_result_is_noticed(demo: Checkout, result: str) -> None:
    os.remove(demo.results / result)
    assert demo.would_run()[RESULTS[result]] == 1


@pytest.mark.long
def test_deleted_results_are_made_again_as_they_were_by_a_clock_that_was_set_back(demo: Checkout) -> None:
    """One of each kind that comes late, so that not everything is made again. The clock was an hour ahead while the
    results were made: what is made now is older than what it is made from, and the user's files older or younger."""
    hour = 3600 * 10**9
    before = demo.digests()
    for path in demo.results.rglob("*"):
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns + hour, found.st_mtime_ns + hour))
    assert not demo.would_run()
    late = ("build", "validate", "golden", "served", "summary", "plots")
    # of one precision, for all that reads engines is made again with them
    lost = [name.replace("fp32", "fp16") for name, rule in RESULTS.items() if rule in late]
    for result in lost:
        os.remove(demo.results / result)
    printed = demo.finish()
    assert "Export" not in printed and "Resolve" not in printed
    assert all((demo.results / result).is_file() for result in lost)
    assert demo.digests() == before
    assert not demo.would_run()
    demo.call("lockstep", "verify")
