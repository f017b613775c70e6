"""A new stage is an entry in the table of stages, its function, its path and a rule: records, locks, `explain`, the
cache and the command line know it then."""

from __future__ import annotations

import json
from typing import Any

from checkout import Checkout

ENTRY = """    Stage(
        "count", makes="count", reads=("assembly",), code="toy", job="lockstep.toy:count",
        options=lambda config, **names: {"unit": "nodes"}, pinned=pinned.pin_files, is_cached=True,
        help="How many nodes the graphs of an assembly have.",
    ),
)  # fmt: skip

STAGES"""
PATH = """    def count(self, model: str, precision: str) -> Path:
        return self.root / model / precision / "count.json"

    def reproduction("""
FUNCTION = """import onnx

from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.manifest_files import named_files


def count(job):
    graphs = [file.path for file in named_files(job.path("assembly")) if file.path.suffix == ".onnx"]
    number = sum(len(onnx.load(path).graph.node) for path in graphs)
    write_json(job.output, {"format": "toy.count/1", job.options["unit"]: number})
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


def test_a_toy_stage_is_one_entry_and_one_rule(demo: Checkout) -> None:
    demo.edit_config(only_one_target)  # all of it is made again, for all stages read the table
    package = demo.folder / "src/lockstep"
    stages, targets = package / "pipeline/stages.py", package / "targets.py"
    end = ")  # fmt: skip\n\nSTAGES"
    assert stages.read_text().count(end) == 1
    stages.write_text(stages.read_text().replace(end, ENTRY))
    targets.write_text(targets.read_text().replace("    def reproduction(", PATH))
    (package / "toy.py").write_text(FUNCTION)
    demo.append("workflow/rules/export.smk", RULE)

    assert demo.would_run()["count"] == 1
    demo.finish("--config", f"cache={demo.folder / 'cache'}")
    made = demo.results / "demo-llama/fp16/count.json"
    assert json.loads(made.read_text())["nodes"] > 10
    record = json.loads(made.with_name("count.build.json").read_text())
    assert record["options"] == {"unit": "nodes"} and "toy.py" in record["code"] and "onnx" in record["environment"]
    assert not demo.would_run("--config", f"cache={demo.folder / 'cache'}")

    demo.run("lockstep", "lock")
    lock = json.loads((demo.folder / "locks/demo-llama.lock.json").read_text())
    assert set(lock["results"]["count"]) == {"fp16"} and "count" in lock["made with"]
    assert not demo.would_run("--config", "locked=true")
    demo.run("lockstep", "verify")

    made.unlink()
    assert "count demo-llama/fp16" in demo.run("lockstep", "explain", "demo-llama/fp16/2").stdout
    assert str(made.relative_to(demo.folder)) in demo.run("lockstep", "count", "demo-llama/fp16").stdout
    process = demo.run("lockstep", "golden", "--locked", "demo-llama/fp16/2")
    assert process.returncode == 0
    demo.append("src/lockstep/toy.py", "EDITED = 1\n")
    assert demo.would_run()["count"] == 1
