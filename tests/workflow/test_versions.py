"""Versions that are claimed: the oldest Snakemake, and transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import REPOSITORY, TIMEOUT, Checkout, failure

from lockstep.provenance.code_identity import read_pins


def test_the_oldest_snakemake_is_the_same_everywhere() -> None:
    pinned = read_pins(REPOSITORY / "envs/oldest.txt")["snakemake"]
    for file, pattern in (
        ("workflow/Snakefile", r'min_version\("(.+)"\)'),
        ("pyproject.toml", r'"snakemake\[reports\]>=(.+?)"'),
        ("README.md", r"badge/Snakemake-%E2%89%A5([\d.]+)-"),
    ):
        (claimed,) = re.findall(pattern, (REPOSITORY / file).read_text())
        assert f"{claimed}.0" == pinned, file


@pytest.mark.skipif("LOCKSTEP_OLDEST" not in os.environ, reason="`make oldest-test` installs it")
def test_the_oldest_snakemake_plans_runs_and_judges_by_content(fresh: Checkout) -> None:
    folder = os.environ["LOCKSTEP_OLDEST"]

    def snakemake(*arguments: str) -> str:
        process = subprocess.run(
            [sys.executable, "-m", "snakemake", *arguments], cwd=fresh.folder,
            env={**fresh.environment(), "PYTHONPATH": os.pathsep.join([folder, str(fresh.folder / "src")])}, text=True,
            capture_output=True, timeout=TIMEOUT,
        )  # fmt: skip
        assert process.returncode == 0, failure(process)
        return process.stdout + process.stderr

    assert snakemake("--version").strip() == read_pins(REPOSITORY / "envs/oldest.txt")["snakemake"]
    assert re.search(r"^golden +2$", snakemake("-n", "--quiet", "host"), re.MULTILINE)
    paths = ("results/demo-llama/checkpoint.json", "results/demo-llama/architecture.json", "results/config.json")
    snakemake("--cores", "1", *paths)
    for path in (fresh.folder / "resources").rglob("*"):
        os.utime(path)
    before = fresh.digests()
    snakemake("--cores", "1", *paths)
    assert fresh.digests() == before and "Nothing to be done" in snakemake("-n", *paths)


@pytest.mark.long
def test_another_transformers_is_one_line_at_start(fresh: Checkout, tmp_path: Path) -> None:
    about = tmp_path / "packages" / "transformers-5.17.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n")
    tested = read_pins()["transformers"]
    line = f"transformers 5.17.0 is installed, {tested} is tested: its exports may differ, or be refused"
    fresh.variables = {"PYTHONPATH": os.pathsep.join([str(about.parent), str(fresh.folder / "src")])}
    process = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--quiet", "all"], cwd=fresh.folder, env=fresh.environment(),
        text=True, capture_output=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert (process.stdout + process.stderr).count(line) == 1, failure(process)
