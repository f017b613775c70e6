"""Snakemake's own interface: lint, format, report, other configs and folders, and mistakes in the config."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from checkout import REPOSITORY, Checkout


@pytest.mark.parametrize("snakefile", ["Snakefile", pytest.param("workflow/Snakefile", marks=pytest.mark.long)])
def test_lint_is_clean(fresh: Checkout, snakefile: str) -> None:
    assert "Congratulations" in fresh.call("snakemake", "--lint", "--snakefile", snakefile).stderr


# What jobs import and Snakemake does not bring.
HIDDEN = """
import sys
sys.modules.update(dict.fromkeys(("click", "numpy", "ml_dtypes", "onnx", "rich", "tokenizers", "transformers")))
"""


def test_snakemake_plans_without_what_jobs_import(fresh: Checkout, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    plain = Checkout(fresh.folder, {"PYTHONPATH": str(tmp_path)})
    process = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--quiet", "host", "reason"], cwd=fresh.folder, text=True,
        env=plain.environment(), capture_output=True,
    )  # fmt: skip
    assert process.returncode == 0 and re.search(r"^golden +2$", process.stdout + process.stderr, re.MULTILINE)


def test_without_the_package_rules_are_linted_and_a_plan_says_what_to_install(fresh: Checkout, tmp_path: Path) -> None:
    """LOCKSTEP_PYTHON is a Python that has nothing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = Checkout(fresh.folder, {"LOCKSTEP_PYTHON": str(tmp_path / "bare/bin/python")})
    assert "Congratulations" in bare.snakemake("--lint").stderr
    process = bare.snakemake("-n", check=False)
    assert process.returncode == 1 and "pip install '.[workflow]' in a clone" in process.stdout + process.stderr


def test_both_snakefiles_make_the_same(finished: Checkout) -> None:
    assert not finished.would_run("--snakefile", "workflow/Snakefile")


def test_the_small_config_of_the_catalogue_plans_each_check_once(fresh: Checkout, tmp_path: Path) -> None:
    """CI runs it (`snakemake --directory .test`)."""
    folder = shutil.copytree(REPOSITORY / ".test", tmp_path / "test")
    jobs = fresh.would_run("--directory", str(folder))
    assert [jobs[name] for name in ("validate", "compare", "golden", "served", "summary")] == [1] * 5


@pytest.mark.long
def test_it_runs_in_a_folder_with_a_space(fresh: Checkout) -> None:
    """With a Python of a .venv in there, which Snakemake calls by a shell."""
    folder = fresh.folder.rename(fresh.folder.parent / "lock step")
    (folder / ".venv").symlink_to(sys.prefix)
    command = [folder / ".venv/bin/python", "-m", "snakemake", "--cores", "1", "results/demo-llama/checkpoint.json"]
    process = subprocess.run(command, cwd=folder, env=Checkout(folder).environment(), text=True, capture_output=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_report_has_a_page_of_each_target_that_the_first_page_links(finished: Checkout) -> None:
    folder = finished.results / "report"
    pages = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.html")}
    assert len(pages) == 3 and "All 2 targets pass." in pages["index.html"]
    for name in pages.keys() - {"index.html"}:
        assert f'href="{name}"' in pages["index.html"]
        assert "San Francisco is a" in pages[name]


def test_snakemakes_report_holds_the_pages(demo: Checkout) -> None:
    demo.call("snakemake", "--report", "results/report.html")
    page = (demo.results / "report.html").read_text()
    for name in ("index.html", "demo-llama-fp32-all-onnxruntime.html"):
        assert name in page


def test_the_table_names_each_target_with_its_result(demo: Checkout) -> None:
    lines = demo.call("lockstep", "summary").stdout.splitlines()
    assert lines[1].split()[:2] == ["target", "result"] and max(map(len, lines[:4])) <= 100
    assert [line.split()[:2] for line in lines[2:4]] == [
        [f"demo-llama/fp32/{layers}/onnxruntime", "pass"] for layers in ("2", "all")
    ]


@pytest.mark.long
def test_another_config_in_another_folder_whose_first_run_fails_has_a_summary_there(
    fresh: Checkout, filled_cache: Path, tmp_path: Path
) -> None:
    """Only the models of that config, and all results in that folder."""
    demo = yaml.safe_load((fresh.folder / "config" / "config.yaml").read_text())
    golden = demo["models"]["demo-llama"]["golden"]
    for number, prompt in enumerate(golden["prompts"]):
        prompt["expected"] = {} if number else {2: "nonsense"}
    model = {"source": "resources/demo-llama", "layers": [2], "golden": golden}
    config = {"models": {"mine": model}, "limits": demo["limits"]}
    path = tmp_path / "my.yaml"
    results = tmp_path / "out" / "results"
    path.write_text(yaml.safe_dump(config))
    cache = shutil.copytree(filled_cache, tmp_path / "cache")  # with graphs, engines, weights and references
    options = ("--configfile", str(path), "--directory", str(results.parent), "--config", f"cache={cache}")
    assert fresh.snakemake("--cores", "2", *options, check=False).returncode == 1
    (row,) = json.loads((results / "summary.json").read_text())["targets"]
    assert row["golden"] == "fail" and "nonsense" in row["reason"]
    assert (results / "mine" / "fp32" / "golden" / "onnxruntime" / "2.failed.json").is_file()
    assert not (results / "demo-llama").exists() and not fresh.results.exists()
    fresh.call("lockstep", "verify", "--results", str(results))


MISTAKES = {
    "unknown key": ({"layer": [1]}, "models.mine.layer: unknown key"),
    "no such folder": ({"source": "nowhere"}, "models.mine.source: expected a checkpoint folder"),
}


@pytest.mark.parametrize("change, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_config_is_one_line_before_any_job(
    fresh: Checkout, tmp_path: Path, change: dict, message: str
) -> None:
    model = {"source": "resources/demo-llama", "golden": {"prompts": [{"text": "Light"}]}, **change}
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"models": {"mine": model}}))
    process = fresh.call("snakemake", "--cores", "1", "--configfile", str(path), check=False)
    assert process.returncode == 2
    lines = [line for line in process.stderr.splitlines() if not line.startswith("Using workflow specific profile")]
    assert len(lines) == 1 and lines[0].startswith("lockstep: error: ") and message in lines[0]
    assert not fresh.results.exists()


YAML_MISTAKES = {
    "a key twice": (b"models:\n  a: 1\n  a: 2\n", ":3: expected YAML; found the key 'a' twice"),
    "no file": (None, ": expected a readable config file; found none; `lockstep init SOURCE` writes one"),
}


@pytest.mark.parametrize("data, message", YAML_MISTAKES.values(), ids=YAML_MISTAKES)
def test_a_config_that_cannot_be_read_is_one_line_with_its_place(
    fresh: Checkout, tmp_path: Path, data: bytes | None, message: str
) -> None:
    path = tmp_path / "my.yaml"
    if data is not None:
        path.write_bytes(data)
    refuses(fresh, f"{path}{message}", "--configfile", str(path))


def test_so_is_the_one_that_the_workflow_looks_for_itself(fresh: Checkout) -> None:
    data, message = YAML_MISTAKES["a key twice"]
    (fresh.folder / "config" / "config.yaml").write_bytes(data)
    refuses(fresh, f"config/config.yaml{message}")


def refuses(checkout: Checkout, message: str, *arguments: str) -> None:
    process = checkout.call("snakemake", "--cores", "1", *arguments, check=False)
    lines = [line for line in process.stderr.splitlines() if not line.startswith("Using workflow specific profile")]
    assert process.returncode == 2 and len(lines) == 1, process.stderr
    assert lines[0].startswith(f"lockstep: error: {message}")


@pytest.mark.parametrize("snakefile", ["Snakefile", pytest.param("workflow/Snakefile", marks=pytest.mark.long)])
def test_a_job_that_fails_says_the_line_of_its_stage_first(fresh: Checkout, snakefile: str) -> None:
    weights = fresh.folder / "resources" / "demo-llama" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + np.float32(np.nan).tobytes())
    process = fresh.snakemake(
        "--cores", "1", "--snakefile", snakefile, "results/demo-llama/fp32/weights.json", check=False
    )
    alone = fresh.job("convert", "demo-llama/fp32", check=False)
    assert (alone.returncode, process.returncode) == (2, 1)
    (line,) = alone.stderr.splitlines()
    first = next(number for number, line in enumerate(process.stderr.splitlines()) if "error" in line.lower())
    assert process.stderr.splitlines()[first] == line and "NaN" in line


def test_a_damaged_checkpoint_is_one_line_before_any_job(fresh: Checkout) -> None:
    weights = fresh.folder / "resources" / "demo-llama" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    process = fresh.call("snakemake", "--cores", "1", check=False)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith("lockstep: error: ") and "model.safetensors" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_checkpoint_without_a_tokenizer_is_one_line_before_any_job(fresh: Checkout) -> None:
    (fresh.folder / "resources" / "demo-llama" / "tokenizer.json").unlink()
    refuses(fresh, f"{fresh.folder / 'resources' / 'demo-llama'}: expected tokenizer.json, found none; download it")


def nonsense(config: dict) -> None:
    config["models"]["demo-llama"]["golden"]["prompts"][0]["expected"]["all"] = "nonsense"


def rows(checkout: Checkout) -> dict[tuple[str, str], str]:
    """The verdicts that `lockstep summary` prints, by precision and layer count, which summary.json and the report's
    first page must say too."""
    lines = checkout.call("lockstep", "summary").stdout.splitlines()
    rows = [line.split() for line in lines if re.match(r"demo-llama/\S+/onnxruntime ", line)]
    results = {tuple(row[0].split("/")[1:3]): row[1] for row in rows}
    written = json.loads((checkout.results / "summary.json").read_text())["targets"]
    assert {(row["precision"], str(row["layers"])): row["verdict"].split()[0] for row in written} == results
    page = html.unescape((checkout.results / "report" / "index.html").read_text())
    assert all(row["reason"] is None or row["reason"] in page for row in written)
    return results


def test_a_failed_check_stops_the_run_and_is_a_row_with_its_line(demo: Checkout) -> None:
    demo.edit_config(nonsense)
    process = demo.snakemake("--cores", "2", "--keep-going", check=False)
    assert process.returncode == 1
    assert "lockstep: error: " in process.stderr + process.stdout and "nonsense" in process.stderr + process.stdout
    assert "Traceback" not in process.stderr + process.stdout
    assert rows(demo) == {("fp32", "2"): "pass", ("fp32", "all"): "fail"}
    output = demo.call("lockstep", "summary").stdout
    assert (
        "demo-llama/fp32/all/onnxruntime: golden: prompt 'San Francisco is a', text: expected 'nonsense' "
        "as in the config, found ' hilly"
    ) in output
    assert demo.would_run()["golden"] == 1


def generate(checkout: Checkout, *arguments: str) -> subprocess.CompletedProcess:
    return checkout.run("lockstep", "generate", *arguments, check=False)


def test_generate_says_what_the_golden_text_says_and_how_fast(finished: Checkout) -> None:
    model = yaml.safe_load((finished.folder / "config" / "config.yaml").read_text())["models"]["demo-llama"]
    prompt = model["golden"]["prompts"][0]
    for layers in (2, "all"):
        process = generate(
            finished, f"demo-llama/fp32/{layers}", "--prompt", prompt["text"], "--max-new-tokens",
            str(model["golden"]["max_new_tokens"]),
        )  # fmt: skip
        assert process.returncode == 0 and process.stdout == prompt["expected"][layers] + "\n"
        assert [line.split(":")[0] for line in process.stderr.splitlines()] == ["prefill", "decode"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("demo-llama/fp64/all", "--prompt", "A"), "target: expected one of"),
        (("demo-llama/fp32/all", "--prompt", "word " * 500), "expected 1 to 128 tokens"),
        (("demo-llama/fp32/all", "--prompt", "A", "--temperature", "-1"), "temperature: expected 0 or more"),
        (
            ("demo-llama/fp32/all", "--prompt", "A", "--results", "nowhere"),
            "nowhere: expected results of a run, found none in ",
        ),
    ],
)
def test_a_mistake_in_a_command_is_one_line(finished: Checkout, arguments: tuple[str, ...], message: str) -> None:
    process = finished.call("lockstep", "generate", *arguments, check=False)
    assert process.returncode == 2 and process.stdout == ""
    assert len(process.stderr.splitlines()) == 1 and message in process.stderr
