"""The workflow as a Snakemake module of another one: by path, from a commit in git, as snakedeploy writes it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from checkout import REPOSITORY, Checkout

from lockstep.artifacts.statement import Statement, statement_path

SNAKEFILE = """
configfile: "config/config.yaml"


module lockstep:
    snakefile:
        {snakefile}
    config:
        config
{prefix}

use rule * from lockstep as {names}
"""
MINE = """

rule mine:
    default_target: True
    input:
        rules.lockstep_all.input,
"""
PATH = f'"{REPOSITORY}/workflow/Snakefile"'


class Outer(Checkout):
    """A folder without a checkout, in which the repository's own code runs."""

    def is_edited(self) -> bool:
        return False


def outer(
    folder: Path,
    prefix: str = "",
    change: Callable[[dict], object] = lambda config: None,
    snakefile: str = PATH,
    names: str = "lockstep_*",
    **variables: str,
) -> Checkout:
    """A workflow of somebody else that takes this one in. It brings a config: the demo's is for no model named."""
    module = SNAKEFILE.format(
        snakefile=snakefile, prefix=f'    prefix:\n        "{prefix}"\n' if prefix else "", names=names
    )
    (folder / "workflow").mkdir(exist_ok=True)
    (folder / "workflow" / "Snakefile").write_text(module + (MINE if names == "lockstep_*" else ""))
    config = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
    demo = config["models"]["demo-llama"]
    demo |= {"backends": ["onnxruntime"], "precisions": ["fp32", "fp16"]}
    demo.pop("backend_precisions")
    change(config)
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    return Outer(folder, {"PYTHONPATH": str(REPOSITORY / "src"), **variables})


@pytest.mark.parametrize(
    ("prefix", "snakefile"),
    [
        pytest.param("", PATH, marks=pytest.mark.long),
        pytest.param("", f'"{REPOSITORY}/Snakefile"', marks=pytest.mark.long),
        ("sub/", PATH),
    ],
)
def test_a_module_plans_all_stages_under_its_names(tmp_path: Path, prefix: str, snakefile: str) -> None:
    jobs = outer(tmp_path, prefix, snakefile=snakefile).would_run()
    assert jobs["lockstep_golden"] == 4 and jobs["lockstep_export"] == 2 and jobs["lockstep_summary"] == 1
    assert {name for name in jobs if not name.startswith("lockstep_")} == {"mine"}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with the workflow as tag `v1`, and without a working tree: what runs is in the commit."""
    folder = tmp_path_factory.mktemp("origin") / "owner" / "lockstep"
    for part in ("config", "envs", "profiles", "workflow"):
        shutil.copytree(REPOSITORY / part, folder / part)
    user = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "tag.gpgSign=false")
    for command in (
        ("init",), ("add", "."), ("commit", "-m", "all"), ("tag", "v1"), ("rm", "-r", "."), ("commit", "-m", "none"),
    ):  # fmt: skip
        subprocess.run(["git", *user, *command], cwd=folder, check=True, capture_output=True)
    return folder


def test_a_module_from_a_commit_runs_its_scripts(origin: Path, tmp_path: Path) -> None:
    snakefile = f'gitfile("{origin}", path="workflow/Snakefile", tag="v1")'
    outer(tmp_path, snakefile=snakefile).snakemake("--cores", "1", "results/demo-llama/checkpoint.json")


def test_what_snakedeploy_writes_plans_from_its_repository(origin: Path, tmp_path: Path) -> None:
    """`make clients-test` has snakedeploy write it; git takes GitHub's address for the folder."""
    environment = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{origin.parents[1]}/.insteadOf"}
    environment |= {"GIT_CONFIG_VALUE_0": "https://github.com/", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if "LOCKSTEP_CLIENTS" in os.environ:
        program = f"{os.environ['LOCKSTEP_CLIENTS']}/snakedeploy/bin/snakedeploy"
        command = (program, "deploy-workflow", "https://github.com/owner/lockstep", tmp_path, "--tag", "v1")
        subprocess.run(command, check=True, env={**os.environ, **environment})
        checkout: Checkout = Outer(tmp_path, {"PYTHONPATH": str(REPOSITORY / "src"), **environment})
    else:
        snakefile = 'github("owner/lockstep", path="workflow/Snakefile", tag="v1")'
        checkout = outer(tmp_path, snakefile=snakefile, names="*", **environment)
    assert checkout.would_run()["golden"] >= 4


def only_one_target(config: dict) -> None:
    config["models"]["demo-llama"] |= {"precisions": ["fp32"], "layers": [2]}
    for prompt in config["models"]["demo-llama"]["golden"]["prompts"]:
        prompt["expected"].pop("all")


@pytest.mark.long
def test_a_prefix_holds_for_jobs_and_locks(tmp_path: Path, filled_cache: Path) -> None:
    """Not only the rules' paths: files that a job writes by itself, or that are read before a run, are there, too."""
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
def test_a_statement_names_the_stage_not_the_renamed_rule(tmp_path: Path, prefix: str) -> None:
    checkpoint = f"{prefix}results/demo-llama/checkpoint.json"
    outer(tmp_path, prefix).snakemake("--cores", "1", checkpoint)
    key = Statement.load(statement_path(tmp_path / checkpoint)).key
    assert key.stage == "resolve" and "lockstep/checkpoint" in key.code
