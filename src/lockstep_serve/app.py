"""The ASGI application: the table of endpoints, and the checks and error responses around them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import lockstep
from lockstep_serve.access import check_access
from lockstep_serve.anthropic import MessagesAnswer, MessagesBody, anthropic_error, limited_messages_chat, messages_chat
from lockstep_serve.blocks import BlockAnswer, rename_param
from lockstep_serve.bodies import Access, BadRequest, decode_body, error_response, json_response, read_body
from lockstep_serve.ended_requests import note, observed
from lockstep_serve.metrics import CONTENT_TYPE
from lockstep_serve.openai import CompletionBody, CompletionFormat, completion_requests
from lockstep_serve.openai_chat import ChatBody, ChatFormat, chat_prompt, chat_requests
from lockstep_serve.openai_parameters import request_id
from lockstep_serve.openapi import Endpoint, openapi
from lockstep_serve.page import page
from lockstep_serve.protocols import OpenProtocol
from lockstep_serve.responses import ResponsesAnswer, ResponsesBody, responses_chat
from lockstep_serve.served_model import ServedModel
from lockstep_serve.service import Service
from lockstep_serve.stream import StreamError
from lockstep_serve.tokenization import DetokenizeBody, TokenizeBody, detokenize, tokenize, tokenizer_info
from lockstep_serve.weight_updates import WeightUpdates

_Body = TypeVar("_Body", bound=Struct)
_WITHOUT_MODEL = ("/update_weights", "/ping")  # what is posted there runs while weights are replaced


class LoadAdapterBody(Struct):
    """The body of POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterBody(Struct):
    """The body of POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: str
    model: str | None = None


class UpdateWeightsBody(Struct):
    """The body of POST /update_weights; path: of a folder, relative to that of --allow-weight-updates."""

    path: str


def application(service: Service, access: Access = Access(), protocols: Sequence[OpenProtocol] = ()) -> ASGIApp:
    """Return a service's ASGI application; protocols: of plug-ins."""
    api = _Api(service, access)
    endpoints = [*api.endpoints, *(endpoint for protocol in protocols for endpoint in protocol.endpoints)]
    api.document = openapi(endpoints, has_keys=bool(access.keys))
    routes = [
        Route(entry.path, _guarded(entry, access, service.weights), methods=entry.methods.split())
        for entry in endpoints
    ]
    errors = _PathErrors(protocols)
    app = Starlette(routes=routes, exception_handlers={HTTPException: errors.no_route, Exception: errors.crashed})
    app.router.redirect_slashes = False  # a client would send its key and its prompt again
    return observed(app, service.observers)


def _guarded(endpoint: Endpoint, access: Access, weights: WeightUpdates) -> Callable[[Request], Awaitable[Any]]:
    """Return an endpoint's handler with access checks before it, and with a response to each exception."""

    async def handle(request: Request) -> Any:
        try:
            check_access(request, access.keys, access.loopback_host)
            if request.method != "POST" or endpoint.path in _WITHOUT_MODEL:
                return await endpoint.handler(request)
            # Requests wait while weights are replaced, and an update waits until they are queued.
            async with weights.entered():
                return await endpoint.handler(request)
        except StreamError as raised:
            error = raised
        except asyncio.CancelledError:  # the server ends before this request is read or tokenized
            error = StreamError("the server is shutting down; try another one", 503, "shutting_down")
        # Without its frames, which hold the whole request: they and the note would be a cycle.
        note(request.scope, error=error.with_traceback(None))
        return endpoint.error_response(error)

    return handle


class _PathErrors:
    """The responses to errors outside of handlers, worded by the protocol that the path belongs to."""

    def __init__(self, protocols: Sequence[OpenProtocol]):
        self._protocols = protocols

    async def no_route(self, request: Request, error: Any) -> Response:
        note(request.scope)
        message = f"{request.method} {request.scope['path'][:80]}: {error.detail}"
        response = self._response(request, BadRequest(message, None, error.status_code))
        # A 405 lists the path's methods in Allow.
        response.headers.update(error.headers or {})
        return response

    async def crashed(self, request: Request, error: Exception) -> Response:
        answer = StreamError("the server failed; its log says why")
        note(request.scope, error=answer)
        return self._response(request, answer)

    def _response(self, request: Request, error: StreamError) -> Response:
        for protocol in self._protocols:
            if f"{request.scope['path']}/".startswith(f"{protocol.prefix}/"):
                return protocol.error_response(error)
        return error_response(error)


class _Api:
    """The handlers of OpenAI's, Anthropic's and vLLM's endpoints, and of the server's own. They raise StreamError."""

    def __init__(self, service: Service, access: Access):
        self._service = service
        self._access = access
        self.document: dict[str, Any] = {}  # OpenAPI's, of all endpoints

    @property
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/v1/completions", self._completions, "POST", CompletionBody),
            Endpoint("/v1/chat/completions", self._chat_completions, "POST", ChatBody),
            Endpoint("/v1/responses", self._responses, "POST", ResponsesBody),
            Endpoint("/v1/messages", self._messages, "POST", MessagesBody, anthropic_error),
            Endpoint("/v1/messages/count_tokens", self._count_tokens, "POST", MessagesBody, anthropic_error),
            Endpoint("/v1/models", self._models),
            Endpoint("/v1/models/{name:path}", self._model),
            Endpoint("/v1/load_lora_adapter", self._load_adapter, "POST", LoadAdapterBody),
            Endpoint("/v1/unload_lora_adapter", self._unload_adapter, "POST", UnloadAdapterBody),
            Endpoint("/update_weights", self._update_weights, "POST", UpdateWeightsBody),
            Endpoint("/tokenize", self._tokenize, "POST", TokenizeBody),
            Endpoint("/detokenize", self._detokenize, "POST", DetokenizeBody),
            Endpoint("/tokenizer_info", self._tokenizer_info),
            Endpoint("/health", self._health),
            Endpoint("/health/live", self._health),
            Endpoint("/health/ready", self._ready),
            Endpoint("/metrics", self._metrics),
            Endpoint("/version", self._version),
            Endpoint("/openapi.json", self._openapi),
            Endpoint("/ping", self._ping, "GET POST"),
            Endpoint("/status", self._status),
            Endpoint("/", self._page),
        ]

    async def _body(self, request: Request, kind: type[_Body]) -> _Body:
        return await decode_body(await read_body(request, self._access), kind)

    async def _completions(self, request: Request) -> Any:
        body = await self._body(request, CompletionBody)
        model = self._service.model(body.model)
        id = request_id(body, request.headers.get("x-request-id"))
        stream = self._service.submit(await completion_requests(body, model), model)
        return CompletionFormat(body, model, stream, id)

    async def _chat_completions(self, request: Request) -> Any:
        body = await self._body(request, ChatBody)
        model = self._service.model(body.model)
        id = request_id(body, request.headers.get("x-request-id"))
        stream = self._service.submit(await chat_requests(body, model), model)
        return ChatFormat(body, model, stream, id)

    async def _responses(self, request: Request) -> Any:
        body = await self._body(request, ResponsesBody)
        return await self._block_answer(request, body, responses_chat(body), ResponsesAnswer)

    async def _messages(self, request: Request) -> Any:
        body = await self._body(request, MessagesBody)
        return await self._block_answer(request, body, limited_messages_chat(body), MessagesAnswer)

    async def _block_answer(
        self, request: Request, body: Any, chat: ChatBody, answer: Callable[..., BlockAnswer]
    ) -> BlockAnswer:
        id = request_id(chat, request.headers.get("x-request-id"))
        model = self._service.model(chat.model)
        try:
            stream = self._service.submit(await chat_requests(chat, model), model)
        except BadRequest as error:
            raise rename_param(error, body.NAMES) from None
        return answer(body, chat, model, stream, id)

    async def _count_tokens(self, request: Request) -> Any:
        body = await self._body(request, MessagesBody)
        try:
            _, _, ids = await chat_prompt(messages_chat(body), self._service.model(body.model))
        except BadRequest as error:
            raise rename_param(error, body.NAMES) from None
        return json_response({"input_tokens": len(ids)})

    async def _models(self, request: Request) -> Any:
        cards = []
        for model in self._service.opened_models:
            cards += [self._card(model, name) for name in model.adapters.model_names]
        return json_response({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Any:
        name = request.path_params["name"]
        return json_response(self._card(self._service.model(name), name))

    def _card(self, model: ServedModel, name: str) -> dict[str, Any]:
        """Return a model's entry of /v1/models; an adapter's has its model as `parent`."""
        adapter = model.adapters.resolve(name)
        card = {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "lockstep",
            "max_model_len": model.ready.max_seq_len,
            "root": model.ready.identity,
        }
        if adapter is not None:
            card |= {"root": model.adapters.digest(adapter), "parent": model.name}
        return card

    async def _load_adapter(self, request: Request) -> Any:
        body = await self._body(request, LoadAdapterBody)
        await self._service.model(body.model).adapters.load(body.lora_name, body.lora_path)
        # The same words as vLLM's.
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    async def _unload_adapter(self, request: Request) -> Any:
        body = await self._body(request, UnloadAdapterBody)
        self._service.model(body.model).adapters.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    async def _update_weights(self, request: Request) -> Any:
        body = await self._body(request, UpdateWeightsBody)
        await self._service.weights.update(body.path)
        return json_response(_weights(self._service))

    async def _tokenize(self, request: Request) -> Any:
        body = await self._body(request, TokenizeBody)
        return Response(await tokenize(body, self._service.model(body.model)), media_type="application/json")

    async def _detokenize(self, request: Request) -> Any:
        body = await self._body(request, DetokenizeBody)
        return Response(await detokenize(body, self._service.model(body.model)), media_type="application/json")

    async def _tokenizer_info(self, request: Request) -> Any:
        return json_response(tokenizer_info(self._service.model(request.query_params.get("model"))))

    async def _health(self, request: Request) -> Any:
        return json_response(_health(self._service), _status_code(self._service.is_live))

    async def _ready(self, request: Request) -> Any:
        is_ready = self._service.is_ready and self._service.is_live
        return json_response(_health(self._service), _status_code(is_ready))

    async def _metrics(self, request: Request) -> Any:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def _version(self, request: Request) -> Any:
        return json_response({"version": lockstep.__version__})

    async def _openapi(self, request: Request) -> Any:
        return json_response(self.document)

    async def _ping(self, request: Request) -> Any:
        return Response(status_code=_status_code(self._service.is_live))

    async def _status(self, request: Request) -> Any:
        return json_response(_status(self._service))

    async def _page(self, request: Request) -> Any:
        content, headers = page()
        return Response(content, headers=headers)


def _status_code(is_healthy: bool) -> int:
    return 200 if is_healthy else 503


def _weights(service: Service) -> dict[str, Any]:
    weights = service.weights
    return {
        "weights_version": weights.version,
        "system_fingerprint": service.ready.identity[:12],
        "folder": weights.folder and str(weights.folder),
        "checked": weights.folder is None,
        "updating": weights.updating,
    }


def _health(service: Service) -> dict[str, Any]:
    age = service.heartbeat_age
    if age is not None:
        age = round(age, 3)
    return {
        "live": service.is_live,
        "ready": service.is_ready,
        "draining": service.draining,
        "warm": service.counters.is_warm,
        "heartbeat_age": age,
        "restarts": service.restarts,
    }


def _status(service: Service) -> dict[str, Any]:
    ready = service.ready
    counters = service.counters
    names = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "chunk_size")
    lost_adapters = {}
    for model in service.models.values():
        for name, reason in model.adapters.lost.items():
            lost_adapters[f"{model.name}:{name}"] = reason
    return {
        "model": service.name,
        "identity": ready.identity,
        "backend": ready.backend,
        "limits": {name: getattr(ready, name) for name in names},
        "running": counters.running,
        "waiting": counters.waiting,
        "pages": {"total": ready.num_pages, "used": counters.used_pages, "cached": counters.cached_pages},
        "streams": len(service.streams),
        "chat": service.default.chat.fault is None,
        "weights": _weights(service),
        "step_sizes": ready.step_sizes,
        "lost_adapters": lost_adapters,
        **_health(service),
    }
