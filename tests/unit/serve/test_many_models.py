"""Several fine-tunes in one server: each answers as a server of it alone does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo_model import CONFIG
from fine_tunes import make_fine_tunes

from lockstep.targets import Results
from real_server import RealServer

MODELS = ["demo-llama", "tuned", "other"]
TARGETS = [f"{name}/fp32/all" for name in MODELS]
PROMPTS = ["Once upon a time", "The pendulum", "San Francisco is a"]


@pytest.fixture(scope="module")
def tree(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fine_tunes(tmp_path_factory.mktemp("fine-tunes") / "results", demo, CONFIG, MODELS[1:])


def answers(server: RealServer, model: str) -> list[object]:
    """Return text and log-probabilities, which have all bits of float32, of each prompt."""
    choices = []
    for prompt in PROMPTS:
        (choice,) = server.complete(prompt, 24, model=model, logprobs=2)["choices"]
        choices.append((choice["text"], choice["logprobs"]["token_logprobs"]))
    return choices


@pytest.fixture(scope="module")
def alone(tree: Path) -> dict[str, list[object]]:
    """Return the answers of servers with one model each."""
    expected = {}
    for name, target in zip(MODELS, TARGETS, strict=True):
        with RealServer(tree, target=target) as server:
            expected[name] = answers(server, name)
    return expected


@pytest.mark.parametrize("options", [(), ("--max-loaded-models", 1), ("--max-loaded-models", 2)])
def test_each_model_answers_as_alone_whatever_the_others_do(
    tree: Path, alone: dict[str, list[object]], options: tuple[object, ...]
) -> None:
    assert len({json.dumps(expected) for expected in alone.values()}) == len(MODELS)
    with RealServer(tree, *TARGETS[1:], *options, target=TARGETS[0]) as server:
        cards = server.get("/v1/models")["data"]
        assert [card["id"] for card in cards] == MODELS and len({card["root"] for card in cards}) == 3
        with ThreadPoolExecutor(6) as pool:
            results = [(name, pool.submit(answers, server, name)) for name in 4 * MODELS]
        for name, result in results:
            assert result.result() == alone[name]
        status, _, body = server.request("POST", "/v1/completions", {"model": "none", "prompt": "a"})
        assert status == 404 and b"expected one of demo-llama, tuned, other, found 'none'" in body
        server.wait_idle()
