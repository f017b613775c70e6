"""`lockstep serve` when clients leave, when there is too much of them, and when its engine stops or dies.

An engine that is stopped (SIGSTOP) makes moments last: whatever is asked of the server meanwhile meets a request that
waits, or one in the middle of its answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from demo_model import GOLDEN, LIMITS
from recorded import recorded

from calls import call
from lockstep.bundle.pack import pack
from lockstep.errors import Ended, InputError
from lockstep.targets import Results, Target
from lockstep_serve.cli.serve import serve
from lockstep_serve.cli.serve_options import read_api_keys
from real_server import ENDS, RealServer, make_tree

PROMPT = "Once upon a time"
LONG = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True}
MANY = {**LONG, "prompt": [[7, 8, number] for number in range(256)], "n": 4, "logprobs": 20}


def _posted(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data


@pytest.fixture
def tree(demo: Results, tmp_path: Path) -> Path:
    return make_tree(tmp_path / "results", demo)


@pytest.fixture(scope="module")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One that takes two requests at a time, lets three wait, and ends connections that read nothing for 3 s."""
    tree = make_tree(tmp_path_factory.mktemp("faults") / "results", demo, max_batch_size=2)
    with RealServer(tree, "--max-queue", 3, "--slow-reader", 3, "--log-level", "debug") as server:
        yield server


def counted(server: RealServer, series: str, headers: dict[str, str] | None = None) -> float:
    """The sum of a series of /metrics over its labels."""
    lines = server.request("GET", "/metrics", None, headers)[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{series}{{", f"{series} ")))


def test_a_client_that_leaves_in_its_answer_frees_the_slot(server: RealServer) -> None:
    before = counted(server, "lockstep:generation_tokens_total")
    with server.opened(**LONG) as events:
        next(iter(events))
        with server.stopped_engine():
            events.close()
            server.wait_until(lambda status: counted(server, "lockstep:request_success_total") > 0)
    server.wait_idle()
    assert counted(server, "lockstep:generation_tokens_total") - before < 240


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("half", [False, True], ids=["close", "half-close"])
def test_a_client_that_leaves_before_its_first_token_costs_nothing(
    server: RealServer, stream: bool, half: bool
) -> None:
    """So does one that closes its sending side alone: the server sees no difference."""
    before = counted(server, "lockstep:generation_tokens_total")
    with server.stopped_engine(), contextlib.ExitStack() as stack:
        with server.opened(**LONG, stream=stream) as events:
            server.wait_until(lambda status: status["streams"] == 1)
            if half:
                stack.enter_context(events.socket.dup()).shutdown(socket.SHUT_WR)
        server.wait_until(lambda status: status["streams"] == 0)
    server.wait_idle()
    assert counted(server, "lockstep:generation_tokens_total") == before


def test_a_client_that_leaves_while_it_waits_gives_its_place_to_the_next(server: RealServer) -> None:
    with server.stopped_engine(), contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(server.opened(**LONG))
        server.wait_until(lambda status: status["streams"] == 5)
        status, headers, data = server.request("POST", "/v1/completions", {"model": "demo-llama", "prompt": "a"})
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert "the queue is full" in json.loads(data)["error"]["message"]
        stack.close()
        server.wait_until(lambda status: status["streams"] == 0)
        with server.opened("a", 4) as events:
            server.wait_until(lambda status: status["streams"] == 1)
            os.kill(server.engine_pid, signal.SIGCONT)
            assert events.text()
    server.wait_idle()


def test_what_fits_in_queue_and_slots_is_all_answered(server: RealServer) -> None:
    alone = server.complete(PROMPT, 40)["choices"][0]["text"]
    with contextlib.ExitStack() as stack:
        with server.stopped_engine():
            opened = [stack.enter_context(server.opened(PROMPT, 40)) for _ in range(5)]
            server.wait_until(lambda status: status["streams"] == 5)
        assert [events.text() for events in opened] == [alone] * 5


def test_a_signal_tells_what_runs_by_the_ids_of_clients(server: RealServer) -> None:
    with server.opened(**LONG, request_id="of-a-client") as events:
        next(iter(events))
        with server.stopped_engine():
            os.kill(server.process.pid, signal.SIGUSR1)
            until(lambda: "info: service: 1 streams, 1 answers running, 0 prompts of 0 tokens waiting" in server.stderr)
        assert events.text()
    until(lambda: re.search(r"info: engine: 1 running, 0 waiting, .* pages free", server.stderr) is not None)
    lines = server.stderr
    number = re.search(r"debug: request (\d+) \(of-a-client\): \d+ tokens\n", lines)
    assert number and f"debug: request {number[1]}: choice 0 ended by max_new_tokens\n" in lines
    assert f"info: request {number[1]} (of-a-client): choice 0 running in slot " in lines
    assert "engine_process.py" in lines and PROMPT not in lines  # where the engine's threads are, and no texts


@pytest.mark.long
def test_a_request_that_waits_too_long_is_told_so(tree: Path) -> None:
    with RealServer(tree, "--queue-timeout", 3) as server:
        with server.stopped_engine():
            status, headers, data = server.request("POST", "/v1/completions", {"model": "demo-llama", "prompt": "a"})
        error = json.loads(data)["error"]
        assert (status, error["code"]) == (503, "queue_timeout") and headers["retry-after"] == "1"
        assert server.complete("a", 2)["choices"]


def test_idle_connections_cost_no_slot(server: RealServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
        assert server.complete("a", 2)["choices"]


def test_an_engine_that_is_killed_is_replaced_and_streams_go_on_to_the_same_text(tree: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True},
        {"prompt": "The pendulum", "max_tokens": 120, "temperature": 1.0, "seed": 5, "n": 2, "ignore_eos": True},
        {"prompt": [7, 8, 9], "max_tokens": 90, "frequency_penalty": 0.5, "ignore_eos": True, "logprobs": 2,
         "echo": True},
    ]  # fmt: skip
    with RealServer(tree) as server:
        full = [server.complete(**body)["choices"] for body in bodies]
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(server.opened(**body)) for body in bodies]
            parts: list[dict[int, str]] = [{} for _ in bodies]
            values: list[float | None] = []
            readers = [iter(events) for events in opened]
            for number, reader in enumerate(readers):
                add(parts[number], next(reader), values)
            killed = server.engine_pid
            os.kill(killed, signal.SIGKILL)
            for number, reader in enumerate(readers):
                for event in reader:
                    add(parts[number], event, values)
            assert all(events.done for events in opened)
        for texts, choices in zip(parts, full, strict=True):
            assert texts == {choice["index"]: choice["text"] for choice in choices}
        assert values == full[2][0]["logprobs"]["token_logprobs"], "of the prompt too, once"
        status = server.get("/status")
        assert status["restarts"] == 1 and server.engine_pid != killed
        server.wait_idle()
        assert f"engine process {killed} died" in server.stderr and PROMPT not in server.stderr


def add(texts: dict[int, str], event: dict[str, Any], values: list[float | None] | None = None) -> None:
    """Add a chunk's texts, and to `values` its log-probabilities."""
    for choice in event["choices"]:
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if values is not None and choice["logprobs"]:
            values += choice["logprobs"]["token_logprobs"]


@pytest.mark.long
def test_an_engine_that_hangs_is_replaced_too(tree: Path) -> None:
    with RealServer(tree, "--stall", 5) as server:
        full = server.complete(**LONG)["choices"][0]["text"]
        with server.opened(**LONG) as events:
            first = next(iter(events))["choices"][0]["text"]
            hung = server.engine_pid
            os.kill(hung, signal.SIGSTOP)
            assert first + events.text() == full and events.done
        assert f"engine process {hung} gave no sign of life" in server.stderr


@pytest.mark.long
def test_an_engine_that_dies_twice_at_a_request_ends_it_with_an_error(tree: Path) -> None:
    with RealServer(tree, "--max-queue", 300) as server:
        with server.opened(**MANY) as events:
            next(iter(events))
            os.kill(server.engine_pid, signal.SIGKILL)
            server.wait_until(lambda status: status["restarts"] == 1)
            with server.opened(**LONG) as later:
                server.wait_until(lambda status: status["streams"] == 2)
                os.kill(server.engine_pid, signal.SIGKILL)
                *_, last = events
                assert "died twice while it ran this request" in last["error"]["message"] and not events.done
                message = (
                    list(later)[-1]["error"]["message"] if later.status == 200 else json.loads(later.answer.read())
                )
                assert "the engine died twice within a minute" in str(message)
        server.wait_until(lambda status: status["restarts"] == 2)
        assert server.complete("a", 2)["choices"]


@pytest.mark.long
def test_an_engine_that_cannot_start_again_is_said(tree: Path) -> None:
    with RealServer(tree) as server:
        engines = Results(tree).engines("demo-llama", "fp32", "onnxruntime")
        engines.rename(engines.with_suffix(".gone"))
        os.kill(server.engine_pid, signal.SIGKILL)
        until(lambda: "the engine does not start: " in server.stderr)  # before, requests wait for it
        assert "engines.json" in server.stderr and not server.get("/status")["ready"]
        status, headers, data = server.request("POST", "/v1/completions", {"model": "demo-llama", "prompt": "a"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert server.request("GET", "/health/ready")[0] == 503 and server.request("GET", "/health/live")[0] == 200
        engines.with_suffix(".gone").rename(engines)
        server.wait_until(lambda status: status["ready"])
        assert server.complete("a", 2)["choices"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_signal_to_end_lets_what_runs_finish(tree: Path, number: signal.Signals) -> None:
    with RealServer(tree) as server:
        full = server.complete(**LONG)["choices"][0]["text"]
        with server.opened(**LONG) as events:
            first = next(iter(events))["choices"][0]["text"]
            with server.stopped_engine():
                server.process.send_signal(number)
                server.wait_until(lambda status: status["draining"])
                status, headers, data = server.request(
                    "POST", "/v1/completions", {"model": "demo-llama", "prompt": "a"}
                )
                assert (status, headers["connection"]) == (503, "close")
                assert json.loads(data)["error"]["code"] == "shutting_down"
                assert server.request("GET", "/health/ready")[0] == 503
            assert first + events.text() == full and events.done
        engine = server.engine_pid if server.process.poll() is None else None
        assert server.process.wait(ENDS) == 0
        assert engine is None or not Path("/proc", str(engine)).exists()


@pytest.mark.long
@pytest.mark.parametrize("drain", [0.5, 600])
def test_sigterm_ends_what_does_not_finish(tree: Path, drain: float) -> None:
    """After the drain, or at a second signal before its end."""
    with RealServer(tree, "--drain", drain) as server:
        with server.opened(**LONG) as events:
            next(iter(events))
            engine = server.engine_pid
            os.kill(engine, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            if drain == 600:
                server.wait_until(lambda status: status["draining"])
                server.process.send_signal(signal.SIGTERM)
            *_, last = events
            assert last["error"]["code"] == "shutting_down" and not events.done
        assert server.process.wait(ENDS) == 0 and not Path("/proc", str(engine)).exists()


def test_an_engine_whose_server_is_gone_ends(tree: Path) -> None:
    with RealServer(tree) as server:
        engine = server.engine_pid
        server.process.kill()
        server.process.wait()
        until(lambda: not Path("/proc", str(engine)).exists())


@pytest.mark.long
def test_a_client_that_does_not_read_is_left_behind(tree: Path) -> None:
    with RealServer(tree, "--slow-reader", 1, "--max-queue", 300) as server:
        with server.opened(**MANY) as events:
            events.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            server.wait_until(lambda status: status["running"] == 4)
            assert server.complete("a", 2)["choices"]  # nobody else waits for it
            server.wait_until(lambda status: status["streams"] == 0)
        server.wait_idle()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + ENDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_clients_that_pipeline_and_read_nothing_are_ended(server: RealServer) -> None:
    """Whole answers too, and those that need no key: their connections would stay for ever."""
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        before = server.num_sockets()
        for _ in range(20):
            end = stack.enter_context(socket.socket())
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            end.connect(("127.0.0.1", server.port))
            end.sendall(request * 1000)  # more than the kernel keeps
        until(lambda: server.num_sockets() >= before + 20)
        until(lambda: server.num_sockets() <= before)
        assert server.request("GET", "/health/ready")[0] == 200  # others are served


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000, (b"HTTP/1.1 200 OK", 1001)),
        pytest.param(
            _posted("/v1/completions", {**MANY, "prompt": MANY["prompt"][:5], "n": 2, "stream": True}),
            (b"[DONE]", 1),
            marks=pytest.mark.long,
        ),
    ],
    ids=["whole", "stream"],
)
def test_a_slow_client_that_reads_on_gets_all(server: RealServer, requests: bytes, expected: tuple[bytes, int]) -> None:
    """The bytes that a client takes count, not those that are left: these do not shrink while answers follow."""
    with socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.connect(("127.0.0.1", server.port))
        end.sendall(requests + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        parts = []
        for _ in range(80):  # 4 s, which is longer than a client may take nothing
            parts.append(end.recv(1000))
            time.sleep(0.05)
        while parts[-1]:
            parts.append(end.recv(1 << 20))
        assert b"".join(parts).count(expected[0]) == expected[1]


@pytest.fixture(scope="module")
def keyed(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One that asks for a key."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys.txt"
    keys.write_text("# of the team\n\n  first-key  \r\nsecond-key\n")
    keys.chmod(0o600)
    with RealServer(make_tree(folder / "results", demo), "--api-key-file", keys, "--chunk-size", 64) as server:
        yield server


def test_keys_open_what_is_not_for_everyone(keyed: RealServer) -> None:
    body = {"model": "demo-llama", "prompt": "a", "max_tokens": 2}
    for path in ("/v1/models", "/metrics", "/status"):
        status, headers, _ = keyed.request("GET", path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
    wrong = ["Bearer third-key", "Bearer first-key2", "Bearer ", "first-key", "Basic first-key", "Bearer #", None]
    for credentials in wrong:
        headers = {} if credentials is None else {"Authorization": credentials}
        status, _, data = keyed.request("POST", "/v1/completions", body, headers)
        assert status == 401 and json.loads(data)["error"]["type"] == "authentication_error"
    for credentials in ("Bearer first-key", "bearer second-key", "BEARER first-key"):
        assert keyed.request("POST", "/v1/completions", body, {"Authorization": credentials})[0] == 200
    assert keyed.request("GET", "/health/ready")[0] == 200
    assert "key" not in keyed.stderr


def test_each_key_has_prefixes_of_its_own(keyed: RealServer) -> None:
    body = {"model": "demo-llama", "prompt": list(range(3, 123)), "max_tokens": 2}

    def hits(key: str, **options: str) -> float:
        headers = {"Authorization": f"Bearer {key}"}
        before = counted(keyed, "lockstep:prefix_cache_hits_total", headers)
        assert keyed.request("POST", "/v1/completions", {**body, **options}, headers)[0] == 200
        return counted(keyed, "lockstep:prefix_cache_hits_total", headers) - before

    assert [hits("first-key"), hits("first-key"), hits("second-key"), hits("second-key")] == [0, 64, 0, 64]
    assert [hits("first-key", cache_salt="a"), hits("first-key", cache_salt="a")] == [0, 64]
    assert hits("second-key", cache_salt="a") == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a-key a-model\nmy secret\n", "line 2: expected names of a-model after the key, found another one"),
        ("a-secret\n\na-secret a-model", "line 3: expected each API key once, found one of a line before"),
        ("ein-Schl\u00fcssel\n", "line 1: expected an API key, of visible ASCII, found another character"),
        ("# none\n\n", "expected API keys, one a line, found none"),
    ],
)
def test_a_file_of_keys_has_one_a_line(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(line)) as caught:
        read_api_keys(tmp_path / "keys", ["a-model"])
    assert "secret" not in str(caught.value) and "Schl" not in str(caught.value)


@pytest.mark.parametrize(("mode", "warns"), [(0o644, True), (0o604, True), (0o640, False), (0o600, False)])
def test_keys_that_others_can_read_are_a_warning(
    mode: int, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("a-secret\n")
    path.chmod(mode)
    assert read_api_keys(path, []) == {b"a-secret": []}
    output = capsys.readouterr().err
    assert (
        output
        == warns * f"lockstep: warning: {path}: expected API keys that other users cannot read, found mode "
        + (f"{mode:04o}; chmod o= {path}\n" if warns else "")
    )


@pytest.mark.long
def test_a_body_that_does_not_come_is_waited_for_no_longer_than_said(tree: Path) -> None:
    with RealServer(tree, "--body-timeout", 0.5) as server:
        with socket.create_connection(("127.0.0.1", server.port), 20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n\r\n{")
            assert client.recv(4096).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", server.port), 20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n\r\n{")
        assert server.complete("a", 2)["choices"] and "Traceback" not in server.stderr


@pytest.mark.long
def test_a_bundle_is_served_with_its_weights_in_the_archive(demo: Results, tree: Path, tmp_path: Path) -> None:
    target = Target("demo-llama", "fp16", "all", "onnxruntime")
    prompt = GOLDEN.prompts[0]
    bundle = pack(recorded(demo, tmp_path / "recorded"), target, LIMITS, tmp_path / "demo.tar", True)
    options = ("--served-model-name", "other")
    with RealServer(tree, *options, target=str(bundle)) as server:
        assert server.complete(prompt.text, model="other")["choices"][0]["text"] == prompt.expected["all"]
        os.kill(server.engine_pid, signal.SIGKILL)  # the next one finds its files too
        server.wait_until(lambda status: status["restarts"] == 1)
        assert server.complete(prompt.text, model="other")["choices"][0]["text"] == prompt.expected["all"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("demo-llama/fp32/all", "--weights", "a"), "--weights: expected a bundle (.tar) to go with it"),
        (("nowhere.tar",), "nowhere.tar: expected"),
        (("demo-llama/fp32/9",), "target: expected one of demo-llama/fp32/2"),
        (("demo-llama/fp32/all", "--kv-bytes", "1"), "--kv-bytes: expected"),
        (("demo-llama/fp32", "--max-model-len", "9999"), "raise limits.max_seq_len"),
        (("demo-llama/fp32", "--max-num-seqs", "99"), "--max-num-seqs: expected at most"),
        (("demo-llama/fp32/all", "--served-model-name", ""), "--served-model-name: expected a name, found an empty"),
        (("demo-llama/fp32/all", "--host", "256.0.0.1"), "expected an address that is free, found 256.0.0.1:"),
        (("demo-llama/fp32/all", "--api-key-file", "/nowhere"), "/nowhere: expected a file of API keys"),
        (("demo-llama/fp32/all", "--metrics-prefix", "a b"), "--metrics-prefix: expected letters"),
        (("demo-llama/fp32/all", "demo-llama/fp32/2"), "models: expected a name for each, found demo-llama twice"),
        (
            ("demo-llama/fp32/all", "demo-llama/fp32/2", "--served-model-name", "a", "--served-model-name", "a:b"),
            "models: expected a name that is not of another one's adapter, found a:b; give --served-model-name",
        ),
        (
            ("demo-llama/fp32/all", "demo-llama/fp32/2", "--served-model-name", "a", "--served-model-name", "b"),
            "expected the engines of demo-llama/fp32/all/onnxruntime, found another layers: 2, not all",
        ),
    ],
)  # fmt: skip
def test_a_server_that_cannot_start_says_why_in_one_line(tree: Path, arguments: tuple[str, ...], line: str) -> None:
    arguments_given = ("serve", *arguments, "--results", str(tree), "--port", "0")
    ended = call("lockstep", arguments_given, tree, {**os.environ, "COLUMNS": "200"})
    assert ended.returncode == 2 and not ended.stdout
    assert line in ended.stderr and "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.long
def test_a_server_takes_fewer_and_shorter_requests_when_it_is_told_to(tree: Path) -> None:
    with RealServer(tree, "--max-model-len", "24", "--max-num-seqs", "1") as server:
        assert "up to 1 requests of 24 tokens at a time, a KV cache of " in server.line
        status, _, body = server.request("GET", "/status")
        limits = json.loads(body)["limits"]
        assert (status, limits["max_seq_len"], limits["max_input_len"], limits["max_batch_size"]) == (200, 24, 24, 1)
        assert server.complete("a", 4)["choices"]
        status, _, body = server.request("POST", "/v1/completions", {"model": "demo-llama", "prompt": "a " * 40})
        assert status == 400 and b"1 to 23 tokens" in body


@pytest.mark.parametrize("option", ["--stall", "--queue-timeout", "--drain", "--body-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_seconds_are_finite(option: str, value: str) -> None:
    outcome = CliRunner().invoke(serve, ["demo-llama/fp32/all", option, value])
    assert outcome.exit_code == 2 and f"expected a finite number of seconds, found {value}" in outcome.output


def test_a_server_that_is_ended_before_it_is_ready_says_so(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*arguments: Any) -> None:
        raise Ended(signal.SIGTERM)

    monkeypatch.setattr("lockstep_serve.cli.serve.run_server", ended)
    outcome = CliRunner().invoke(serve, ["demo-llama/fp32/all", "--results", str(tree)])
    assert outcome.exit_code == 143 and "ended by SIGTERM before the server was ready\n" in outcome.output


@pytest.mark.long
def test_a_server_may_end_with_the_process_that_holds_its_stdin(tree: Path) -> None:
    with RealServer(tree, "--until-stdin-ends") as server:
        with server.opened(**LONG) as events:
            next(iter(events))
            with server.stopped_engine():
                assert server.process.stdin is not None
                server.process.stdin.close()
                server.wait_until(lambda status: status["draining"])
            events.text()
            assert events.done
        assert server.process.wait(ENDS) == 0
