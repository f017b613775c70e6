"""The repository that `lockstep triton` writes, in NVIDIA's Triton Inference Server."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from real_triton import TritonServer, write_repository

from lockstep.artifacts.reference import ReferenceManifest
from lockstep.targets import Results
from real_server import make_tree

MODELS = ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls"]
CURL = {"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2}
TEXT = ["ensemble", "tensorrt_llm_bls"]
HERE = Path(__file__).parent


def start(references: Results, folder: Path, *options: str) -> TritonServer:
    tree = make_tree(folder / "results", references)
    # A Unix socket's path is short; a temporary folder's need not be.
    write_repository("demo-llama/fp32/all", tree, folder / "repository", *options)
    return TritonServer(Path(os.environ["LOCKSTEP_TRITON"]), folder / "repository", folder)


@pytest.fixture(scope="module")
def triton(references: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    # So often that a request of the demo, which is through in a moment, is found to be cancelled.
    with start(references, tmp_path_factory.mktemp("t"), "--set", "cancellation_check_period_ms=5") as triton:
        yield triton


@pytest.fixture(scope="module")
def grpc_answers(triton: TritonServer) -> dict[str, Any]:
    """What tests/tritonserver/grpc_client.py got."""
    return json.loads(grpc_client(triton))


def grpc_client(triton: TritonServer, *options: str) -> bytes:
    command = [triton.python, HERE / "grpc_client.py", str(triton.grpc), *options]
    run = subprocess.run(command, capture_output=True, timeout=180, env={})
    assert run.returncode == 0, run.stderr.decode() + triton.log[-3000:]
    return run.stdout


def test_all_models_are_ready(triton: TritonServer) -> None:
    index = json.loads(triton.request("POST", "/v2/repository/index")[1])
    assert [(item["name"], item["state"]) for item in index] == [(name, "READY") for name in MODELS]


@pytest.mark.parametrize("model", TEXT)
def test_texts_are_golden_s(triton: TritonServer, references: Results, model: str) -> None:
    golden = ReferenceManifest.load(references.reference("demo-llama", "all"))
    counts = []
    for prompt in golden.prompts:
        options = {"text_input": prompt.text, "max_tokens": golden.max_new_tokens}
        full = triton.generate(model, **options, exclude_input_in_output=True)["text_output"]
        pieces = [event["text_output"] for event in triton.events(model, **options, stream=True)]
        # A whole answer is decoded by itself, which takes the space off its start.
        assert "".join(pieces).strip() == full.strip() == prompt.new_text.strip(), prompt.text
        counts.append(len(pieces))
    assert max(counts) > 1, "a reader that is slow gets what came meanwhile as one piece, not every time"


@pytest.mark.parametrize("model", TEXT)
def test_twenty_at_once_get_the_same(triton: TritonServer, model: str) -> None:
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: triton.generate(model, **CURL, end_id=2)["text_output"], range(20)))
    assert len(set(answers)) == 1 and answers[0].startswith(CURL["text_input"] + " ")
    triton.wait_idle()


@pytest.mark.parametrize("model", TEXT)
def test_curl(triton: TritonServer, model: str) -> None:
    url = f"http://127.0.0.1:{triton.http}/v2/models/{model}/generate"
    body = json.dumps({**CURL, "end_id": 2})
    run = subprocess.run(["curl", "-s", "-X", "POST", url, "-d", body], capture_output=True, check=True, timeout=60)
    answer = json.loads(run.stdout)
    assert answer["text_output"] == triton.generate(model, **CURL, end_id=2)["text_output"]
    names = {"cum_log_probs", "model_name", "model_version", "output_log_probs", "text_output"}
    assert names <= answer.keys() and answer["output_log_probs"] == [0.0] * 20


def test_log_probs_and_seeds_reach_the_server(triton: TritonServer) -> None:
    options = {**CURL, "return_log_probs": True, "top_k": 5, "temperature": 2.0}
    answers = [triton.generate(model, **options, seed=seed) for model, seed in itertools.product(TEXT, (7, 8))]
    assert answers[0]["text_output"] == answers[2]["text_output"] != answers[1]["text_output"]
    assert answers[0]["cum_log_probs"] == pytest.approx(sum(answers[0]["output_log_probs"]), abs=1e-3)
    assert answers[0]["cum_log_probs"] < 0


@pytest.mark.parametrize("model", TEXT)
def test_what_is_wrong_is_named(triton: TritonServer, model: str) -> None:
    for wrong, name in (({"max_tokens": 0}, "max_tokens"), ({"beam_width": 2}, "beam_width")):
        status, data = triton.request("POST", f"/v2/models/{model}/generate", {**CURL, **wrong})
        assert status >= 400 and name in json.loads(data)["error"]
    status, data = triton.request("POST", f"/v2/models/{model}/generate", {**CURL, "text_input": "a " * 400})
    assert status >= 400 and "tokens" in json.loads(data)["error"]
    assert triton.generate(model, **CURL)["text_output"]


def test_grpc_streams_bring_the_whole_answer(grpc_answers: dict[str, Any]) -> None:
    assert (
        grpc_answers["streamed_text"].strip() == grpc_answers["whole_text"].strip() and grpc_answers["num_pieces"] > 3
    )
    assert grpc_answers["streamed_ids"] == grpc_answers["whole_ids"] and len(grpc_answers["whole_ids"]) == 24
    assert grpc_answers["batch"] == [[0, grpc_answers["whole_ids"]], [1, grpc_answers["whole_ids"]]]


def test_grpc_stop_errors_and_cancellation(triton: TritonServer, grpc_answers: dict[str, Any]) -> None:
    # The one that was stopped and the one that was cancelled.
    assert 0 < grpc_answers["stopped"] < 230 and triton.aborted == 2
    for name, error in zip(("lora_task_id", "beam_width", "max_tokens"), grpc_answers["errors"], strict=True):
        assert name in error
    triton.wait_idle()


def test_a_client_of_http_that_goes_away_ends_its_request(triton: TritonServer) -> None:
    before = triton.aborted
    connection = http.client.HTTPConnection("127.0.0.1", triton.http, timeout=60)
    body = {**CURL, "max_tokens": 230, "end_id": -1, "stream": True}
    connection.request("POST", "/v2/models/tensorrt_llm_bls/generate_stream", json.dumps(body))
    answer = connection.getresponse()
    answer.readline()
    answer.close()
    connection.close()
    triton.wait_idle()
    assert triton.aborted == before + 1


def test_metrics_of_the_server_behind(triton: TritonServer) -> None:
    end = time.monotonic() + 20
    while b'lockstep_requests{state="running"} 0' not in triton.request("GET", "/metrics", port=triton.metrics)[1]:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_an_engine_that_is_killed_changes_no_text(triton: TritonServer) -> None:
    options = {**CURL, "max_tokens": 200, "end_id": -1, "stream": True}

    def text(events: list[dict[str, Any]]) -> str:
        return "".join(event["text_output"] for event in events)

    full = {model: text(triton.events(model, **options)) for model in TEXT}
    before = triton.backing("/health")["restarts"]
    with ThreadPoolExecutor(4) as threads:
        running = [(model, threads.submit(triton.events, model, **options)) for model in TEXT * 2]
        while not triton.backing("/status")["running"]:
            time.sleep(0.005)
        os.kill(engine_pid(triton), signal.SIGKILL)
        for model, answer in running:
            assert text(answer.result(60)) == full[model]
    assert triton.backing("/health")["restarts"] == before + 1


def test_a_server_that_is_killed_is_started_again(triton: TritonServer) -> None:
    os.kill(server_pid(triton), signal.SIGKILL)
    end = time.monotonic() + 60
    while True:
        status, data = triton.request("POST", "/v2/models/ensemble/generate", CURL)
        if status == 200:
            break
        assert time.monotonic() < end, data
        time.sleep(0.5)
    triton.wait_idle()


def test_cancelled_streams_of_an_ensemble_end(references: Results, tmp_path: Path) -> None:
    # Triton waits for those that do not, and the context asserts that it does not wait.
    with start(references, tmp_path) as triton:
        grpc_client(triton, "cancel")
        triton.wait_idle()


@pytest.mark.parametrize("model", TEXT)
def test_sigterm_lets_requests_finish_and_leaves_nothing(references: Results, tmp_path: Path, model: str) -> None:
    with start(references, tmp_path) as triton:
        options = {**CURL, "max_tokens": 200, "end_id": -1, "stream": True}
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(triton.events(model, **options)))
        assert triton.request("POST", "/v2/models/ensemble/generate", {**CURL, "max_tokens": 0})[0] >= 400
        thread.start()
        while not triton.backing("/status")["running"]:
            time.sleep(0.005)
        assert triton.stop() == 0
        # Triton waits for requests in progress: a failed one must not count.
        assert not triton.unfinished
        thread.join(60)
        assert len(answers[0]) > 1
        assert not (triton.repository / "lockstep.sock").exists()


def test_a_triton_that_is_killed_leaves_no_process(references: Results, tmp_path: Path) -> None:
    # Metrics are set and pieces are taken all the time: calls that Triton does not answer any more.
    with start(references, tmp_path, "--set", "stats_check_period_ms=1") as triton:
        body = json.dumps({**CURL, "max_tokens": 230, "end_id": -1, "stream": True})
        connections = [http.client.HTTPConnection("127.0.0.1", triton.http, timeout=60) for _ in TEXT]
        for model, connection in zip(TEXT, connections):
            connection.request("POST", f"/v2/models/{model}/generate_stream", body)
            connection.getresponse().readline()
        assert triton.stop(signal.SIGKILL) == -signal.SIGKILL
        for connection in connections:
            connection.close()


def test_a_full_queue_refuses_what_does_not_fit(references: Results, tmp_path: Path) -> None:
    with start(references, tmp_path, "--max-queue", "1") as triton, ThreadPoolExecutor(40) as threads:
        body = {**CURL, "max_tokens": 100, "end_id": -1}
        for model in TEXT:
            paths = [f"/v2/models/{model}/generate"] * 40
            answers = list(threads.map(triton.request, ["POST"] * 40, paths, [body] * 40))
            refused = [data.decode() for status, data in answers if status != 200]
            assert 0 < len(refused) < 40 and all("queue" in error for error in refused), refused


def test_options_and_one_response_a_request(references: Results, tmp_path: Path) -> None:
    options = [
        "--not-decoupled", "--set", "batch_scheduler_policy=max_utilization", "--set", "enable_kv_cache_reuse=false",
    ]  # fmt: skip
    with start(references, tmp_path, *options) as triton:
        assert triton.generate("ensemble", **CURL)["text_output"].startswith(CURL["text_input"])
        body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [CURL["text_input"]]}]}
        body["inputs"].append({"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [20]})
        status, data = triton.request("POST", "/v2/models/tensorrt_llm_bls/infer", body)
        outputs = {output["name"]: output["data"] for output in json.loads(data)["outputs"]}
        assert status == 200 and outputs["text_output"] == [triton.generate("ensemble", **CURL)["text_output"]]
        command = Path("/proc", str(server_pid(triton)), "cmdline").read_bytes()
        assert b"--triton-repository" in command
        assert triton.backing("/status")["pages"]["cached"] == 0


def server_pid(triton: TritonServer) -> int:
    """The process that listens at the socket."""
    import socket
    import struct

    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(triton.repository / "lockstep.sock"))
        return struct.unpack("iii", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def engine_pid(triton: TritonServer) -> int:
    for path in Path("/proc", str(server_pid(triton)), "task").glob("*/children"):
        for child in path.read_text().split():
            if b"lockstep_serve.engine_process" in Path("/proc", child, "cmdline").read_bytes():
                return int(child)
    raise AssertionError("there is no engine process")
