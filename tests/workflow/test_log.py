"""What a run prints: a line for each job, the log of one that fails, and at the end the table and what to do next."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from checkout import REPOSITORY, Checkout

RULES = """
rule all:
    input: "good/fp16.txt", "bad.txt", "stopped.txt"

rule good:
    output: "{model}/{precision}.txt"
    log: "{model}-{precision}.log"
    shell: "(echo other; echo reused: good/fp16 is that of base) > {log}; touch {output}"

rule bad:
    output: "bad.txt"
    log: "bad.log"
    shell: "(echo one; echo lockstep: error: what was expected; cat leaks.txt) > {log}; exit 1"

rule stopped:
    output: "stopped.txt"
    log: "stopped.log"
    shell: "echo 'lockstep: error: interrupted; and more' > {log}; exit 130"
"""


# What cuDNN's Python package adds to a log, shortened.
LEAKS = """nanobind: leaked 85 instances!
 - leaked instance 0x1e8d42b0 of type "cudnn._compiled_module.tensor"
 - ... skipped remainder
nanobind: leaked 176 functions!
 - leaked function "add_square"
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--logger", "lockstep", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "Snakefile").write_text(RULES)
    (tmp_path / "leaks.txt").write_text(LEAKS)
    return tmp_path


def test_each_job_is_a_line_and_of_a_failed_one_the_end_of_its_log(rules: Path) -> None:
    ended = snakemake(rules, "--keep-going")
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    (done,) = (
        number for number, line in enumerate(lines) if re.fullmatch(r"\[[123]/3\] good +good/fp16 +done +\d+ s", line)
    )
    assert lines[done + 1] == "    reused: good/fp16 is that of base" and "other" not in ended.stderr
    (failed,) = (number for number, line in enumerate(lines) if re.fullmatch(r"\[[123]/3\] bad +FAIL +\d+ s", line))
    assert lines[failed + 1 : failed + 4] == ["    one", "    lockstep: error: what was expected", "    log: bad.log"]
    (stopped,) = (line for line in lines if "stopped" in line)
    assert re.fullmatch(r"\[[123]/3\] stopped +stopped +\d+ s", stopped), "Ctrl-C is no failure, and is told once"
    assert lines[-1] == "lockstep: interrupted; finished results are kept, run the same command to go on"
    assert not any(words in ended.stderr for words in ("jobid", "Building DAG", "config.json")), ended.stderr


def test_a_terminal_shows_what_runs_on_a_line_that_does_not_stay(rules: Path) -> None:
    """And the table does not begin on it: the rule that has the targets as inputs is no job of ours."""
    (rules / "Snakefile").write_text(RULES.replace(', "bad.txt", "stopped.txt"', ""))
    terminal, other_end = os.openpty()
    termios.tcsetwinsize(other_end, (24, 80))
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--logger", "lockstep"]
    subprocess.run(command, cwd=rules, stderr=other_end, check=True, env={**os.environ, "TERM": "xterm"})
    text = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    os.close(other_end)
    assert "\x1b[Kgood good/fp16" in text and "all" not in text, text
    assert re.search(r"\x1b\[K\[1/1\] good +good/fp16 +done +\d+ s\r\n", text), text
    assert text.endswith("    reused: good/fp16 is that of base\r\n"), text


def test_lockstep_run_makes_a_config_from_any_folder_and_ends_with_the_table(demo: Checkout, tmp_path: Path) -> None:
    """Nothing is left to do: the table and the command that serves come all the same."""
    config = demo.folder / "config" / "config.yaml"
    process = demo.run("lockstep", "run", str(config), "--cores", "1")
    assert "Nothing to be done" in process.stderr
    *table, _, _, _ = lines = process.stdout.splitlines()
    assert all(len(line) <= 100 for line in table) and any(re.match(r"target +result ", line) for line in table)
    assert any(re.fullmatch("Serve: lockstep serve demo-llama/fp../all/onnxruntime", line) for line in lines)
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "my.yaml").write_text(config.read_text().replace("\n  demo-llama:\n", "\n  my-llama:\n"))
    (elsewhere / "other.yaml").write_text("services: {}\n")
    planned = demo.run("lockstep", "run", "my.yaml", "--", "results/my-llama/checkpoint.json", "-n", folder=elsewhere)
    assert re.search(r"total +1\b", planned.stdout + planned.stderr)
    planned = demo.run("lockstep", "run", "-n", folder=elsewhere)
    assert "Config: my.yaml" in planned.stderr and "my-llama" in planned.stdout + planned.stderr
    assert "Job stats:" in planned.stdout + planned.stderr and not (elsewhere / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: expected a readable config file"),
        (["hf:a/b"], "run: expected a config, found the checkpoint hf:a/b; write one: lockstep init hf:a/b"),
        ([], "run: expected one config in this folder, found a.yaml, b.yaml; name one of them"),
    ],
)
def test_what_lockstep_run_cannot_read_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("# of two\nmodels: {}\n")
    command = [sys.executable, "-m", "lockstep", "run", *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert message in ended.stderr.splitlines()[-1]
    assert (REPOSITORY / "Snakefile").is_file()
