"""Libraries that agents are made of, unchanged, against `lockstep serve` of a model that says exact calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import scripted
import scripted_model
from client import run_client
from weather import ANSWERS, CALLS, END, FORM, TEXT, THOUGHT

from real_server import RealServer

HERE = Path(__file__).parent
CLIENTS = ("openai", "anthropic", "openai-agents", "langchain-openai", "litellm", "inspect-ai")
# By the first word of a check.
EXPECTED = {
    "calls": [TEXT, CALLS, THOUGHT],
    "called": [TEXT, CALLS],  # of clients that do not show the reasoning
    "loop": END,
    "form": FORM,
    "city": FORM["city"],
    "count": True,
    "score": "C",  # inspect-ai's of a right answer
}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    results = scripted.write(tmp_path_factory.mktemp("agents"), ANSWERS)
    with RealServer(results.root, target=scripted_model.TARGET) as server:
        yield server


@pytest.mark.parametrize("client", CLIENTS)
def test_calls_loops_and_forms_of(agents: RealServer, client: str, tmp_path: Path) -> None:
    """All checks give what the model was to say; in two runs at a time, the same bytes."""

    def run(number: int) -> str:
        work = tmp_path / str(number)
        work.mkdir()
        arguments = (HERE / "agent_runs.py", client, agents.url)
        output = run_client("agents", "python", *arguments, work=work, cwd=work, LITELLM_LOCAL_MODEL_COST_MAP="True")
        return next(line for line in output.splitlines() if line.startswith('{"'))

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(run, range(2))
    actual = json.loads(first)
    assert actual == {check: EXPECTED[check.partition(" ")[0]] for check in actual} and len(actual) > 3
    assert first == second
    metrics = agents.request("GET", "/metrics")[2].decode().splitlines()
    assert next(line.split()[-1] for line in metrics if line.startswith("lockstep:malformed_tool_calls_total")) == "0.0"
    agents.wait_idle()
