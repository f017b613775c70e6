"""NVIDIA's aiperf, unchanged, against `lockstep serve`: the files that it exports of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client import run_client
from demo_model import DEMO

from real_server import RealServer

# tokens of each request
INPUT_LEN = 40
OUTPUT_LEN = 24
TIMES = ("time_to_first_token", "inter_token_latency", "inter_chunk_latency", "request_latency", "decode_duration")


def profile(server: RealServer, work: Path, endpoint: str, *options: object, output_len: int = OUTPUT_LEN) -> Any:
    """Return what `aiperf profile` exports of streamed requests with 40 tokens, as JSON.

    `ignore_eos` lets each answer have `output_len` tokens, and with temperature 0 they are the same in each run. aiperf
    takes a folder for its tokenizer only without HF_HUB_OFFLINE.
    """
    arguments = ["--model", "demo-llama", "--url", server.url, "--endpoint-type", endpoint, "--streaming"]
    arguments += ["--tokenizer", str(DEMO), "--isl", str(INPUT_LEN), "--osl", str(output_len), "--random-seed", "1"]
    arguments += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    arguments += ["--ui", "none", "--no-gpu-telemetry"]
    out = work / "out"
    output = run_client("aiperf", "aiperf", "profile", *arguments, "--artifact-dir", out, *options, work=work, cwd=work)
    exported = out / "profile_export_aiperf.json"
    assert exported.is_file(), output[-6000:]  # its exit code is 0 even where it could not start
    return json.loads(exported.read_text())


def assert_complete(metrics: Any, count: int) -> None:
    """All `count` requests were answered, with as many tokens as asked for, and were timed."""
    assert metrics["is_complete"] and not metrics["was_cancelled"] and metrics["error_summary"] == []
    assert metrics["request_count"]["avg"] == metrics["completed_request_count"]["avg"] == count
    assert metrics["request_error_rate"]["avg"] == 0
    for name, tokens in (("prompt", INPUT_LEN), ("completion", OUTPUT_LEN)):
        usage = metrics[f"usage_{name}_tokens"]
        assert usage["min"] == usage["max"] == tokens, (name, usage)
        assert metrics[f"total_usage_{name}_tokens"]["avg"] == tokens * count
    for name in TIMES:
        assert 0 <= metrics[name]["min"] <= metrics[name]["max"], name
        assert metrics[name]["avg"] > 0, name
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        assert metrics[name]["count"] == count, name
    # TTFT is a part of the latency, and the gaps between the tokens are the rest.
    generation_ms = metrics["request_latency"]["avg"] - metrics["time_to_first_token"]["avg"]
    assert metrics["inter_token_latency"]["avg"] * (OUTPUT_LEN - 1) == pytest.approx(generation_ms, rel=0.1)


def test_chats_at_a_concurrency(server: RealServer, tmp_path: Path) -> None:
    actual = profile(server, tmp_path, "chat", "--concurrency", 4, "--request-count", 16)
    assert_complete(actual, 16)
    # Its own count of a prompt is the server's: the chat template of the demo adds nothing to one message.
    assert actual["input_sequence_length"]["min"] == actual["input_sequence_length"]["max"] == INPUT_LEN
    assert actual["usage_prompt_tokens_diff_pct"]["max"] == 0
    server.wait_idle()


def test_completions_at_a_request_rate(server: RealServer, tmp_path: Path) -> None:
    rate = 20
    count = 16
    schedule = ["--request-rate", rate, "--arrival-pattern", "constant", "--concurrency", 4, "--request-count", count]
    ready = ["--wait-for-model-timeout", 30, "--wait-for-model-mode", "both"]
    actual = profile(server, tmp_path, "completions", *schedule, *ready, "--use-server-token-count")
    assert_complete(actual, count)
    assert actual["output_sequence_length"]["min"] == actual["output_sequence_length"]["max"] == OUTPUT_LEN
    # From the first request to the last one there are 15 gaps of a schedule that is only ever late.
    assert actual["benchmark_duration"]["avg"] > (count - 2) / rate
    server.wait_idle()


def test_its_record_of_the_metrics_has_the_requests(server: RealServer, tmp_path: Path) -> None:
    usage = ["--use-server-token-count", "--per-chunk-usage"]  # `continuous_usage_stats`
    metrics = profile(server, tmp_path, "chat", "--concurrency", 2, "--request-count", 8, *usage)
    assert_complete(metrics, 8)
    exported = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())
    assert exported["summary"]["endpoints_successful"] == [f"{server.url}/metrics"]
    (series,) = exported["metrics"]["lockstep:e2e_request_latency_seconds"]["series"]
    assert series["stats"]["count"] == 8


def test_cancelled_requests_end_and_the_others_complete(server: RealServer, tmp_path: Path) -> None:
    count = 20
    output_len = 200
    before = aborted(server)
    # 0.03 s are less than an answer of 200 tokens takes.
    cancelled = ["--request-cancellation-rate", 50, "--request-cancellation-delay", 0.03]
    options = ["--concurrency", 4, "--request-count", count, *cancelled]
    actual = profile(server, tmp_path, "chat", *options, output_len=output_len)
    server.wait_idle()
    (errors,) = actual["error_summary"]
    assert errors["error_details"]["type"] == "RequestCancellationError"
    assert 0 < errors["count"] < count
    assert actual["request_count"]["avg"] == count - errors["count"]
    usage = actual["usage_completion_tokens"]
    assert usage["min"] == usage["max"] == output_len
    # One that ends in the moment in which it is cancelled is completed at the server.
    assert 0 < aborted(server) - before <= errors["count"]


def aborted(server: RealServer) -> float:
    """Return the number of answers that ended early because the client left, from /metrics."""
    lines = server.request("GET", "/metrics")[2].decode().splitlines()
    results = [line for line in lines if line.startswith("lockstep:request_success_total{") and '"abort"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in results)
