"""The Berkeley Function Calling Leaderboard's own client and judge, unchanged, against `lockstep serve` of a model that
says the right calls: what is lost of its score is lost by the protocol."""

from __future__ import annotations

import csv
import json
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


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def value(allowed: list[Any]) -> Any:
    """Return the first value that its judge takes."""
    first = next(each for each in allowed if each != "")
    if isinstance(first, dict):
        return arguments(first)
    return [arguments(each) if isinstance(each, dict) else each for each in first] if isinstance(first, list) else first


def arguments(allowed: Mapping[str, list[Any]]) -> dict[str, Any]:
    return {name: value(values) for name, values in allowed.items() if any(each != "" for each in values)}


def call(truth: Mapping[str, Mapping[str, list[Any]]]) -> str:
    ((name, allowed),) = truth.items()
    given = {"name": name.replace(".", "_"), "arguments": arguments(allowed)}  # no dots in names of OpenAI's
    return f"<tool_call>\n{json.dumps(given, ensure_ascii=False)}\n</tool_call>"


@pytest.fixture(scope="module")
def cases() -> dict[str, list[tuple[str, str, str]]]:
    """Id, question and right answer, by category."""
    code = "import bfcl_eval, pathlib; print(pathlib.Path(bfcl_eval.__file__).parent)"
    data = Path(run_client("bfcl", "python", "-c", code, work=Path(), cwd=Path()).strip()) / "data"
    found = {}
    for category, number in CASES.items():
        asked = lines(data / f"BFCL_v4_{category}.json")[:number]
        truths = lines(data / "possible_answer" / f"BFCL_v4_{category}.json")[:number]
        assert [each["id"] for each in asked] == [each["id"] for each in truths]
        found[category] = [
            (each["id"], each["question"][0][-1]["content"], "\n".join(map(call, truth["ground_truth"])))
            for each, truth in zip(asked, truths)
        ]
    return found


@pytest.fixture(scope="module")
def server(cases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("bfcl")
    answers = {question: answer for each in cases.values() for _, question, answer in each}
    results: Results = scripted.write(folder, answers, PIECE)
    with RealServer(results.root, "--served-model-name", MODEL, target=scripted_model.TARGET) as server:
        yield server


def generated(server: RealServer, cases: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Return what it takes for the answers of all cases, by id, of a run with four requests at a time."""
    work.mkdir()
    ids = {category: [id for id, _, _ in each] for category, each in cases.items()}
    (work / "test_case_ids_to_generate.json").write_text(json.dumps(ids))
    options = ("generate", "--model", MODEL, "--run-ids", "--num-threads", 4, "--temperature", 0)
    bfcl(server, work, *options)
    (result,) = (work / "result").iterdir()
    return {each["id"]: each["result"] for path in sorted(result.rglob("*.json")) for each in lines(path)}


def bfcl(server: RealServer, work: Path, *options: object) -> str:
    where = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none", "BFCL_PROJECT_ROOT": str(work)}
    return run_client("bfcl", "bfcl", *options, work=work, cwd=work, **where)


def test_no_call_is_lost_and_two_runs_are_equal(server: RealServer, cases: Any, tmp_path: Path) -> None:
    first = generated(server, cases, tmp_path / "first")
    assert len(first) == sum(CASES.values()) and all(isinstance(each, list) for each in first.values())
    assert first == generated(server, cases, tmp_path / "second")
    metrics = server.request("GET", "/metrics")[2].decode()
    found = re.search(r"^lockstep:malformed_tool_calls_total\S* (\S+)$", metrics, re.MULTILINE)
    assert found is not None and float(found[1]) == 0
    bfcl(server, tmp_path / "first", "evaluate", "--model", MODEL, "--partial-eval")
    (scores,) = (tmp_path / "first" / "score").glob("data_non_live.csv")
    (row,) = csv.DictReader(scores.open())
    assert {row[name] for name in ("Python Simple AST", "Multiple AST", "Parallel AST")} == {"100.00%"}, row
