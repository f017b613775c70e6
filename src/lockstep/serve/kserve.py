"""The KServe v2 protocol over HTTP, as Triton speaks it, with JSON or Triton's binary tensor data."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import lockstep
from lockstep.serve.bodies import Access, BadRequest, decoded, error_response, json_response, read_body
from lockstep.serve.response import TokenResponse
from lockstep.serve.stream import StreamError
from lockstep.serve.tensors import Tensor, check_parameters, from_bytes, from_list, to_bytes, to_list
from lockstep.serve.triton_infer import Inference, InferResponse, Triton
from lockstep.serve.triton_inputs import InferRequest
from lockstep.serve.triton_models import MODELS, VERSION, Model, config, metadata, model_of

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "parameters", "generate", "statistics"]
# What Triton says with each response of an ensemble.
SEQUENCE = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
_HEADER_LENGTH = "Inference-Header-Content-Length"
Handler = Callable[[Request], Awaitable[Any]]


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Body(msgspec.Struct):
    """The body of POST /v2/models/NAME/infer; other fields are ignored."""

    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


def refused(error: StreamError) -> Response:
    """Return the response to a request that is refused, as Triton words it."""
    like = error_response(error)
    headers = {
        name: like.headers[name] for name in ("Retry-After", "Connection", "WWW-Authenticate") if name in like.headers
    }
    return Response(error_json(error.message), like.status_code, headers, "application/json")


def error_json(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


class InferAnswer(TokenResponse):
    """The response of an inference. encode: gives the body and the headers of a response."""

    refuse = staticmethod(refused)

    def __init__(
        self,
        inference: Inference,
        encode: Callable[[InferResponse], tuple[bytes, Mapping[str, str]]],
        events: AsyncIterator[bytes] | None = None,
    ):
        super().__init__(inference.id, inference.stream, events is not None)
        self._inference = inference
        self._encode = encode
        self._events = events

    async def whole(self) -> Response:
        body, headers = self._encode(await self._inference.whole())
        return Response(body, headers=dict(headers))

    def events(self) -> AsyncIterator[bytes]:
        assert self._events is not None
        return self._events

    def close(self) -> None:
        self._inference.close()


def model_routes(route: Callable[..., Route], action: str, handler: Handler, method: str) -> list[Route]:
    """Return the routes to an action on a model, with and without a version."""
    paths = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    return [route(path + action, handler, method, refuse=refused) for path in paths]


def asked_model(request: Request) -> Model:
    """Return the model of a request's path."""
    return model_of(request.path_params["name"], request.path_params.get("version", ""))


def kserve_routes(route: Callable[..., Route], triton: Triton, access: Access) -> list[Route]:
    """Return the protocol's routes; route: makes one of path, handler, method and `refuse`, which words errors."""
    service = triton.service

    def state(holds: bool) -> Response:
        return Response(status_code=200 if holds else 503)

    def telling(answer: Callable[[Request], Any]) -> Handler:
        async def handle(request: Request) -> Any:
            return json_response(answer(request))

        return handle

    async def live(request: Request) -> Any:
        return state(service.is_live)

    async def ready(request: Request) -> Any:
        if "name" in request.path_params:
            asked_model(request)
        return state(service.is_ready and service.is_live)

    def counted(request: Request) -> dict[str, Any]:
        return triton.statistics.of(asked_model(request).name if "name" in request.path_params else None)

    statistics = telling(counted)
    configuration = telling(lambda request: config(asked_model(request), service.ready.max_batch_size))

    async def index(request: Request) -> Any:
        await read_body(request, access)
        return json_response(repository_index(service.is_ready))

    async def infer(request: Request) -> Any:
        asked, in_binary = await _request_of(request, access)
        return InferAnswer(await triton.infer(asked), lambda response: _encoded(asked, response, in_binary))

    async def infer_stream(request: Request) -> Any:
        asked, _ = await _request_of(request, access)
        asked = replace(asked, outputs=None, complete=True)
        inference = await triton.infer(asked)

        def encode(response: InferResponse) -> bytes:
            """Return the JSON of a response, of which the last one is marked as in gRPC."""
            return _encoded(asked, response, parameters={"triton_final_response": response.final})[0]

        events = events_of(inference, inference.in_tokens, encode)
        return InferAnswer(inference, lambda response: _encoded(asked, response), events)

    return [
        route("/v2", telling(lambda request: server_metadata()), refuse=refused),
        route("/v2/health/live", live, refuse=refused),
        route("/v2/health/ready", ready, refuse=refused),
        route("/v2/repository/index", index, "POST", refuse=refused),
        route("/v2/models/stats", statistics, refuse=refused),  # before a model of this name
        *model_routes(route, "/stats", statistics, "GET"),
        *model_routes(route, "", telling(lambda request: metadata(asked_model(request))), "GET"),
        *model_routes(route, "/ready", ready, "GET"),
        *model_routes(route, "/config", configuration, "GET"),
        *model_routes(route, "/infer", infer, "POST"),
        *model_routes(route, "/infer_stream", infer_stream, "POST"),
    ]


def server_metadata() -> dict[str, Any]:
    """Return the answer of GET /v2."""
    return {"name": "lockstep", "version": lockstep.__version__, "extensions": EXTENSIONS}


def repository_index(is_ready: bool) -> list[dict[str, str]]:
    """Return the models, and whether they take requests."""
    given = {"state": "READY"} if is_ready else {"state": "UNAVAILABLE", "reason": "the server starts or ends"}
    return [{"name": name, "version": VERSION, **given} for name in MODELS]


async def _request_of(request: Request, access: Access) -> tuple[InferRequest, Callable[[str], bool]]:
    """Return the inference request, and which of its outputs are to be binary."""
    model = asked_model(request)
    data = await read_body(request, access)
    given = request.headers.get(_HEADER_LENGTH)
    length = len(data)
    if given is not None:
        length = int(given) if given.isdecimal() and len(given) < 12 else -1
    if not 0 <= length <= len(data):
        raise BadRequest(f"{_HEADER_LENGTH}: expected 0 to {len(data)}, the bytes of the body, found {given}")
    body = await decoded(data[:length], _Body)
    inputs, rest = _inputs(body.inputs, memoryview(data)[length:])
    if rest:
        raise BadRequest(f"body: expected its end behind the data of the last input, found {len(rest)} bytes more")
    for output in body.outputs:
        check_parameters(output.name, output.parameters)
    binary = {output.name: output.parameters.get("binary_data") for output in body.outputs}
    default = body.parameters.get("binary_data_output", False)
    names = tuple(binary) or None

    def in_binary(name: str) -> bool:
        chosen = binary.get(name)
        return bool(default if chosen is None else chosen)

    return InferRequest(model, body.id, inputs, names, body.parameters), in_binary


def _inputs(given: Sequence[_Input], rest: memoryview) -> tuple[dict[str, Tensor], memoryview]:
    """Return the tensors by name, and the binary data that belongs to none."""
    found: dict[str, Tensor] = {}
    for each in given:
        name = each.name[:80]
        check_parameters(name, each.parameters)
        if each.name in found:
            raise BadRequest(f"{name}: expected each input once, found it twice", name)
        size = each.parameters.get("binary_data_size")
        if size is None:
            found[each.name] = from_list(each.name, each.datatype, each.shape, [] if each.data is None else each.data)
            continue
        if type(size) is not int or not 0 <= size <= len(rest) or each.data is not None:
            raise BadRequest(
                f"{name}: binary_data_size: expected 0 to {len(rest)}, the bytes that are left, and no data, "
                f"found {str(size)[:20]}",
                name,
            )
        found[each.name] = from_bytes(each.name, each.datatype, each.shape, bytes(rest[:size]))
        rest = rest[size:]
    return found, rest


async def events_of(
    inference: Inference, in_tokens: bool, encode: Callable[[InferResponse], bytes]
) -> AsyncIterator[bytes]:
    """Yield an event for each response; what fails is one too."""
    try:
        async for response in inference.parts(in_tokens):
            yield b"data: " + encode(response) + b"\n\n"
    except StreamError as error:
        yield b"data: " + error_json(error.message) + b"\n\n"


def _encoded(
    request: InferRequest,
    response: InferResponse,
    in_binary: Callable[[str], bool] = lambda name: False,
    parameters: Mapping[str, Any] = {},
) -> tuple[bytes, Mapping[str, str]]:
    outputs: list[dict[str, Any]] = []
    behind = bytearray()
    for tensor in response.outputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if in_binary(tensor.name):
            data = to_bytes(tensor)
            entry["parameters"] = {"binary_data_size": len(data)}
            behind += data
        else:
            entry["data"] = to_list(tensor)
        outputs.append(entry)
    body: dict[str, Any] = {"id": request.id} if request.id else {}
    body |= {"model_name": request.model.name, "model_version": VERSION}
    if said := {**(SEQUENCE if request.model.name == "ensemble" else {}), **parameters}:
        body["parameters"] = said
    head = msgspec.json.encode({**body, "outputs": outputs})
    if not behind:
        return head, {"content-type": "application/json"}
    return head + behind, {"content-type": "application/octet-stream", _HEADER_LENGTH: str(len(head))}
