"""`lockstep serve --otlp-traces-endpoint`: a span for each request, by a receiver of OTLP; a receiver that is gone."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.targets import Results
from real_server import ENDS, RealServer, make_tree

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
PROMPT = "Once upon a time"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_SERVICE_NAME": "of the test"}


class Receiver(ThreadingHTTPServer):
    """A receiver of OTLP over HTTP; spans come with attributes as a dict."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: queue.Queue[tuple[Any, dict[str, Any], dict[str, Any]]] = queue.Queue()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def span(self) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return the next span, its attributes and those of its resource."""
        return self.spans.get(timeout=ENDS)


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        export = trace_service.ExportTraceServiceRequest.FromString(
            self.rfile.read(int(self.headers["content-length"]))
        )
        for resource in export.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.server.spans.put((span, values(span.attributes), values(resource.resource.attributes)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def values(attributes: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        return [value(item) for item in of.array_value.values] if kind == "array_value" else getattr(of, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


@pytest.fixture(scope="module")
def tree(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("traces") / "results", demo)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        receiver.shutdown()


@pytest.fixture(scope="module")
def server(tree: Path, receiver: Receiver) -> Iterator[RealServer]:
    with RealServer(tree, "--grpc-port", 0, "--otlp-traces-endpoint", receiver.url, **SOON) as server:
        yield server


def test_a_stream_has_a_span_below_the_one_that_the_client_names(server: RealServer, receiver: Receiver) -> None:
    began = time.time_ns()
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.5, "ignore_eos": True, "stream": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    assert server.request("POST", "/v1/completions", {"model": "demo-llama", **body}, headers)[0] == 200
    span, attributes, resource = receiver.span()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind) == ("text_completion demo-llama", span.SPAN_KIND_SERVER)
    assert began <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    assert resource["service.name"] == "of the test"
    exact = {
        "operation.name": "text_completion", "provider.name": "lockstep", "request.model": "demo-llama",
        "response.model": "demo-llama", "usage.output_tokens": 5, "response.finish_reasons": ["length"],
        "request.max_tokens": 5, "request.temperature": 0.5, "request.stream": True, "usage.cache_read.input_tokens": 0,
    }  # fmt: skip
    assert {name: attributes[f"gen_ai.{name}"] for name in exact} == exact
    assert attributes["gen_ai.usage.input_tokens"] > 1 and attributes["gen_ai.response.id"].startswith("cmpl-")
    first = attributes["gen_ai.response.time_to_first_chunk"]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 < attributes["gen_ai.latency.time_in_queue"] <= first < seconds
    assert not [value for value in attributes.values() if isinstance(value, str) and PROMPT in value]


def test_each_front_end_has_one_and_a_refusal_its_error(server: RealServer, receiver: Receiver) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    server.request("POST", "/v1/chat/completions", chat)
    span, attributes, _ = receiver.span()
    assert (span.name, span.parent_span_id) == ("chat demo-llama", b"") and span.trace_id.hex() != TRACE
    assert attributes["gen_ai.usage.output_tokens"] == 3 and "gen_ai.response.time_to_first_chunk" not in attributes

    server.request("POST", "/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 4, "id": "mine"})
    _, attributes, _ = receiver.span()
    assert (attributes["gen_ai.response.id"], attributes["url.path"]) == ("mine", "/v2/models/ensemble/generate")

    server.request("GET", "/nothing")  # has no span: it asks for no tokens
    server.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": -2})
    span, attributes, _ = receiver.span()
    assert attributes["http.response.status_code"] == 400 and attributes["error.type"]
    assert "gen_ai.usage.output_tokens" not in attributes and span.status.code == span.status.STATUS_CODE_UNSET


def test_a_request_over_grpc_has_one_too(server: RealServer, receiver: Receiver) -> None:
    grpc = pytest.importorskip("grpc")
    from lockstep_serve.triton.grpc_messages import MESSAGES, SERVICE

    request = MESSAGES["ModelInferRequest"](model_name="ensemble", id="over grpc")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"Hello")
    request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(3)
    with grpc.insecure_channel(server.line.split()[-1]) as channel:
        method = channel.unary_unary(f"/{SERVICE}/ModelInfer", lambda message: message.SerializeToString())
        method(request, metadata=[("traceparent", f"00-{TRACE}-{PARENT}-01")], timeout=30)
    span, attributes, _ = receiver.span()
    assert span.parent_span_id.hex() == PARENT and attributes["gen_ai.response.id"] == "over grpc"
    assert attributes["gen_ai.usage.output_tokens"] == 3


@pytest.mark.long
def test_a_receiver_that_is_not_there_ends_nothing_and_is_said_once(tree: Path) -> None:
    """The variable of all programs that send traces names it. Nothing listens at port 1."""
    gone = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
    with RealServer(tree, **SOON, **gone) as server:
        for _ in range(3):
            server.complete("a", 2)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)  # 2 s for the last spans, which the exporter would try to send for half a minute
    assert server.stderr.count("lockstep: warning: traces: spans are lost: ") == server.stderr.count("\n") == 1, (
        server.stderr
    )


def refused(tree: Path, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo-llama/fp32/all", "--results", str(tree), "--otlp-traces-endpoint", url])
    output = capsys.readouterr().err
    assert ended.value.code == 2 and output.count("\n") == 1
    return output


def test_a_wrong_url_and_a_missing_package_are_told_in_one_line(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "expected a URL such as http://localhost:4318, found 'localhost:4318'" in refused(
        tree, "localhost:4318", capsys
    )
    for name in [name for name in sys.modules if name.startswith(("lockstep_serve.traces", "opentelemetry"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert 'pip install ".[otel]"' in refused(tree, "http://127.0.0.1:1", capsys)
