"""The Berkeley Function Calling Leaderboard's client and judge, unchanged, against `lockstep serve` of a model that
answers with the right calls: any loss of its score is the protocol's. And against SmolLM2, which has its own score:

    LOCKSTEP_REAL=.real LOCKSTEP_BFCL_CASES=200 make clients-test ARGS="-s -k trained"
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import scripted
import scripted_model
from client import run_client

from lockstep.targets import Results
from real_server import RealServer

CASES = {"simple_python": 100, "multiple": 50, "parallel": 50}  # the first ones of categories
# A name that it knows as one of a model behind an API like OpenAI's, with tools.
MODEL = "openbmb/MiniCPM-SALA-FC"
PIECE = 60  # characters of a token
COLUMNS = ("Python Simple AST", "Multiple AST", "Parallel AST")


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def value(allowed: list[Any]) -> Any:
    """Return the first value that its judge takes."""
    first = next(item for item in allowed if item != "")
    if isinstance(first, dict):
        return arguments(first)
    if isinstance(first, list):
        return [arguments(item) if isinstance(item, dict) else item for item in first]
    return first


def arguments(allowed: Mapping[str, list[Any]]) -> dict[str, Any]:
    return {name: value(values) for name, values in allowed.items() if values != [""] * len(values)}


def call(truth: Mapping[str, Mapping[str, list[Any]]]) -> str:
    ((name, allowed),) = truth.items()
    declared = {"name": name.replace(".", "_"), "arguments": arguments(allowed)}  # no dots in names of OpenAI's
    return f"<tool_call>\n{json.dumps(declared, ensure_ascii=False)}\n</tool_call>"


@pytest.fixture(scope="module")
def cases() -> dict[str, list[tuple[str, str, str]]]:
    """Id, question and right answer, by category."""
    code = "import bfcl_eval, pathlib; print(pathlib.Path(bfcl_eval.__file__).parent)"
    data = Path(run_client("bfcl", "python", "-c", code, work=Path(), cwd=Path()).strip()) / "data"
    results = {}
    for category, number in CASES.items():
        questions = lines(data / f"BFCL_v4_{category}.json")[:number]
        truths = lines(data / "possible_answer" / f"BFCL_v4_{category}.json")[:number]
        assert [item["id"] for item in questions] == [truth["id"] for truth in truths]
        results[category] = [
            (item["id"], item["question"][0][-1]["content"], "\n".join(map(call, truth["ground_truth"])))
            for item, truth in zip(questions, truths)
        ]
    return results


@pytest.fixture(scope="module")
def server(cases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("bfcl")
    answers = {}
    for case in cases.values():
        answers |= {question: answer for _, question, answer in case}
    results: Results = scripted.write(folder, answers, PIECE)
    with RealServer(results.root, "--served-model-name", MODEL, target=scripted_model.TARGET) as server:
        yield server


def generated(server: RealServer, cases: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Return the client's results of all cases, by id, of a run with four requests at a time."""
    work.mkdir()
    ids = {}
    for category, case in cases.items():
        ids[category] = [id for id, _, _ in case]
    (work / "test_case_ids_to_generate.json").write_text(json.dumps(ids))
    options = ("generate", "--model", MODEL, "--run-ids", "--num-threads", 4, "--temperature", 0)
    bfcl(server, work, *options)
    (result,) = (work / "result").iterdir()
    results = {}
    for path in sorted(result.rglob("*.json")):
        results |= {line["id"]: line["result"] for line in lines(path)}
    return results


def scores(server: RealServer, work: Path) -> dict[str, str]:
    """Return the shares of answers that are right, by category."""
    bfcl(server, work, "evaluate", "--model", MODEL, "--partial-eval")
    (path,) = (work / "score").glob("data_non_live.csv")
    (row,) = csv.DictReader(path.open())
    return {name: row[name] for name in COLUMNS}


def count(server: RealServer, series: str) -> float:
    metrics = server.request("GET", "/metrics")[2].decode()
    match = re.search(rf"^lockstep:{series}_total\S* (\S+)$", metrics, re.MULTILINE)
    assert match is not None
    return float(match[1])


def bfcl(server: RealServer, work: Path, *options: object) -> str:
    where = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none", "BFCL_PROJECT_ROOT": str(work)}
    return run_client("bfcl", "bfcl", *options, work=work, cwd=work, seconds=7200, **where)


def test_no_call_is_lost_and_two_runs_are_equal(server: RealServer, cases: Any, tmp_path: Path) -> None:
    first = generated(server, cases, tmp_path / "first")
    assert len(first) == sum(CASES.values()) and all(isinstance(item, list) for item in first.values())
    assert first == generated(server, cases, tmp_path / "second")
    assert count(server, "malformed_tool_calls") == 0
    assert set(scores(server, tmp_path / "first").values()) == {"100.00%"}


@pytest.mark.skipif("LOCKSTEP_REAL" not in os.environ, reason="LOCKSTEP_REAL names no folder of `make real`")
def test_two_runs_of_a_trained_model_are_equal(cases: Any, tmp_path: Path) -> None:
    """With four requests at a time, on two servers."""
    number = int(os.environ.get("LOCKSTEP_BFCL_CASES", 20))
    some = {category: case[: number * CASES[category] // sum(CASES.values())] for category, case in cases.items()}
    runs = []
    for name in ("first", "second"):
        results = Path(os.environ["LOCKSTEP_REAL"], "results").absolute()
        # It asks for no length, and so small a model goes on for ever.
        options = ("--tool-call-parser", "json", "--max-model-len", 1024, "--queue-timeout", 600)
        options = (*options, "--served-model-name", MODEL)
        with RealServer(results, *options, target="smollm2/fp16") as server:
            runs.append(generated(server, some, tmp_path / name))
            counts = {series: count(server, series) for series in ("tool_calls", "malformed_tool_calls")}
            judged = scores(server, tmp_path / name)
    assert runs[0] == runs[1] and len(runs[0]) == sum(map(len, some.values()))
    refused = [answer for answer in runs[0].values() if isinstance(answer, str) and answer.startswith("Error")]
    print(f"\n{len(runs[0])} cases, {len(refused)} of them refused; {counts}; {judged}")
