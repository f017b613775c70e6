"""A program, a notebook, a batch file and a fine-tune run on the demo; the compose file names existing files."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from demo_model import ROOT
from lora_folders import LIGHT, TARGET, served_lora

from lockstep.config import load
from lockstep.targets import Results
from lockstep_serve.cli.serve import serve
from real_server import RealServer, make_tree
from shared import Shared

EXAMPLES = ROOT / "examples"
CITY = " hilly city on the coast of California, where cool"


def run(folder: Path, *arguments: object) -> str:
    """Run Python in a folder; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_program_says_what_the_demo_says(demo: Results, tmp_path: Path) -> None:
    make_tree(tmp_path / "results", demo)
    lines = run(tmp_path, EXAMPLES / "in_process.py").splitlines()
    answers: dict[str, list[str]] = {"greedy": [], "sampled": [], "stepped": []}
    for line in lines:
        answers[line.split()[0].rstrip(":")].append(line.partition(":")[2].strip())
    assert answers["greedy"][0] == answers["stepped"][0] == CITY.strip()
    assert len(answers["greedy"]) == 2 and len(answers["sampled"]) == 4 and len(lines) == 7


def test_the_notebook_says_it_too(demo: Results, tmp_path: Path) -> None:
    """Its cells are plain Python, so a process is as good as a kernel; none has outputs of someone's last run."""
    make_tree(tmp_path / "results", demo)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]
    (tmp_path / "notebook.py").write_text("\n".join(cell.source for cell in cells), encoding="utf-8")
    lines = run(tmp_path, "notebook.py").splitlines()
    assert lines[0] == f"San Francisco is a{CITY}" and lines[2].startswith("' trave'") and len(lines) == 8


def test_the_batch_file_is_completed_line_by_line(demo: Results, tmp_path: Path) -> None:
    make_tree(tmp_path / "results", demo)
    files = ["--input", EXAMPLES / "batch.jsonl", "--output", "out.jsonl"]
    run(tmp_path, "-m", "lockstep", "generate", "demo-llama/fp16", *files)
    requests = [json.loads(line) for line in (EXAMPLES / "batch.jsonl").read_text(encoding="utf-8").splitlines()]
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {record["id"] for record in records} == {line["id"] for line in requests}
    assert not [record for record in records if record.get("error")]


@pytest.mark.long
@pytest.mark.exports
def test_what_is_trained_is_served(demo: Results, shared: Shared, tmp_path: Path) -> None:
    """From pairs of texts to an adapter, a config that loads, and a server that says the answers with it alone."""
    run(tmp_path, EXAMPLES / "finetune.py", "--out", "tuned")
    config = load.load(yaml.safe_load((tmp_path / "tuned" / "config.yaml").read_text(encoding="utf-8")))
    source = Path(config.models["demo-tuned"].adapters["mine"].source)
    assert source == tmp_path / "tuned" / "adapter" and (source / "adapter_model.safetensors").is_file()
    pairs = [json.loads(line) for line in (EXAMPLES / "finetune.jsonl").read_text(encoding="utf-8").splitlines()]
    tree = served_lora(demo, shared).root
    with RealServer(tree, "--allow-adapter-loading", source.parent, target=TARGET) as server:

        def text(prompt: str, **body: object) -> str:
            body_sent = {"prompt": prompt, "max_tokens": 16, "temperature": 0, **body}
            status, _, answer = server.request("POST", "/v1/completions", body_sent)
            assert status == 200, answer
            return json.loads(answer)["choices"][0]["text"]

        assert [text(pair["prompt"], lora="adapter") for pair in pairs] == [pair["answer"] for pair in pairs]
        assert text("Light").startswith(LIGHT[None])


def test_the_compose_file_names_what_is_there() -> None:
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text(encoding="utf-8"))["services"]
    program, command, *arguments = services["server"]["command"]
    assert (program, command) == ("lockstep", "serve")
    options = itertools.chain.from_iterable(option.opts for option in serve.params)
    assert {argument for argument in arguments if argument.startswith("--")} <= {*options}
    volumes = itertools.chain.from_iterable(service["volumes"] for service in services.values())
    mounts = [volume.split(":")[:2] for volume in volumes]
    files = {"./model.tar"}  # by the command in examples/README.md
    assert not [source for source, _ in mounts if source not in files and not (EXAMPLES / source).exists()]
    (job,) = yaml.safe_load((EXAMPLES / "monitoring" / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    (source,) = yaml.safe_load((EXAMPLES / "monitoring" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (provider,) = yaml.safe_load((EXAMPLES / "monitoring" / "dashboards.yaml").read_text())["providers"]
    assert ["../resources/grafana", provider["options"]["path"]] in mounts


def test_workflows_for_ci_run_what_this_one_runs() -> None:
    """`.ci/demo` runs the commands of the one for a CPU. The other's config has the demo's model with other prompts,
    which one lock cannot hold: it has a folder of its own. The engines that its lock names are in a cache, as builds
    with TensorRT differ in their bytes."""
    script = (ROOT / ".ci" / "demo").read_text()
    commands = {}
    for path in (EXAMPLES / "ci").glob("*.yml"):
        (job,) = yaml.safe_load(path.read_text())["jobs"].values()
        commands[path.stem] = [step["run"] for step in job["steps"] if "run" in step]
    assert commands["cpu"][0] == commands["gpu"][0] == "make setup"
    assert all(command in script for command in commands["cpu"][1:]) and len(commands["cpu"]) == 3
    cache, locked_run = commands["gpu"][2].split(maxsplit=1)
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    assert f"    export {cache}\n    {locked_run.removesuffix(' --config locked=true')}\n" in page
    assert "--directory gpu " in locked_run and "--locks gpu/locks" in commands["gpu"][3]
