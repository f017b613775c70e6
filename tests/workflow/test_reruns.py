"""What a second run does: nothing, or what the change touches and nothing else."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from checkout import Checkout

REPORT = Counter(summary=1)
MODEL = "demo-llama"


def test_a_first_run_makes_each_result_once(fresh: Checkout) -> None:
    """Two layer counts in two precisions: one export and one engine set a precision, one reference a layer count."""
    fresh.edit_config(lambda config: config["models"][MODEL].update(precisions=["fp32", "fp16"]))
    once = Counter(config=1, resolve=1, architecture=1, convert=2, export=2, build=2, compare=2, reference=2)
    assert fresh.would_run() == once + Counter(validate=4, golden=4, served=4) + REPORT


@pytest.fixture(scope="module")
def planned(finished: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A copy of the finished run; a test restores the files that it changes."""
    return finished.copy(tmp_path_factory.mktemp("planned") / "checkout")


def add_a_model(config: dict) -> None:
    config["models"]["other"] = {"source": f"resources/{MODEL}", "golden": {"prompts": [{"text": "Light"}]}}


def prompts(config: dict) -> list:
    return config["models"][MODEL]["golden"]["prompts"]


CHECKS = Counter(validate=2, golden=2, served=2)
ALL = Counter(convert=1, export=1, build=1, compare=1, reference=2) + CHECKS
# A change of the config, and the jobs of the next run.
CHANGES = {
    "a layer count": (
        lambda config: config["models"][MODEL]["layers"].append(3), Counter(reference=1, validate=1, golden=1, served=1)
    ),
    "a precision": (
        lambda config: config["models"][MODEL].update(precisions=["fp32", "fp16"]),
        CHECKS + Counter(["convert", "export", "build", "compare"]),
    ),
    "a model": (
        add_a_model,
        Counter(["resolve", "architecture", "convert", "export", "build", "compare"])
        + Counter(["reference", "validate", "golden", "served"]),
    ),
    "a tolerance": (
        lambda config: config.setdefault("tolerances", {}).update(fp32={"noise": 9}),
        CHECKS + Counter(compare=1),
    ),
    "a limit": (lambda config: config["limits"].update(max_seq_len=200), CHECKS + Counter(compare=1, reference=2)),
    "a prompt": (lambda config: prompts(config).append({"text": "Light"}), Counter(reference=2, golden=2, served=2)),
    "an expected text": (lambda config: prompts(config)[0]["expected"].update({2: "x"}), Counter(golden=1, served=1)),
}  # fmt: skip


@pytest.mark.parametrize(("change", "jobs"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_config_touches_what_it_is_for(planned: Checkout, change: Any, jobs: Counter[str]) -> None:
    path = planned.folder / "config" / "config.yaml"
    before = path.read_text()
    planned.edit_config(change)
    assert planned.would_run() == jobs + REPORT + Counter(config=1)
    path.write_text(before)


@pytest.mark.long
def test_other_weights_need_no_new_graphs_and_no_new_engines(demo: Checkout) -> None:
    """A fine-tune of the same shapes: one bit of one weight."""
    weights = demo.folder / "resources" / MODEL / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    assert demo.would_run() == CHECKS + REPORT + Counter(resolve=1, convert=1, compare=1, reference=2)
    engines = {name: digest for name, digest in demo.digests().items() if "/engines/" in name or "/graphs/" in name}
    printed = demo.finish(f"results/{MODEL}/fp32/golden/onnxruntime/2.json")
    assert "] golden " in printed and "] export " not in printed and "] build " not in printed
    assert engines == {
        name: digest for name, digest in demo.digests().items() if "/engines/" in name or "/graphs/" in name
    }


def test_the_tokenizer_is_part_of_the_graphs(demo: Checkout) -> None:
    demo.append(f"resources/{MODEL}/tokenizer.json", "\n")
    assert demo.would_run() == ALL + REPORT + Counter(resolve=1, architecture=1)


def test_an_edited_module_reruns_the_stages_that_use_it_and_what_reads_them(demo: Checkout) -> None:
    demo.append("src/lockstep_serve/service.py", "EDITED = 1\n")
    assert set(demo.would_run()) == {"served", "summary"}


@pytest.mark.long
def test_a_module_of_no_stage_and_of_another_backend_reruns_nothing(demo: Checkout) -> None:
    for module in ("cli/main.py", "backends/tensorrt/program.py"):
        demo.append(f"src/lockstep/{module}", "EDITED = 1\n")
    assert not demo.would_run()


MADE = {"config", "resolve", "convert", "export", "build", "reference", "validate", "golden", "served", "summary"}
# A package, and the stages that a new version of it runs again.
PINS = {"transformers": {"export", "reference", "validate", "summary"}, "rich": {"summary"}, "snakemake": set()}


@pytest.mark.long
@pytest.mark.parametrize(("package", "touched"), PINS.items())
def test_an_edited_pin_reruns_the_stages_that_import_the_package(
    demo: Checkout, package: str, touched: set[str]
) -> None:
    pins = demo.folder / "envs" / "requirements.txt"
    pins.write_text(pins.read_text().replace(f"\n{package}==", f"\n{package}==9999."))
    text = demo.snakemake("--dry-run", "--quiet", "host", "reason").stdout
    triggered = text.partition("params have changed since last execution:")[2].partition("\n\n")[0]
    actual = set(triggered.replace(",", " ").split())
    assert not (MADE - touched) & actual
    assert actual or package == "snakemake"


def test_a_touched_checkpoint_reruns_nothing(demo: Checkout) -> None:
    os.utime(demo.folder / "resources" / MODEL / "model.safetensors")
    os.utime(demo.folder / "resources" / MODEL / "config.json")
    assert not demo.would_run()
