"""`lockstep serve --request-log`: a line for each request, its entries, and a full disk."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.targets import Results
from real_server import ENDS, RealServer, make_tree

PROMPT = "Once upon a time"
NAMES = [
    "time", "id", "endpoint", "status", "model", "stream", "prompt_tokens", "completion_tokens", "n", "finish_reasons",
    "queue_seconds", "ttft_seconds", "seconds", "error",
]  # fmt: skip


@pytest.fixture(scope="module")
def tree(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("log") / "results", demo, max_batch_size=2)


@pytest.fixture(scope="module")
def server(tree: Path) -> Iterator[RealServer]:
    (tree / "keys.txt").write_text("secret-key\n")
    log = tree / "requests.jsonl"
    keys = tree / "keys.txt"
    options = ("--grpc-port", 0, "--max-queue", 0, "--request-log", log, "--api-key-file", keys)
    with RealServer(tree, *options) as server:
        yield server


class Log:
    """Return the lines that a log gets from now on."""

    def __init__(self, path: Path):
        self._path = path
        self._start = path.stat().st_size

    def lines(self, count: int) -> list[dict[str, Any]]:
        """`count` lines, once they are there, and no more."""
        end = time.monotonic() + ENDS
        while (data := self._path.read_bytes()[self._start :]).count(b"\n") < count:
            assert time.monotonic() < end, data
            time.sleep(0.01)
        lines = [json.loads(line) for line in data.splitlines()]
        assert len(lines) == count and all(list(line) == NAMES for line in lines), lines
        return lines


@pytest.fixture
def log(server: RealServer, tree: Path) -> Log:
    return Log(tree / "requests.jsonl")


KEY = {"Authorization": "Bearer secret-key"}


ASK = {"model": "demo-llama", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}


def complete(server: RealServer, **body: Any) -> tuple[int, Any]:
    status, _, data = server.request("POST", "/v1/completions", {**ASK, **body}, KEY)
    return status, data


def test_an_answer_has_a_line_with_its_numbers(server: RealServer, log: Log) -> None:
    answer = json.loads(complete(server, n=2)[1])
    (line,) = log.lines(1)
    assert (line["id"], line["endpoint"], line["status"]) == (answer["id"], "POST /v1/completions", 200)
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"] and line["completion_tokens"] == 10
    assert (line["model"], line["n"], line["stream"], line["error"]) == ("demo-llama", 2, False, None)
    assert line["finish_reasons"] == ["length", "length"]
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"] < 60
    assert line["time"].endswith("+00:00")


def test_a_stream_has_one_line(server: RealServer, log: Log) -> None:
    complete(server, stream=True)
    (line,) = log.lines(1)
    assert line["stream"] and line["completion_tokens"] == 5 and line["finish_reasons"] == ["length"]


def test_chats_and_tritons_endpoints_have_lines_too(server: RealServer, log: Log) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    server.request("POST", "/v1/chat/completions", {"model": "demo-llama", "messages": messages, "max_tokens": 3}, KEY)
    server.request("POST", "/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 4, "id": "mine"}, KEY)
    chat, triton = log.lines(2)
    assert chat["id"].startswith("chatcmpl-") and chat["completion_tokens"] == 3
    assert (triton["id"], triton["endpoint"]) == ("mine", "POST /v2/models/ensemble/generate")
    assert triton["completion_tokens"] == 4


def test_refusals_have_lines_and_probes_have_none(server: RealServer, log: Log) -> None:
    complete(server, max_tokens=0)
    server.request("POST", "/v1/completions", {}, {"Authorization": "Bearer wrong-key"})
    server.request("GET", "/nothing", None, KEY)
    for path in ("/health/ready", "/metrics", "/v1/models", "/status"):
        server.request("GET", path, None, KEY)
    lines = log.lines(3)
    assert [line["status"] for line in lines] == [400, 401, 404]
    assert all(line["prompt_tokens"] is None and line["finish_reasons"] == [] for line in lines)


def test_a_full_queue_and_a_client_that_left_are_told_apart(server: RealServer, log: Log) -> None:
    with ThreadPoolExecutor() as pool:
        with server.stopped_engine():
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as client:
                client.request("POST", "/v1/completions", json.dumps({**ASK, "n": 2}), KEY)
                end = time.monotonic() + ENDS
                while not json.loads(server.request("GET", "/status", None, KEY)[2])["streams"]:
                    assert time.monotonic() < end
                    time.sleep(0.01)
            (entry,) = log.lines(1)
            waiting = [pool.submit(complete, server) for _ in range(3)]
            full = log.lines(2)[1]
        assert sorted(item.result()[0] for item in waiting) == [200, 200, 429]
    assert (entry["status"], entry["finish_reasons"], entry["error"]) == (499, ["abort", "abort"], None)
    assert entry["queue_seconds"] is None and entry["ttft_seconds"] is None
    assert (full["status"], full["error"]) == (429, "queue_full")
    log.lines(4)  # of the two that were answered, too: the next test's log begins after them


def test_what_the_engine_refuses_has_the_code_of_its_error(server: RealServer, log: Log) -> None:
    complete(server, structured_outputs={"grammar": "start: ("})
    (line,) = log.lines(1)
    assert (line["status"], line["error"], line["finish_reasons"]) == (400, "invalid_grammar", ["error"])


def test_requests_over_grpc_have_lines(server: RealServer, log: Log) -> None:
    grpc = pytest.importorskip("grpc")
    from lockstep_serve.triton.grpc_messages import MESSAGES, SERVICE

    match = re.search(r"gRPC at (\S+)$", server.line.strip())
    assert match
    with grpc.insecure_channel(match[1]) as channel:

        def call(name: str, request: Any, *metadata: tuple[str, str]) -> Any:
            method = channel.unary_unary(f"/{SERVICE}/{name}", lambda message: message.SerializeToString())
            return method(request, metadata=metadata, timeout=30)

        request = MESSAGES["ModelInferRequest"](model_name="ensemble", id="over grpc")
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
        text.contents.bytes_contents.append(b"Hello")
        number = request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
        number.contents.int_contents.append(3)
        key = ("authorization", "Bearer secret-key")
        call("ServerLive", MESSAGES["ServerLiveRequest"]())
        call("ModelInfer", request, key)
        with pytest.raises(grpc.RpcError):
            call("ModelInfer", request)
        method = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", lambda message: message.SerializeToString())
        assert list(method(iter([request]), metadata=[key], timeout=30))
    complete, refused, stream = log.lines(3)
    assert (complete["id"], complete["endpoint"], complete["status"]) == ("over grpc", "ModelInfer", 200)
    assert complete["completion_tokens"] == 3 and refused["status"] == 401
    assert (stream["endpoint"], stream["status"], stream["completion_tokens"]) == ("ModelStreamInfer", 200, 3)


def test_no_line_has_what_was_asked_answered_or_sent_as_key(server: RealServer, log: Log, tree: Path) -> None:
    text = json.loads(complete(server, cache_salt="secret-salt")[1])["choices"][0]["text"]
    assert len(text) > 3
    log.lines(1)
    written = (tree / "requests.jsonl").read_text()
    assert not [word for word in (PROMPT, text, "secret-key", "wrong-key", "secret-salt") if word in written]


@pytest.mark.long
def test_a_full_disk_ends_nothing_and_is_said_once(tree: Path) -> None:
    with RealServer(tree, "--request-log", "/dev/full") as server:
        for _ in range(3):
            server.complete("a", 2)
        assert server.get("/health/ready")["ready"]
    assert server.stderr.count("request log: lines are lost: No space left on device") == 1


@pytest.mark.long
def test_a_reader_that_does_not_read_holds_up_nobody(tree: Path) -> None:
    pipe = tree / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)
    os.set_blocking(end, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(end, b" " * 4096)
    with RealServer(tree, "--request-log", pipe) as server:
        for _ in range(3):
            server.complete("a", 2)
    os.close(end)


def test_lines_go_to_stderr_where_that_is_asked_for(tree: Path) -> None:
    with RealServer(tree, "--request-log", "-") as server:
        server.complete("a", 2)
    (line,) = [line for line in server.stderr.splitlines() if line.startswith("{")]
    assert json.loads(line)["completion_tokens"] == 2


def test_a_log_that_cannot_be_written_is_told_in_one_line(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "demo-llama/fp32/all", "--results", str(tree), "--request-log", str(tree)]
    with pytest.raises(SystemExit) as ended:
        main(arguments, prog_name="lockstep")
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
