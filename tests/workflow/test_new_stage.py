"""A new stage is its file, its script and a rule: records, locks, `explain`, the cache and the command line know it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkout import Checkout

STAGE = '''"""How many files a checkpoint has."""

import onnx

from lockstep.manifests.digest_cache import digest
from lockstep.artifacts.files import read_json, write_json
from lockstep.stages.stage import Stage


class Count(Stage):
    output = "{model}/{precision}/count.json"
    reads = {"checkpoint": "{model}/checkpoint.json"}
    help = "How many files a checkpoint has."
    is_cached = True

    def options(self, config, names):
        return {"unit": "files"}

    def pin(self, manifest, key):
        return (self.name, key.names["precision"]), {manifest.name: digest(manifest)}

    def run(self, job):
        number = len(read_json(job.inputs["checkpoint"])["files"])
        write_json(job.output, {"format": "toy.count/1", job.options["unit"]: number, "IR": onnx.IR_VERSION})
'''
SCRIPT = """from job import run_stage

run_stage("count", snakemake)
"""
RULE = """
rule count:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
    output:
        update("<results>/{model}/{precision}/count.json"),
    log:
        "<results>/logs/count/{model}/{precision}.log",
    params:
        options=options_of("count"),
        key=key_of("count"),
    script:
        "../scripts/count.py"
"""


def only_one_target(config: dict[str, Any]) -> None:
    config["models"]["demo-llama"] |= {"layers": [2]}
    for prompt in config["models"]["demo-llama"]["golden"]["prompts"]:
        prompt["expected"].pop("all")


@pytest.fixture
def counted(demo: Checkout) -> Checkout:
    """A finished run of one target, with a stage more."""
    demo.edit_config(only_one_target)
    (demo.folder / "src/lockstep/stages/count.py").write_text(STAGE)
    (demo.folder / "workflow/scripts/count.py").write_text(SCRIPT)
    demo.append("workflow/rules/export.smk", RULE)
    return demo


COUNT = "results/demo-llama/fp32/count.json"


@pytest.mark.long
def test_a_stage_is_two_files_and_a_rule(counted: Checkout) -> None:
    demo = counted
    made = counted.folder / COUNT
    assert demo.would_run()["count"] == 1
    cached = ("--config", f"cache={demo.folder / 'cache'}")
    demo.finish(COUNT, *cached)
    assert json.loads(made.read_text())["files"] > 2
    record = json.loads(made.with_name("count.build.json").read_text())
    assert record["options"] == {"unit": "files"} and "stages" in record["code"]
    assert "onnx" in record["environment"]
    assert not demo.would_run(COUNT, *cached)

    made.unlink()
    demo.finish(COUNT, *cached)
    assert "cache: count demo-llama/fp32 is taken from" in said_of(demo)
    made.unlink()
    assert "count demo-llama/fp32" in demo.run("lockstep", "explain", "demo-llama/fp32/2").stdout
    assert COUNT in demo.run("lockstep", "stage", "count", "demo-llama/fp32").stdout
    assert not demo.would_run(COUNT, *cached)
    demo.finish("--forcerun", "count", "--", COUNT)
    demo.append("src/lockstep/stages/count.py", "EDITED = 1\n")
    assert demo.would_run(COUNT)["count"] == 1


def said_of(checkout: Checkout) -> str:
    return (checkout.results / "logs/count/demo-llama/fp32.log").read_text()


@pytest.mark.long
def test_what_a_toy_stage_makes_is_locked(counted: Checkout) -> None:
    demo = counted
    made = counted.folder / COUNT
    demo.finish()
    demo.run("lockstep", "lock")
    lock = json.loads((demo.folder / "locks/demo-llama.lock.json").read_text())
    assert "count/fp32" in lock["locked"] and "count" in lock["made with"]
    assert not demo.would_run("--config", "locked=true")
    demo.run("lockstep", "verify")

    made.unlink()
    demo.run("lockstep", "stage", "count", "--locked", "demo-llama/fp32")
    process = demo.run("lockstep", "stage", "golden", "--locked", "demo-llama/fp32/2")
    assert process.returncode == 0
