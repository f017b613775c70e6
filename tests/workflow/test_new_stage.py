"""A new stage is a file, a rule and a line of what runs make: statements, locks, `explain` and the cache know it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkout import Checkout

from lockstep.artifacts.statement import Statement, statement_path

STAGE = '''"""How many files a checkpoint has."""

import onnx

from lockstep.manifests.digest_cache import digest
from lockstep.artifacts.files import read_json, write_json
from lockstep.stages.stage import Stage


class Count(Stage):
    def pin(self, manifest, key):
        return (self.name, key.names["precision"]), {manifest.name: digest(manifest)}

    def run(self, job):
        number = len(read_json(job.inputs["checkpoint"])["files"])
        write_json(job.output, {"format": "toy.count/1", "files": number, "IR": onnx.IR_VERSION})
'''
RULE = """
rule count:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
    output:
        update("<results>/{model}/{precision}/count.json"),
    log:
        "<results>/logs/count/{model}/{precision}.log",
    params:
        source=of_config("source"),
        stage=stage_of("count"),
    script:
        SCRIPTS["stage"]
"""


ASKED = '    counted=collected("<results>/{model}/{precision}/count.json", "all"),\n'


def only_one_target(config: dict[str, Any]) -> None:
    config["models"]["demo-llama"] |= {"layers": [2]}
    for prompt in config["models"]["demo-llama"]["golden"]["prompts"]:
        prompt["expected"].pop("all")


@pytest.fixture
def counted(demo: Checkout) -> Checkout:
    """A finished run of one target, with a stage more."""
    demo.edit_config(only_one_target)
    (demo.folder / "src/lockstep/stages/count.py").write_text(STAGE)
    demo.append("workflow/rules/export.smk", RULE)
    report = demo.folder / "workflow/rules/report.smk"
    report.write_text(report.read_text().replace("CHECKED = dict(\n", f"CHECKED = dict(\n{ASKED}"))
    return demo


COUNT = "results/demo-llama/fp32/count.json"


@pytest.mark.long
def test_a_stage_is_a_file_a_rule_and_a_line(counted: Checkout) -> None:
    demo = counted
    path = counted.folder / COUNT
    assert demo.would_run()["count"] == 1
    cached = ("--config", f"cache={demo.folder / 'cache'}")
    demo.finish(COUNT, *cached)
    assert json.loads(path.read_text())["files"] > 2
    key = Statement.load(statement_path(path)).key
    assert key.options == {"source": "resources/demo-llama"} and "lockstep/stages" in key.code
    assert "onnx" in key.environment
    assert not demo.would_run(COUNT, *cached)

    path.unlink()
    demo.finish(COUNT, *cached)
    assert "cache: count demo-llama/fp32 is taken from" in said_of(demo)
    path.unlink()
    assert "count demo-llama/fp32" in demo.run("lockstep", "explain", "demo-llama/fp32/2").stdout
    assert COUNT in demo.job("count", "demo-llama/fp32/2").stdout
    assert not demo.would_run(COUNT, *cached)
    demo.finish("--forcerun", "count", "--", COUNT)
    demo.append("src/lockstep/stages/count.py", "EDITED = 1\n")
    assert demo.would_run(COUNT)["count"] == 1


def said_of(checkout: Checkout) -> str:
    return (checkout.results / "logs/count/demo-llama/fp32.log").read_text()


@pytest.mark.long
def test_what_a_toy_stage_makes_is_locked(counted: Checkout) -> None:
    demo = counted
    path = counted.folder / COUNT
    demo.finish()
    demo.run("lockstep", "lock")
    lock = json.loads((demo.folder / "locks/demo-llama.lock.json").read_text())
    assert "count/fp32" in lock["locked"] and "count" in lock["made with"]
    assert not demo.would_run("--config", "locked=true")
    demo.run("lockstep", "verify")

    path.unlink()
    for stage in ("count", "golden"):
        demo.job(stage, "demo-llama/fp32/2", "locks/demo-llama.lock.json")
