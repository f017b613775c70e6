"""OpenTelemetry traces: a span for each request for tokens, sent over OTLP/HTTP.

Attributes are those of OpenTelemetry's conventions for generative AI; times beyond these have vLLM's names. No texts.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import lockstep
from lockstep.errors import InputError
from lockstep.runtime.request import adapter_of, split_adapter
from lockstep_serve.ended_requests import EndedRequest
from lockstep_serve.log import log

_PATH = "/v1/traces"
_SECONDS = 2.0  # for the last spans when the server ends
_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


class _FirstWarning(logging.Handler):
    """Prints the exporter's first warning on one line; by itself it logs one, or a traceback, for every batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(f"traces: spans are lost: {' '.join(record.getMessage().split())[:300]}")


class Traces:
    """The spans of a server. Close it at the end."""

    def __init__(self, endpoint: str, model: str):
        """Begin to send to `endpoint`/v1/traces; model: in the spans. Raises InputError for another text than a URL."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                f"--otlp-traces-endpoint: expected a URL such as http://localhost:4318, found {endpoint!r}"
            )
        logger = logging.getLogger("opentelemetry")
        logger.handlers = [_FirstWarning()]
        logger.propagate = False
        url = endpoint.rstrip("/").removesuffix(_PATH) + _PATH
        resource = Resource({"service.name": "lockstep", "service.version": lockstep.__version__})
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence. `close` ends it, with a limit of time.
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("lockstep", lockstep.__version__)
        self._model = model

    def add(self, ended: EndedRequest) -> None:
        """Add the span of a request for tokens, a child of the one in its `traceparent` header."""
        path = ended.endpoint.rpartition(" ")[2]
        if ended.stream is None and path not in (*_CHATS, "/v1/completions"):
            return
        end = time.time_ns()
        operation = "chat" if path in _CHATS else "text_completion"
        attributes = {"gen_ai.operation.name": operation, **self._attributes(ended)}
        span = self._tracer.start_span(
            f"{operation} {attributes['gen_ai.request.model']}",
            TraceContextTextMapPropagator().extract(ended.headers),
            SpanKind.SERVER,
            {name: value for name, value in attributes.items() if value is not None},
            start_time=end - round(1e9 * (time.monotonic() - ended.began)),
        )
        if ended.error_code or ended.status >= 400:
            span.set_attribute("error.type", ended.error_code or str(ended.status))
            if not 400 <= ended.status < 500:  # the fault is the server's
                span.set_status(StatusCode.ERROR)
        span.end(end)

    def _attributes(self, ended: EndedRequest) -> dict[str, Any]:
        figures = ended.figures()
        request = ended.stream and ended.stream.prompts[0].request
        model = ended.model(self._model)
        if request and request.adapter:
            _, adapter = split_adapter(request.adapter)
            model = adapter_of(model, adapter)
        first_chunk_seconds = figures["ttft_seconds"] if ended.in_chunks else None
        return {
            "gen_ai.provider.name": "lockstep",
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": figures["n"],
            "gen_ai.request.stream": ended.in_chunks,
            "gen_ai.request.max_tokens": request and request.max_new_tokens,
            "gen_ai.request.temperature": request and request.sampling.temperature,
            "gen_ai.request.top_p": request and request.sampling.top_p,
            "gen_ai.response.id": ended.id or None,
            "gen_ai.response.model": request and model,
            "gen_ai.response.finish_reasons": figures["finish_reasons"] or None,
            "gen_ai.response.time_to_first_chunk": first_chunk_seconds,
            "gen_ai.usage.input_tokens": figures["prompt_tokens"],
            "gen_ai.usage.output_tokens": figures["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": ended.stream and ended.stream.num_cached_tokens,
            "gen_ai.latency.time_in_queue": figures["queue_seconds"],
            "gen_ai.latency.time_to_first_token": figures["ttft_seconds"],
            "http.response.status_code": ended.status,
            "url.path": ended.endpoint.rpartition(" ")[2],
        }

    def close(self) -> None:
        """Send the waiting spans, for at most `_SECONDS`."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_SECONDS)
