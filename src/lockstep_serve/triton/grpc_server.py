"""The KServe v2 protocol over gRPC, as Triton speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from lockstep.errors import InputError
from lockstep_serve.access import check_key
from lockstep_serve.bodies import Access, BadRequest
from lockstep_serve.ended_requests import CLIENT_GONE, EndedRequest
from lockstep_serve.log import fault_of, log
from lockstep_serve.protocols import Listener
from lockstep_serve.stream import Stream, StreamError
from lockstep_serve.triton.grpc_messages import MESSAGES, SERVICE
from lockstep_serve.triton.grpc_reader import write
from lockstep_serve.triton.infer import InferResponse, Triton
from lockstep_serve.triton.inputs import InferRequest
from lockstep_serve.triton.kserve import SEQUENCE, repository_index, server_metadata
from lockstep_serve.triton.models import VERSION, Model, config, metadata, model_of
from lockstep_serve.triton.tensors import (
    Tensor,
    check_declaration,
    check_parameters,
    from_bytes,
    from_list,
    new_tensor,
    to_bytes,
)

_OPEN = ("ServerLive", "ServerReady")  # without a key
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_CONTENTS = {  # fields of a tensor's values that are not raw
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_Notes = dict[str, Any]  # of a request, for observers
_Method = Callable[[Any, _Notes], Awaitable[Any]]


class GrpcServer(Listener):
    """A gRPC server in front of a service. port: it listens there."""

    def __init__(self, triton: Triton, access: Access, host: str, port: int):
        """Bind the address, in an event loop; `start` takes requests. Raises InputError for one that is taken."""
        self._triton = triton
        self._service = triton.service
        self._keys = access.keys
        slow_reader_ms = math.ceil(self._service.limits.slow_reader * 1000)
        options = [
            ("grpc.max_receive_message_length", access.max_body),
            ("grpc.so_reuseport", 0),  # two servers must not share the port's requests
            # Disconnect a client that answers no ping: one that still reads answers, after it has read all data sent
            # before, at most a window, 64 KiB at first. `write` disconnects one that answers, and reads nothing.
            ("grpc.keepalive_time_ms", slow_reader_ms),
            ("grpc.keepalive_timeout_ms", slow_reader_ms),
            ("grpc.http2.max_pings_without_data", 0),  # no limit
        ]
        self._server = grpc.aio.server(options=options)
        handlers = {name: self._unary(name, _method(name, fields)) for name, fields in self._methods().items()}
        handlers["ModelInfer"] = self._unary("ModelInfer", self._model_infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer,
            _parser("ModelInferRequest"),
            MESSAGES["ModelStreamInferResponse"].SerializeToString,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._host = f"[{host}]" if ":" in host else host  # IPv6
        try:
            self.port = self._server.add_insecure_port(f"{self._host}:{port}")
        except RuntimeError:
            raise InputError(
                f"--host, --grpc-port: expected an address that is free, found {host}:{port}; name another"
            ) from None

    def __str__(self) -> str:
        return f"gRPC at {self._host}:{self.port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)

    def _methods(self) -> dict[str, Callable[[Any], dict[str, Any]]]:
        """Return the methods that answer at once: functions from a request to the fields of its response."""
        service = self._service
        triton = self._triton

        def ready() -> bool:
            return service.is_ready and service.is_live

        def model(request: Any) -> Model:
            return model_of(triton.models, request.name, request.version)

        def statistics(request: Any) -> dict[str, Any]:
            return triton.statistics.of([model(request).name] if request.name else triton.models)

        return {
            "ServerLive": lambda request: {"live": service.is_live},
            "ServerReady": lambda request: {"ready": ready()},
            "ServerMetadata": lambda request: server_metadata(),
            "ModelReady": lambda request: {"ready": bool(model(request)) and ready()},
            "ModelMetadata": lambda request: metadata(model(request)),
            "ModelConfig": lambda request: {"config": config(model(request), service.ready.max_batch_size)},
            "ModelStatistics": statistics,
            "RepositoryIndex": lambda request: {"models": repository_index(triton.models, service.is_ready)},
        }

    def _unary(self, name: str, method: _Method) -> Any:
        async def call(request: Any, context: Any) -> None:
            try:
                with self._observed(name, context) as notes:
                    if name not in _OPEN:
                        self._authorize(context)
                    if isinstance(request, BadRequest):
                        raise request
                    answer = await method(request, notes)
            except StreamError as error:
                await _abort(context, error)
            await write(context, answer, self._service.limits.slow_reader)

        # A stream of one answer is the same to clients, and tells when it has left.
        serialize = MESSAGES[f"{name}Response"].SerializeToString
        return grpc.unary_stream_rpc_method_handler(call, _parser(f"{name}Request"), serialize)

    @contextlib.contextmanager
    def _observed(self, name: str, context: Any) -> Iterator[_Notes]:
        """Call observers with a request that made notes, or was refused."""
        began = time.monotonic()
        status = CLIENT_GONE
        notes = _Notes()
        try:
            yield notes
            status = 200
        except StreamError as error:
            status = error.status
            notes["error"] = error
            raise
        finally:
            if notes and self._service.observers:
                ended = EndedRequest(began, name, status, dict(context.invocation_metadata() or ()), **notes)
                for observe in self._service.observers:
                    observe(ended)

    def _authorize(self, context: Any) -> None:
        authorization = dict(context.invocation_metadata() or ()).get("authorization")
        if not isinstance(authorization, str):
            authorization = ""
        check_key(authorization, self._keys)

    async def _model_infer(self, request: Any, notes: _Notes) -> Any:
        infer = infer_request(request, self._triton.models)
        notes["id"] = infer.id
        inference = await self._triton.infer(infer)
        notes["stream"] = inference.stream
        try:
            return infer_response(infer, await inference.full_response())
        finally:
            inference.close()  # if the client is gone, this task was cancelled

    async def _model_stream_infer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Run the requests of a stream concurrently; responses carry their ids."""
        try:
            with self._observed("ModelStreamInfer", context):
                self._authorize(context)
        except BadRequest as error:
            await _abort(context, error)
        lock = asyncio.Lock()
        running: set[asyncio.Task[None]] = set()

        async def send(response: Any, stream: Stream | None) -> None:
            async with lock:
                if stream is not None:
                    stream.sending_since = time.monotonic()
                await write(context, response, self._service.limits.slow_reader)
                if stream is not None:
                    stream.sending_since = None

        try:
            async for request in requests:
                task = asyncio.create_task(self._respond(request, context, send))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def _respond(self, request: Any, context: Any, send: Callable[[Any, Stream | None], Awaitable[None]]) -> None:
        response_class = MESSAGES["ModelStreamInferResponse"]
        try:
            with self._observed("ModelStreamInfer", context) as notes:
                if isinstance(request, BadRequest):
                    raise request
                infer = infer_request(request, self._triton.models)
                notes["id"] = infer.id
                inference = await self._triton.infer(infer)
                notes.update(stream=inference.stream, in_chunks=inference.in_tokens)
                try:
                    async for response in inference.parts(inference.in_tokens):
                        answer = infer_response(infer, response)
                        answer.parameters["triton_final_response"].bool_param = response.final
                        await send(response_class(infer_response=answer), inference.stream)
                finally:
                    inference.close()
        except StreamError as error:  # fails this request; the others of the stream go on
            await send(_failed(request, error.message), None)
        except Exception as error:  # the client must not wait for ever; if it is gone, sending fails
            log.error(f"ModelStreamInfer: {fault_of(error)}")
            with contextlib.suppress(Exception):
                await send(_failed(request, "the server failed; its log says why"), None)


def _method(name: str, fields: Callable[[Any], dict[str, Any]]) -> _Method:
    async def answer(request: Any, notes: _Notes) -> Any:
        return MESSAGES[f"{name}Response"](**fields(request))

    return answer


def _failed(request: Any, message: str) -> Any:
    failed = MESSAGES["ModelInferResponse"](id=getattr(request, "id", ""))
    return MESSAGES["ModelStreamInferResponse"](error_message=message, infer_response=failed)


def _parser(name: str) -> Callable[[bytes], Any]:
    """Return a parser of messages. It returns a BadRequest for invalid bytes: gRPC would log an exception."""

    def parse(data: bytes) -> Any:
        try:
            return MESSAGES[name].FromString(data)
        except DecodeError:
            return BadRequest(f"message: expected a {name}, found {len(data)} bytes that are none")

    return parse


async def _abort(context: Any, error: StreamError) -> None:
    trailing = []
    if error.retry_after is not None:
        trailing.append(("retry-after", str(error.retry_after)))
    await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message, tuple(trailing))


def infer_request(message: Any, models: Mapping[str, Model]) -> InferRequest:
    """Return a ModelInferRequest as an `InferRequest`. Raises BadRequest."""
    model = model_of(models, message.model_name, message.model_version)
    raw = message.raw_input_contents
    if raw and (len(raw) != len(message.inputs) or any(tensor.HasField("contents") for tensor in message.inputs)):
        raise BadRequest(f"raw_input_contents: expected one for each of {len(message.inputs)} inputs, found {len(raw)}")
    inputs: dict[str, Tensor] = {}
    for number, tensor in enumerate(message.inputs):
        if tensor.name in inputs:
            raise BadRequest(f"{tensor.name[:80]}: expected each input once, found it twice")
        if raw:
            inputs[tensor.name] = _raw_tensor(tensor, raw[number])
        else:
            inputs[tensor.name] = _tensor(tensor)
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "", None)
        for name, value in message.parameters.items()
    }
    names = tuple(output.name for output in message.outputs) or None
    return InferRequest(model, message.id, inputs, names, parameters)


def _raw_tensor(message: Any, data: bytes) -> Tensor:
    check_parameters(message.name, dict.fromkeys(message.parameters, True))
    return from_bytes(message.name[:80], message.datatype, list(message.shape), data)


def _tensor(message: Any) -> Tensor:
    name = message.name[:80]
    datatype = message.datatype
    shape = list(message.shape)
    check_parameters(name, dict.fromkeys(message.parameters, True))
    count = check_declaration(name, datatype, shape)
    values = []
    if datatype in _CONTENTS:
        values = list(getattr(message.contents, _CONTENTS[datatype]))
    if datatype != "BYTES":
        return from_list(name, datatype, shape, values)
    if len(values) != count:
        raise BadRequest(f"{name}: contents: expected {count} elements for shape {shape}, found {len(values)}")
    return new_tensor(name, datatype, values, *shape)


def infer_response(request: InferRequest, response: InferResponse) -> Any:
    """Return the ModelInferResponse of a response."""
    message = MESSAGES["ModelInferResponse"](model_name=request.model.name, model_version=VERSION, id=request.id)
    if request.model.name == "ensemble":
        for name, value in SEQUENCE.items():
            field = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(message.parameters[name], field, value)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(to_bytes(tensor))
    return message
