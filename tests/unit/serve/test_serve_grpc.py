"""Triton's gRPC API on `lockstep serve`, the real one, and damaged messages that no client library would send.

Triton's own client library: `make clients-test`.
"""

from __future__ import annotations

import contextlib
import queue
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep.targets import Results
from real_server import ENDS, RealServer, make_tree

grpc = pytest.importorskip("grpc")
from lockstep_serve.triton.grpc_messages import MESSAGES, SERVICE  # noqa: E402


@pytest.fixture(scope="module")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    tree = make_tree(tmp_path_factory.mktemp("grpc") / "results", demo)
    with RealServer(tree, "--grpc-port", 0, "--max-body", "1M") as server:
        yield server


def grpc_port(server: RealServer) -> int:
    match = re.search(r"gRPC at 127\.0\.0\.1:(\d+)$", server.line.strip())
    assert match, server.line
    return int(match[1])


class Caller:
    """A gRPC client without any library of Triton's."""

    def __init__(self, server: RealServer, *metadata: tuple[str, str], port: int | None = None):
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port or grpc_port(server)}")
        self._metadata = metadata

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def call(self, name: str, request: Any = None) -> Any:
        """The response of a method. request: a message, or bytes that may be none."""
        return self.future(name, request).result()

    def future(self, name: str, request: Any = None) -> Any:
        """A call that is under way."""
        method = self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=MESSAGES[f"{name}Response"].FromString,
        )
        message = MESSAGES[f"{name}Request"]() if request is None else request
        return method.future(message, metadata=self._metadata, timeout=60)

    def stream(self, requests: Any) -> Any:
        """The call of ModelStreamInfer: iterate to get its responses."""
        method = self._channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=MESSAGES["ModelInferRequest"].SerializeToString,
            response_deserializer=MESSAGES["ModelStreamInferResponse"].FromString,
        )
        return method(requests, metadata=self._metadata, timeout=60)

    def refused(self, name: str, request: Any) -> tuple[str, str]:
        """Code and message of a call that must fail."""
        with pytest.raises(grpc.RpcError) as raised:
            self.call(name, request)
        return raised.value.code().name, raised.value.details()


@pytest.fixture
def caller(server: RealServer) -> Iterator[Caller]:
    with Caller(server) as caller:
        yield caller


def core(*ids: int, num_tokens: int = 4, **options: Any) -> Any:
    """A request to tensorrt_llm, its values in `contents`."""
    request = MESSAGES["ModelInferRequest"](model_name="tensorrt_llm", **options)
    for name, values in (("input_ids", ids), ("input_lengths", [len(ids)]), ("request_output_len", [num_tokens])):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[1, len(values)])
        tensor.contents.int_contents.extend(values)
    tensor = request.inputs.add(name="end_id", datatype="INT32", shape=[1, 1])
    tensor.contents.int_contents.append(-1)
    return request


def long(id: str, num_tokens: int = 240) -> Any:
    """A request for a stream of tokens."""
    request = core(5, 6, 7, num_tokens=num_tokens, id=id)
    request.inputs.add(name="streaming", datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(True)
    return request


def raw(request: Any) -> Any:
    """The same, its values raw."""
    message = MESSAGES["ModelInferRequest"].FromString(request.SerializeToString())
    for tensor in message.inputs:
        values = list(tensor.contents.int_contents)
        message.raw_input_contents.append(b"".join(value.to_bytes(4, "little", signed=True) for value in values))
        tensor.ClearField("contents")
    return message


def test_statistics_are_those_of_http_and_grpc_writes_no_lines(server: RealServer, caller: Caller) -> None:
    caller.call("ModelInfer", core(5, 6, 7))
    actual = caller.call("ModelStatistics", MESSAGES["ModelStatisticsRequest"](name="tensorrt_llm")).model_stats
    (expected,) = server.get("/v2/models/tensorrt_llm/stats")["model_stats"]
    assert len(actual) == 1 and actual[0].execution_count == expected["execution_count"] > 0
    assert actual[0].inference_stats.success.ns == expected["inference_stats"]["success"]["ns"] > 0
    assert len(caller.call("ModelStatistics", MESSAGES["ModelStatisticsRequest"]()).model_stats) == 6
    assert not server.stderr


def test_values_in_contents_and_raw_are_the_same(caller: Caller) -> None:
    answers = [caller.call("ModelInfer", request) for request in (core(5, 6, 7, id="1"), raw(core(5, 6, 7, id="1")))]
    assert answers[0] == answers[1]
    assert answers[0].id == "1" and answers[0].model_name == "tensorrt_llm" and answers[0].model_version == "1"
    assert [output.name for output in answers[0].outputs] == ["output_ids", "sequence_length"]
    assert list(answers[0].outputs[0].shape) == [1, 1, 7] and len(answers[0].raw_output_contents[0]) == 28


class Proxy:
    """Hands bytes on between a client and a server; of answers at most `rate` a second, or none any more for 0."""

    def __init__(self, port: int, rate: int):
        self.rate = rate
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._server = socket.socket()
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._server.connect(("127.0.0.1", port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listening.accept()
        threading.Thread(target=self._send, args=(client,), daemon=True).start()
        with contextlib.suppress(OSError):
            while self.rate and (data := self._server.recv(self.rate // 20)):
                client.sendall(data)
                time.sleep(0.05)

    def _send(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                self._server.sendall(data)


@pytest.fixture(scope="module")
def impatient(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One that ends a connection whose client takes nothing for 3 s."""
    tree = make_tree(tmp_path_factory.mktemp("impatient") / "results", demo)
    with RealServer(tree, "--grpc-port", 0, "--slow-reader", 3) as server:
        yield server


def test_a_client_that_reads_nothing_is_ended_and_one_that_reads_slowly_is_not(impatient: RealServer) -> None:
    """Also where it waits for whole answers, which are no stream of this server's."""
    num_sockets = impatient.num_sockets()
    proxy = Proxy(grpc_port(impatient), 100_000)
    with Caller(impatient, port=proxy.port) as caller:
        config = MESSAGES["ModelConfigRequest"](name="ensemble")
        began = time.monotonic()
        while time.monotonic() < began + 6:  # longer than it may be silent
            calls = [caller.future("ModelConfig", config) for _ in range(50)]
            assert all(call.result() for call in calls)
        assert impatient.num_sockets() > num_sockets
        proxy.rate = 0
        calls = [caller.future("ModelConfig", config) for _ in range(50)]
        end = time.monotonic() + ENDS
        while impatient.num_sockets() > num_sockets:
            assert time.monotonic() < end
            time.sleep(0.05)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def withholding(port: int, name: str, request: Any) -> socket.socket:
    """A client that asks for one answer, whose flow-control window is 0."""
    fields = (":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{name}"), (":authority", "a")
    fields += ("content-type", "application/grpc"), ("te", "trailers")
    head = b""
    for field, value in fields:
        head += b"\0" + bytes([len(field)]) + field.encode() + bytes([len(value)]) + value.encode()
    message = request.SerializeToString()
    end = socket.create_connection(("127.0.0.1", port))
    end.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, 0)))
    end.sendall(frame(1, 4, 1, head) + frame(0, 1, 1, b"\0" + struct.pack(">I", len(message)) + message))
    return end


def test_clients_that_answer_pings_and_take_no_whole_answer_are_ended(impatient: RealServer) -> None:
    requests = {"ModelInfer": core(5, 6, 7), "ServerLive": MESSAGES["ServerLiveRequest"]()}  # the latter without a key
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(withholding(grpc_port(impatient), *call)) for call in requests.items()]
        num_pings = 0
        open_ends = set(ends)
        until = time.monotonic() + ENDS
        while open_ends:
            assert time.monotonic() < until
            for end in select.select(list(open_ends), [], [], 1)[0]:
                data = end.recv(1 << 16)
                if not data:
                    open_ends.discard(end)
                while len(data) >= 9:
                    length = int.from_bytes(data[:3], "big")
                    if data[3] == 6 and not data[4]:
                        num_pings += 1
                        with contextlib.suppress(OSError):
                            end.sendall(frame(6, 1, 0, data[9 : 9 + length]))
                    data = data[9 + length :]
        assert num_pings > len(ends)
        with Caller(impatient) as caller:
            assert caller.call("ServerLive", requests["ServerLive"]).live


def damaged() -> Iterator[tuple[str, Any, str, str]]:
    """A name, a message, and code and a part of the message of its refusal."""
    bad = "INVALID_ARGUMENT"
    yield "another model", core(5, model_version="3"), "NOT_FOUND", "version"
    request = raw(core(5, 6, 7))
    request.raw_input_contents.pop()
    yield "too few raw contents", request, bad, "raw_input_contents"
    request = raw(core(5, 6, 7))
    request.raw_input_contents[0] += b"\0"
    yield "a byte too many", request, bad, "input_ids"
    request = raw(core(5, 6, 7))
    request.inputs[0].contents.int_contents.append(5)
    yield "contents and raw ones", request, bad, "raw_input_contents"
    request = core(5, 6, 7)
    request.inputs[0].shape[1] = 1 << 40
    yield "a shape that lies", request, bad, "input_ids"
    request = core(5, 6, 7)
    request.inputs[0].datatype = "INT64"
    yield "contents of another datatype", request, bad, "input_ids"
    request = core(5, 6, 7)
    request.inputs[0].ClearField("contents")
    yield "no contents", request, bad, "input_ids"
    request = core(5, 6, 7)
    request.inputs[0].parameters["shared_memory_region"].string_param = "a"
    yield "shared memory", request, bad, "shared_memory_region"
    request = core(5, 6, 7)
    request.inputs.add().CopyFrom(request.inputs[0])
    yield "an input twice", request, bad, "twice"
    request = core(5, 6, 7)
    request.outputs.add(name="unheard_of")
    yield "an output that is none", request, bad, "unheard_of"
    yield "bytes that are no message", b"\xff\xff\xff", bad, "ModelInferRequest"
    request = core(5, 6, 7, id="a" * (1 << 20))
    yield "a message over the limit", request, "RESOURCE_EXHAUSTED", ""


@pytest.mark.parametrize("case", list(damaged()), ids=lambda case: case[0].replace(" ", "-"))
def test_damaged_messages_are_refused(server: RealServer, caller: Caller, case: tuple[str, Any, str, str]) -> None:
    _, request, code, part = case
    actual, message = caller.refused("ModelInfer", request)
    assert actual == code and part in message, (actual, message)
    assert len(caller.call("ModelInfer", core(5, 6, 7)).outputs) == 2 and "Traceback" not in server.stderr


def test_metadata_over_the_limit_is_refused(server: RealServer) -> None:
    with Caller(server, ("long", "a" * (1 << 20))) as caller:
        assert caller.refused("ServerLive", MESSAGES["ServerLiveRequest"]())[0] == "RESOURCE_EXHAUSTED"


def test_a_stop_request_ends_the_one_with_its_id(server: RealServer, caller: Caller) -> None:
    requests: queue.Queue[Any] = queue.Queue()
    answers = caller.stream(iter(requests.get, None))
    requests.put(long("42"))
    assert next(answers).infer_response.id == "42"
    for id in ("other", "42"):
        stop = core(0, num_tokens=0, id=id)
        stop.inputs.add(name="stop", datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(True)
        requests.put(stop)
    requests.put(None)
    responses = [answer.infer_response for answer in answers]
    finals = [answer for answer in responses if answer.parameters["triton_final_response"].bool_param]
    assert sorted((final.id, len(final.outputs)) for final in finals) == [("42", 0), ("42", 2), ("other", 0)]
    assert sum(answer.outputs[0].shape[2] for answer in responses if answer.outputs) < 239
    server.wait_idle()


def test_keys_and_a_full_queue_and_the_end(demo: Results, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    tree = make_tree(tmp_path / "results", demo, max_batch_size=1)
    options = ("--grpc-port", 0, "--api-key-file", tmp_path / "keys", "--max-queue", 0, "--fold-token-ids")
    far = 768 << 20  # a multiple of the size of the vocabulary
    with RealServer(tree, *options) as server, Caller(server, ("authorization", "Bearer secret")) as caller:
        for other in (Caller(server), Caller(server, ("authorization", "Bearer other"))):
            with other:
                assert other.call("ServerLive").live and other.call("ServerReady").ready
                for name in ("ServerMetadata", "ModelInfer"):
                    request = core(5, 6, 7) if name == "ModelInfer" else MESSAGES[f"{name}Request"]()
                    assert other.refused(name, request)[0] == "UNAUTHENTICATED"
                with pytest.raises(grpc.RpcError) as raised:
                    next(other.stream(iter([core(5)])))
                assert raised.value.code().name == "UNAUTHENTICATED"

        def code(_: int) -> str:
            try:
                caller.call("ModelInfer", core(5, 6, 7, num_tokens=240))
            except grpc.RpcError as error:
                assert int(dict(error.trailing_metadata())["retry-after"]) >= 1
                return error.code().name
            return "OK"

        with ThreadPoolExecutor(6) as threads:
            assert set(threads.map(code, range(6))) == {"OK", "RESOURCE_EXHAUSTED"}

        folded = [caller.call("ModelInfer", core(5, token, 7)).raw_output_contents[0][12:] for token in (6, 6 + far)]
        assert folded[0] == folded[1]

        requests: queue.Queue[Any] = queue.Queue()
        answers = caller.stream(iter(requests.get, None))
        requests.put(long("a"))
        first = next(answers)
        with server.stopped_engine():  # the stream is not at its end before the others are rejected
            server.process.send_signal(signal.SIGTERM)
            while caller.call("ServerReady").ready:
                pass
            assert caller.refused("ModelInfer", core(5))[0] == "UNAVAILABLE"
        requests.put(None)
        responses = [answer.infer_response for answer in answers]
        assert first.infer_response.id == "a" and responses[-1].parameters["triton_final_response"].bool_param
        lengths = [list(item.outputs[0].shape)[2] for item in (first.infer_response, *responses)]
        assert sum(lengths) == 240  # what ran is finished
        assert server.process.wait(ENDS) == 0


def test_a_port_that_is_taken_is_an_error_of_one_line(server: RealServer, demo: Results, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "results", demo)
    command = [sys.executable, "-m", "lockstep", "serve", "demo-llama/fp32/all", "--results", tree, "--port", 0]
    process = subprocess.run(
        [*map(str, command), "--grpc-port", str(grpc_port(server))], capture_output=True, text=True, timeout=60
    )
    assert process.returncode != 0 and "--grpc-port: expected an address that is free" in process.stderr
    assert "Traceback" not in process.stderr
