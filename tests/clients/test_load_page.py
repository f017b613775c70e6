"""The commands of docs/load.md, section by section, against `lockstep serve`: each request is answered."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client import NOWHERE, RUNS
from demo_model import DEMO

from lockstep.targets import Results
from real_server import RealServer, make_tree

PAGE = Path(__file__).parents[2] / "docs" / "load.md"
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Of each section, the text behind its heading; the first one's block names the server.
SECTIONS = re.split(r"^##+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
(NAMES,) = BLOCK.findall(SECTIONS[0])
COMMANDS = {
    section.partition("\n")[0]: "".join(BLOCK.findall(section)) for section in SECTIONS[1:] if BLOCK.search(section)
}


@pytest.fixture(scope="module")
def triton_server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(make_tree(tmp_path_factory.mktemp("load") / "results", demo), "--grpc-port", 0) as server:
        yield server


@pytest.mark.parametrize("section", COMMANDS)
def test_the_commands_of_a_section_have_all_answers(triton_server: RealServer, tmp_path: Path, section: str) -> None:
    environments = Path(os.environ["LOCKSTEP_CLIENTS"])
    commands = COMMANDS[section]
    if section == "An end-to-end test":
        commands = COMMANDS["A dataset"].partition("aiperf")[0] + commands  # the file of prompts
    has_perf_analyzer = (environments / "perf-analyzer" / "bin" / "perf_analyzer").is_file()
    if not has_perf_analyzer:  # the page says where it runs
        commands = commands.partition("perf_analyzer")[0]
    grpc = re.search(r"gRPC at (\S+)", triton_server.line)
    assert grpc is not None
    words = {"http://127.0.0.1:8000": triton_server.url, "127.0.0.1:8001": grpc[1], "resources/demo-llama": str(DEMO)}
    script = f"set -e\n{NAMES}{commands}"
    for word, numbers in words.items():
        script = script.replace(word, numbers)
    programs = os.pathsep.join(str(environments / name / "bin") for name in ("aiperf", "perf-analyzer"))
    environment = {"PATH": f"{programs}{os.pathsep}{os.defpath}", "HOME": str(tmp_path), "HF_ENDPOINT": NOWHERE}
    run = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=4 * RUNS
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    reports = sorted(tmp_path.rglob("profile_export_aiperf.json"))
    assert len(reports) == commands.count("aiperf profile")
    for path in reports:
        report: dict[str, Any] = json.loads(path.read_text())
        assert report["is_complete"] and report["error_summary"] == [], report["error_summary"]
        assert report["request_count"]["avg"] > 0
    if "perf_analyzer" in commands:
        (experiment,) = json.loads((tmp_path / "triton-times.json").read_text())["experiments"]
        assert len(experiment["requests"]) == 12
    if section == "An end-to-end test":
        alone, together = (texts(tmp_path / "artifacts" / name / "outputs.json") for name in ("alone", "together"))
        assert len(alone) == 2 and alone == together


def texts(path: Path) -> set[str]:
    """Return the answers of a run."""
    return {answer["response_text"] for answer in json.loads(path.read_text())["data"]}
