"""The workflow as a Snakemake module of another one, which renames its rules and may give its results a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from checkout import REPOSITORY, Checkout

SNAKEFILE = """
configfile: "my.yaml"


module lockstep:
    snakefile:
        "{repository}/{snakefile}"
    config:
        config
{prefix}

use rule * from lockstep as lockstep_*


rule mine:
    default_target: True
    input:
        rules.lockstep_all.input,
"""


class Outer(Checkout):
    """A folder without a checkout, in which the repository's own code runs."""

    def is_edited(self) -> bool:
        return False


def outer(
    folder: Path,
    prefix: str = "",
    change: Callable[[dict], object] = lambda config: None,
    snakefile: str = "workflow/Snakefile",
) -> Checkout:
    """A workflow of somebody else that takes this one in. It brings a config: the demo's is for no model named."""
    (folder / "Snakefile").write_text(
        SNAKEFILE.format(
            repository=REPOSITORY, snakefile=snakefile, prefix=f'    prefix:\n        "{prefix}"\n' if prefix else ""
        )
    )
    config = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
    demo = config["models"]["demo-llama"]
    demo |= {"backends": ["onnxruntime"], "precisions": ["fp32", "fp16"]}
    demo.pop("backend_precisions")
    change(config)
    (folder / "my.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    return Outer(folder, {"PYTHONPATH": str(REPOSITORY / "src")})


@pytest.mark.parametrize(
    ("prefix", "snakefile"),
    [
        pytest.param("", "workflow/Snakefile", marks=pytest.mark.long),
        pytest.param("", "Snakefile", marks=pytest.mark.long),
        ("sub/", "workflow/Snakefile"),
    ],
)
def test_a_module_plans_all_stages_under_its_names(tmp_path: Path, prefix: str, snakefile: str) -> None:
    jobs = outer(tmp_path, prefix, snakefile=snakefile).would_run()
    assert jobs["lockstep_golden"] == 4 and jobs["lockstep_export"] == 2 and jobs["lockstep_summary"] == 1
    assert {name for name in jobs if not name.startswith("lockstep_")} == {"mine"}


def only_one_target(config: dict) -> None:
    config["models"]["demo-llama"] |= {"precisions": ["fp32"], "layers": [2]}
    for prompt in config["models"]["demo-llama"]["golden"]["prompts"]:
        prompt["expected"].pop("all")


@pytest.mark.long
def test_a_prefix_holds_for_jobs_and_locks(tmp_path: Path, filled_cache: Path) -> None:
    """Not for the rules' paths alone: what a job writes by itself, and what is looked at before a run, lies there."""
    cache = shutil.copytree(filled_cache, tmp_path / "cache")  # which has graphs, engines and references already
    checkout = outer(tmp_path, "sub/", lambda config: only_one_target(config) or config.update(cache=str(cache)))
    folder = tmp_path / "sub/results/demo-llama"
    summary = "sub/results/summary.json"
    golden = "sub/results/demo-llama/fp32/golden/onnxruntime/2.json"
    checkout.snakemake("--cores", "2")
    assert (tmp_path / golden).with_suffix(".speed.json").is_file() and not (tmp_path / "results").exists()
    assert [row["golden"] for row in json.loads((tmp_path / summary).read_text())["targets"]] == ["pass"]
    assert not checkout.would_run()
    checkout.run("lockstep", "lock", "--results", "sub/results")
    locked = ("--config", "locked=true")
    assert not checkout.would_run(*locked)
    (folder / "fp32/graphs/middle.onnx").write_bytes(b"not as locked")
    process = checkout.snakemake("-n", *locked, check=False)
    assert process.returncode == 1 and "middle.onnx" in process.stdout + process.stderr


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["", "sub/"])
def test_a_record_names_the_stage_not_the_renamed_rule(tmp_path: Path, prefix: str) -> None:
    made = f"{prefix}results/demo-llama/checkpoint.json"
    outer(tmp_path, prefix).snakemake("--cores", "1", made)
    record = json.loads((tmp_path / made).with_suffix(".build.json").read_text())
    assert record["stage"] == "resolve" and "checkpoint" in record["code"]
