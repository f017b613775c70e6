"""The KServe v2 protocol over HTTP, as Triton speaks it, with JSON or Triton's binary tensor data."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import lockstep
from lockstep_serve.bodies import Access, BadRequest, decode_body, error_response, json_response, read_body
from lockstep_serve.openapi import Endpoint
from lockstep_serve.response import TokenResponse
from lockstep_serve.stream import StreamError
from lockstep_serve.triton.infer import Inference, InferResponse, Triton
from lockstep_serve.triton.inputs import InferRequest
from lockstep_serve.triton.models import VERSION, Model, config, metadata, model_of
from lockstep_serve.triton.tensors import Tensor, check_parameters, from_bytes, from_list, to_bytes, to_list

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


def triton_error(error: StreamError) -> Response:
    """Return the response to a request that failed before any answer, with Triton's body and OpenAI's headers."""
    return error_response(error, error_json(error.message))


def error_json(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


class InferAnswer(TokenResponse):
    """The answer to an inference. encode: returns the body and the headers of a response."""

    error_response = staticmethod(triton_error)

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

    async def full_response(self) -> Response:
        body, headers = self._encode(await self._inference.full_response())
        return Response(body, headers=dict(headers))

    def events(self) -> AsyncIterator[bytes]:
        assert self._events is not None
        return self._events

    def close(self) -> None:
        self._inference.close()


def model_endpoints(action: str, handler: Handler, method: str = "GET") -> list[Endpoint]:
    """Return the endpoints of an action on a model, with and without a version."""
    paths = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    return [Endpoint(path + action, handler, method, error_response=triton_error) for path in paths]


def path_model(triton: Triton, request: Request) -> Model:
    return model_of(triton.models, request.path_params["name"], request.path_params.get("version", ""))


def kserve_endpoints(triton: Triton, access: Access) -> list[Endpoint]:
    return _Kserve(triton, access).endpoints()


class _Kserve:
    """The handlers of the protocol. They raise StreamError."""

    def __init__(self, triton: Triton, access: Access):
        self._triton = triton
        self._service = triton.service
        self._access = access

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/v2", self._server_metadata, error_response=triton_error),
            Endpoint("/v2/health/live", self._live, error_response=triton_error),
            Endpoint("/v2/health/ready", self._ready, error_response=triton_error),
            Endpoint("/v2/repository/index", self._index, "POST", error_response=triton_error),
            # Before the paths of models, as "stats" could be the name of one.
            Endpoint("/v2/models/stats", self._all_statistics, error_response=triton_error),
            *model_endpoints("/stats", self._statistics),
            *model_endpoints("", self._metadata),
            *model_endpoints("/ready", self._model_ready),
            *model_endpoints("/config", self._config),
            *model_endpoints("/infer", self._infer, "POST"),
            *model_endpoints("/infer_stream", self._infer_stream, "POST"),
        ]

    async def _server_metadata(self, request: Request) -> Any:
        return json_response(server_metadata())

    async def _live(self, request: Request) -> Any:
        return _state(self._service.is_live)

    async def _ready(self, request: Request) -> Any:
        return _state(self._service.is_ready and self._service.is_live)

    async def _index(self, request: Request) -> Any:
        await read_body(request, self._access)
        return json_response(repository_index(self._triton.models, self._service.is_ready))

    async def _all_statistics(self, request: Request) -> Any:
        return json_response(self._triton.statistics.of(self._triton.models))

    async def _statistics(self, request: Request) -> Any:
        return json_response(self._triton.statistics.of([path_model(self._triton, request).name]))

    async def _metadata(self, request: Request) -> Any:
        return json_response(metadata(path_model(self._triton, request)))

    async def _model_ready(self, request: Request) -> Any:
        path_model(self._triton, request)
        return await self._ready(request)

    async def _config(self, request: Request) -> Any:
        return json_response(config(path_model(self._triton, request), self._service.ready.max_batch_size))

    async def _infer(self, request: Request) -> Any:
        infer_request, is_binary = await _infer_request(request, path_model(self._triton, request), self._access)
        inference = await self._triton.infer(infer_request)
        return InferAnswer(inference, lambda response: _encode(infer_request, response, is_binary))

    async def _infer_stream(self, request: Request) -> Any:
        infer_request, _ = await _infer_request(request, path_model(self._triton, request), self._access)
        # All outputs in each event: Triton's Python model, the client, selects those of its config.pbtxt.
        infer_request = replace(infer_request, outputs=None, complete=True)
        inference = await self._triton.infer(infer_request)

        def encode_event(response: InferResponse) -> bytes:
            # The last response is marked as in gRPC.
            return _encode(infer_request, response, parameters={"triton_final_response": response.final})[0]

        events = events_of(inference, inference.in_tokens, encode_event)
        return InferAnswer(inference, lambda response: _encode(infer_request, response), events)


def _state(is_ok: bool) -> Response:
    if is_ok:
        return Response()
    return Response(status_code=503)


def server_metadata() -> dict[str, Any]:
    """Return the answer of GET /v2."""
    return {"name": "lockstep", "version": lockstep.__version__, "extensions": EXTENSIONS}


def repository_index(models: Iterable[str], is_ready: bool) -> list[dict[str, str]]:
    """Return the models, and whether they take requests."""
    state = {"state": "READY"}
    if not is_ready:
        state = {"state": "UNAVAILABLE", "reason": "the server starts or ends"}
    return [{"name": name, "version": VERSION, **state} for name in models]


async def _infer_request(request: Request, model: Model, access: Access) -> tuple[InferRequest, Callable[[str], bool]]:
    """Return the inference request, and which of its outputs are to be binary."""
    data = await read_body(request, access)
    header = request.headers.get(_HEADER_LENGTH)
    length = len(data)
    if header is not None:
        # Limit the length first: int() is slow for long texts, and raises another error for very long ones.
        is_number = header.isdecimal() and len(header) < 12
        if not is_number or int(header) > length:
            raise BadRequest(f"{_HEADER_LENGTH}: expected 0 to {len(data)}, the bytes of the body, found {header}")
        length = int(header)
    body = await decode_body(data[:length], _Body)
    inputs, unread = _inputs(body.inputs, memoryview(data)[length:])
    if unread:
        raise BadRequest(f"body: expected its end after the data of the last input, found {len(unread)} bytes more")
    for output in body.outputs:
        check_parameters(output.name, output.parameters)
    binary = {output.name: output.parameters.get("binary_data") for output in body.outputs}
    default = body.parameters.get("binary_data_output", False)

    def is_binary(name: str) -> bool:
        choice = binary.get(name)
        return bool(default) if choice is None else bool(choice)

    return InferRequest(model, body.id, inputs, tuple(binary) or None, body.parameters), is_binary


def _inputs(entries: Sequence[_Input], data: memoryview) -> tuple[dict[str, Tensor], memoryview]:
    """Return the named tensors, and the binary data that belongs to none."""
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        name = entry.name[:80]
        check_parameters(name, entry.parameters)
        if entry.name in tensors:
            raise BadRequest(f"{name}: expected each input once, found it twice", name)
        size = entry.parameters.get("binary_data_size")
        if size is None:
            values = [] if entry.data is None else entry.data
            tensors[entry.name] = from_list(entry.name, entry.datatype, entry.shape, values)
            continue
        if type(size) is not int or not 0 <= size <= len(data) or entry.data is not None:
            raise BadRequest(
                f"{name}: binary_data_size: expected 0 to {len(data)}, the bytes that are left, and no data, "
                f"found {str(size)[:20]}",
                name,
            )
        tensors[entry.name] = from_bytes(entry.name, entry.datatype, entry.shape, bytes(data[:size]))
        data = data[size:]
    return tensors, data


async def events_of(
    inference: Inference, in_tokens: bool, encode: Callable[[InferResponse], bytes]
) -> AsyncIterator[bytes]:
    """Yield an event for each response; what fails is one too."""
    try:
        async for response in inference.parts(in_tokens):
            yield b"data: " + encode(response) + b"\n\n"
    except StreamError as error:
        yield b"data: " + error_json(error.message) + b"\n\n"


def _encode(
    request: InferRequest,
    response: InferResponse,
    is_binary: Callable[[str], bool] = lambda name: False,
    parameters: Mapping[str, Any] = {},
) -> tuple[bytes, Mapping[str, str]]:
    """Return a response's body and headers; binary tensors come after the JSON."""
    outputs: list[dict[str, Any]] = []
    binary = bytearray()
    for tensor in response.outputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if is_binary(tensor.name):
            data = to_bytes(tensor)
            entry["parameters"] = {"binary_data_size": len(data)}
            binary += data
        else:
            entry["data"] = to_list(tensor)
        outputs.append(entry)
    body: dict[str, Any] = {}
    if request.id:
        body["id"] = request.id
    body |= {"model_name": request.model.name, "model_version": VERSION}
    if request.model.name == "ensemble":
        parameters = {**SEQUENCE, **parameters}
    if parameters:
        body["parameters"] = parameters
    head = msgspec.json.encode({**body, "outputs": outputs})
    if not binary:
        return head, {"content-type": "application/json"}
    return head + binary, {"content-type": "application/octet-stream", _HEADER_LENGTH: str(len(head))}
