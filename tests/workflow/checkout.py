"""A copy of the repository's workflow, in which Snakemake and `lockstep` run. They run as a user would run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import fork_server
from calls import call
from lockstep.artifacts.files import sha256_file

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ("Snakefile", "config", "envs", "profiles", "resources", "src", "workflow")
CODE = ("Snakefile", "envs", "src", "workflow")
TIMEOUT = 900  # seconds; a whole run takes a tenth of it on two idle cores
# Speeds differ between runs, and so does what shows them.
NOT_DETERMINISTIC = re.compile(r"\.speed\.json$|build\.costs\.json$|^summary\.|^(report|logs/|benchmarks/)")


class Checkout:
    """A folder with the workflow, its package and the demo checkpoint. Snakemake and `lockstep` are started there."""

    def __init__(self, folder: Path, variables: Mapping[str, str] = {}) -> None:
        self.folder = folder
        self.variables = variables
        self.results = folder / "results"

    @classmethod
    def make(cls, folder: Path, variables: Mapping[str, str] = {}) -> Checkout:
        for part in PARTS:
            source = REPOSITORY / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("*.egg-info"))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder / part)
        checkout = cls(folder, variables)
        checkout.take_demo()
        return checkout

    def take_demo(self, *backends: str) -> None:
        """Take the demo's config, with ONNX Runtime in fp32 and `backends`.

        Of the others only `backends` stay: most tests have no use for the rest, with which a run takes eight times as
        long. The repository's config is changed as text, so that lines keep their order and comments stay.
        """
        path = self.folder / "config" / "config.yaml"
        self.take_whole_demo()
        text = path.read_text()
        dropped = [name for name in ("openvino", "cuda") if name not in backends]
        lines = "      openvino: [bf16, w4a16]\n", "      cuda: [fp16, w8a16]\n"
        for line, line_kept in (
            ("precisions: [fp32, fp16, w8a16]", "precisions: [fp32]"),
            ("    group_size: 16 # divides its rows, of 144, 240 and 400 numbers\n", ""),
            ("[onnxruntime, openvino, cuda]", f"[{', '.join(['onnxruntime', *backends])}]"),
            ("    backend_precisions:\n", "    backend_precisions:\n" if backends else ""),
            *((line, "") for line in lines if line.split(":")[0].strip() in dropped),
        ):
            assert text.count(line) == 1, line
            text = text.replace(line, line_kept)
        path.write_text(text)

    def take_whole_demo(self) -> None:
        """Take the demo's config as it is in the repository."""
        shutil.copy2(REPOSITORY / "config" / "config.yaml", self.folder / "config" / "config.yaml")

    def copy(self, folder: Path) -> Checkout:
        """Results and Snakemake's records too, with the times of their files."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Checkout(folder)

    def snakemake(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess:
        return self.run("snakemake", *arguments, **options)

    def run(
        self, module: str, *arguments: str, folder: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess:
        """Run `python -m module arguments`; return its output and exit code.

        The code must be 0 where `check`. The process has this checkout's code; where it is recorded, it is not forked.
        """
        folder = folder or self.folder
        environment = self.environment()
        if "LD_PRELOAD" in environment:
            process = subprocess.run(
                [sys.executable, "-m", module, *arguments], cwd=folder, env=environment,
                text=True, capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        else:
            process = fork_server.run(module, arguments, folder, environment, TIMEOUT)
        if check:
            assert process.returncode == 0, failure(process)
        return process

    def call(self, module: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """Run as `run` does, in this process, for a command that starts no job.

        That spares the imports. Where this checkout's code, pins or path are not those of the repository, whose code is
        loaded here, it is `run`.
        """
        if self.is_edited() or "PYTHONPATH" in self.variables:
            return self.run(module, *arguments, check=check)
        process = call(module, arguments, self.folder, self.environment())
        assert not check or process.returncode == 0, failure(process)
        return process

    def job(
        self, stage: str, target: str, *lock: str, config: str = "config/config.yaml", check: bool = True
    ) -> subprocess.CompletedProcess:
        """Run a stage of a target without Snakemake, held to `lock` where one is named."""
        return self.call("stage_job", stage, target, config, "results", *lock, check=check)

    def is_edited(self) -> bool:
        """Return whether the package, the workflow or the pins are edited.

        They are where they are others than those of the repository; copies keep sizes and times.
        """
        return any(_files(self.folder / part) != _files(REPOSITORY / part) for part in CODE)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder / "src"), str(REPOSITORY / "tests")])
        return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **self.variables}

    def would_run(self, *arguments: str) -> Counter[str]:
        """Jobs by rule that a run would start, without those of all targets."""
        output = self.call("snakemake", *arguments, "--dry-run", "--quiet", "host", "reason")
        text = output.stdout + output.stderr
        if "Nothing to be done" in text:
            return Counter()
        table = text.rpartition("Job stats:")[2].partition("total")[0]
        return Counter(
            {
                rule: int(count)
                for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)
                if rule not in ("all", "default")
            }
        )

    def finish(self, *arguments: str) -> str:
        """Run all of it on two cores; return its output."""
        process = self.snakemake("--cores", "2", *arguments)
        return process.stdout + process.stderr

    def edit_config(self, change: Any) -> None:
        path = self.folder / "config" / "config.yaml"
        value = yaml.safe_load(path.read_text())
        change(value)
        path.write_text(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))

    def append(self, path: str, text: str) -> None:
        with open(self.folder / path, "a") as file:
            file.write(text)

    def digests(self) -> dict[str, str]:
        """sha256 of each result that must come out the same each time, by path."""
        files = {path.relative_to(self.results).as_posix(): path for path in self.results.rglob("*") if path.is_file()}
        return {name: sha256_file(path) for name, path in sorted(files.items()) if not NOT_DETERMINISTIC.search(name)}


def failure(process: subprocess.CompletedProcess) -> str:
    return f"{' '.join(process.args)}: exit code {process.returncode}\n{process.stdout}\n{process.stderr}"


def _files(part: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file of the code, by path."""
    paths = part.rglob("*") if part.is_dir() else [part]
    files = {}
    for path in paths:
        is_generated = path.parent.name == "__pycache__" or path.parent.name.endswith(".egg-info")
        if (path.suffix or path == part) and not is_generated:
            status = path.stat()
            files[path.relative_to(part).as_posix()] = (status.st_size, status.st_mtime_ns)
    return files
