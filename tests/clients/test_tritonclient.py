"""Triton's client library, unchanged, over both protocols of `lockstep serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client import run_client

from lockstep.targets import Results
from real_server import RealServer, make_tree

PROMPT = "What is machine learning?"


@pytest.fixture(scope="module")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(make_tree(tmp_path_factory.mktemp("grpc") / "results", demo), "--grpc-port", 0) as server:
        yield server


@pytest.fixture(scope="module")
def answers(server: RealServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what triton_client.py got from the server, by protocol."""
    match = re.search(r"gRPC at 127\.0\.0\.1:(\d+)$", server.line.strip())
    assert match, server.line
    work = tmp_path_factory.mktemp("tritonclient")
    script = Path(__file__).with_name("triton_client.py")
    return json.loads(run_client("tritonclient", "python", script, server.port, match[1], work=work, cwd=work))


def test_both_protocols_say_the_same_of_the_server(answers: dict[str, dict[str, Any]]) -> None:
    http = answers["http"]
    rpc = answers["grpc"]
    for client in (http, rpc):
        assert client["live"] and client["ready"] and client["model_ready"] == [True, True]
        assert client["refused"].partition(": ")[2].startswith("model: expected one of ensemble")
    assert http["server"] == rpc["server"] and http["index"] == rpc["index"]["models"]
    assert [item["name"] for item in http["metadata"]["inputs"]] == [item["name"] for item in rpc["metadata"]["inputs"]]
    config = rpc["config"]["config"]
    assert config["max_batch_size"] == http["config"]["max_batch_size"]
    assert [item["data_type"] for item in http["config"]["input"]] == [item["data_type"] for item in config["input"]]
    assert config["model_transaction_policy"]["decoupled"]


def test_tritonclient_gets_what_generate_gives(server: RealServer, answers: dict[str, dict[str, Any]]) -> None:
    body = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": "", "end_id": 2}
    text = server.post("/v2/models/ensemble/generate", **body)["text_output"]
    assert answers["http"]["texts"] == [text] * 7 and answers["grpc"]["text"] == text
    assert PROMPT + answers["grpc"]["streamed_text"] == text


def test_a_stream_has_the_tokens_of_the_whole(answers: dict[str, dict[str, Any]]) -> None:
    actual = answers["grpc"]
    assert actual["streamed"] == actual["whole"][actual["num_prompt_tokens"] :]
    assert len(actual["sequence_lengths"]) > 1 and sum(actual["sequence_lengths"]) == 24
    assert actual["sequences"] == [0, 1]
    assert "max_tokens: required by the model" in actual["error"]


def test_a_stop_request_and_a_cancel_end_a_request(server: RealServer, answers: dict[str, dict[str, Any]]) -> None:
    actual = answers["grpc"]
    assert 1 <= actual["stopped"] < 230 and actual["stop_responses"] == 1
    assert "CANCELLED" in actual["cancelled"]
    server.wait_idle()
    metrics = server.request("GET", "/metrics")[2].decode()
    aborted = re.search(r'request_success_total\{finished_reason="abort",.*\} (\S+)', metrics)
    assert aborted and float(aborted[1]) >= 3  # the stopped one, the cancelled one, and the one of a cancelled stream
