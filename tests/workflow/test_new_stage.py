"""A new stage is an entry in the table of stages, its function, its path and a rule: records, locks, `explain`, the
cache and the command line know it then."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkout import Checkout

ENTRY = """    Stage(
        "count", makes="count", reads=("checkpoint",), code="toy", job="lockstep.toy:count",
        options=lambda config, **names: {"unit": "files"}, pinned=pinned.pin_files, is_cached=True,
        help="How many files a checkpoint has.",
    ),
)  # fmt: skip

STAGES"""
PATH = """    def count(self, model: str, precision: str) -> Path:
        return self.root / model / precision / "count.json"

    def reproduction("""
FUNCTION = """import onnx

from lockstep.artifacts.files import read_json, write_json
from lockstep.manifests.manifest_files import named_files


def count(job):
    number = len(read_json(job.path("checkpoint"))["files"])
    write_json(job.output, {"format": "toy.count/1", job.options["unit"]: number, "IR": onnx.IR_VERSION})
"""
RULE = """
rule count:
    input:
        **inputs_of("count"),
    output:
        output_of("count"),
    log:
        log_of("count", MODEL, PRECISION),
    params:
        options=options_of("count"),
        key=key_of("count"),
    script:
        "../scripts/stage.py"
"""


def only_one_target(config: dict[str, Any]) -> None:
    config["models"]["demo-llama"] |= {"precisions": ["fp16"], "layers": [2]}
    for prompt in config["models"]["demo-llama"]["golden"]["prompts"]:
        prompt["expected"].pop("all")


@pytest.fixture
def counted(demo: Checkout) -> Checkout:
    """A finished run of one target, with a stage more. All of it would be made again, for all stages read the table."""
    demo.edit_config(only_one_target)
    package = demo.folder / "src/lockstep"
    stages, targets = package / "pipeline/stages.py", package / "targets.py"
    end = ")  # fmt: skip\n\nSTAGES"
    assert stages.read_text().count(end) == 1
    stages.write_text(stages.read_text().replace(end, ENTRY))
    targets.write_text(targets.read_text().replace("    def reproduction(", PATH))
    (package / "toy.py").write_text(FUNCTION)
    demo.append("workflow/rules/export.smk", RULE)

    return demo


COUNT = "results/demo-llama/fp16/count.json"


def test_a_toy_stage_is_one_entry_and_one_rule(counted: Checkout) -> None:
    demo, made = counted, counted.folder / COUNT
    assert demo.would_run()["count"] == 1
    cached = ("--config", f"cache={demo.folder / 'cache'}")
    demo.finish(COUNT, *cached)
    assert json.loads(made.read_text())["files"] > 2
    record = json.loads(made.with_name("count.build.json").read_text())
    assert record["options"] == {"unit": "files"} and "toy.py" in record["code"] and "onnx" in record["environment"]
    assert not demo.would_run(COUNT, *cached)

    made.unlink()
    demo.finish(COUNT, *cached)
    assert "cache: count demo-llama/fp16 is taken from" in said_of(demo)
    made.unlink()
    assert "count demo-llama/fp16" in demo.run("lockstep", "explain", "demo-llama/fp16/2").stdout
    assert COUNT in demo.run("lockstep", "count", "demo-llama/fp16").stdout
    assert not demo.would_run(COUNT, *cached)
    demo.append("src/lockstep/toy.py", "EDITED = 1\n")
    assert demo.would_run(COUNT)["count"] == 1


def said_of(checkout: Checkout) -> str:
    return (checkout.results / "logs/count/demo-llama/fp16.log").read_text()


@pytest.mark.long
def test_what_a_toy_stage_makes_is_locked(counted: Checkout) -> None:
    demo, made = counted, counted.folder / COUNT
    demo.finish()
    demo.run("lockstep", "lock")
    lock = json.loads((demo.folder / "locks/demo-llama.lock.json").read_text())
    assert set(lock["results"]["count"]) == {"fp16"} and "count" in lock["made with"]
    assert not demo.would_run("--config", "locked=true")
    demo.run("lockstep", "verify")

    made.unlink()
    demo.run("lockstep", "count", "--locked", "demo-llama/fp16")
    process = demo.run("lockstep", "golden", "--locked", "demo-llama/fp16/2")
    assert process.returncode == 0
