"""The KServe v2 protocol over gRPC, as Triton speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from lockstep.errors import InputError
from lockstep.serve.app import check_key
from lockstep.serve.bodies import Access, BadRequest
from lockstep.serve.ended_requests import CLIENT_GONE, EndedRequest
from lockstep.serve.grpc_messages import MESSAGES, SERVICE
from lockstep.serve.kserve import SEQUENCE, repository_index, server_metadata
from lockstep.serve.say import fault_of, say
from lockstep.serve.stream import Stream, StreamError
from lockstep.serve.tensors import Tensor, check_declaration, check_parameters, from_bytes, from_list, of, to_bytes
from lockstep.serve.triton_infer import InferResponse, Triton
from lockstep.serve.triton_inputs import InferRequest
from lockstep.serve.triton_models import VERSION, Model, config, metadata, model_of

_OPEN = ("ServerLive", "ServerReady")  # without a key
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_CONTENTS = {  # where a tensor's values stand that are not raw
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


class GrpcServer:
    """A gRPC server before a service. port: where it listens."""

    def __init__(self, triton: Triton, access: Access, host: str, port: int):
        """Bind the address, in an event loop; `start` takes requests. Raises InputError for one that is taken."""
        self._triton = triton
        self._service = triton.service
        self._keys = [key.encode() for key in access.keys]
        slow_reader_ms = math.ceil(self._service.limits.slow_reader * 1000)
        options = [
            ("grpc.max_receive_message_length", access.max_body),
            ("grpc.so_reuseport", 0),  # else two servers could listen at the same port and share its requests
            # A client that reads nothing is ended, of whole answers too. One that reads on answers a ping when it has
            # read what was sent before: no more than a window, 64 KiB at first.
            ("grpc.keepalive_time_ms", slow_reader_ms),
            ("grpc.keepalive_timeout_ms", slow_reader_ms),
            ("grpc.http2.max_pings_without_data", 0),  # as many as it takes
        ]
        self._server = grpc.aio.server(options=options)
        handlers = {name: self._unary(name, self._answering(name, fields)) for name, fields in self._methods().items()}
        handlers["ModelInfer"] = self._unary("ModelInfer", self._model_infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer,
            _parser("ModelInferRequest"),
            MESSAGES["ModelStreamInferResponse"].SerializeToString,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self.port = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError:
            raise InputError(
                f"--host, --grpc-port: expected an address that is free, found {host}:{port}; name another"
            ) from None

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Take no more requests; running ones have `grace` seconds."""
        await self._server.stop(grace)

    def _methods(self) -> dict[str, Callable[[Any], dict[str, Any]]]:
        """Return what answers the methods that wait for nothing, as the fields of their responses."""
        service = self._service
        triton = self._triton

        def ready() -> bool:
            return service.is_ready and service.is_live

        def model(request: Any) -> Model:
            return model_of(request.name, request.version)

        return {
            "ServerLive": lambda request: {"live": service.is_live},
            "ServerReady": lambda request: {"ready": ready()},
            "ServerMetadata": lambda request: server_metadata(),
            "ModelReady": lambda request: {"ready": bool(model(request)) and ready()},
            "ModelMetadata": lambda request: metadata(model(request)),
            "ModelConfig": lambda request: {"config": config(model(request), service.ready.max_batch_size)},
            "ModelStatistics": lambda request: triton.statistics.of(model(request).name if request.name else None),
            "RepositoryIndex": lambda request: {"models": repository_index(service.is_ready)},
        }

    def _answering(self, name: str, fields: Callable[[Any], dict[str, Any]]) -> _Method:
        async def answer(request: Any, notes: _Notes) -> Any:
            return MESSAGES[f"{name}Response"](**fields(request))

        return answer

    def _unary(self, name: str, method: _Method) -> Any:
        async def call(request: Any, context: Any) -> Any:
            try:
                with self._observed(name, context) as notes:
                    if name not in _OPEN:
                        self._authorize(context)
                    if isinstance(request, BadRequest):
                        raise request
                    return await method(request, notes)
            except StreamError as error:
                await _abort(context, error)

        serialize = MESSAGES[f"{name}Response"].SerializeToString
        return grpc.unary_unary_rpc_method_handler(call, _parser(f"{name}Request"), serialize)

    @contextlib.contextmanager
    def _observed(self, name: str, context: Any) -> Iterator[_Notes]:
        """Tell observers of a request that made notes, or is refused."""
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
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        check_key(given if isinstance(given, str) else "", self._keys)

    async def _model_infer(self, request: Any, notes: _Notes) -> Any:
        asked = infer_request(request)
        notes["id"] = asked.id
        inference = await self._triton.infer(asked)
        notes["stream"] = inference.stream
        try:
            return infer_response(asked, await inference.whole())
        finally:
            inference.close()  # where the client has gone, this is a cancelled task

    async def _model_stream_infer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Run the requests of a stream side by side; responses carry their ids."""
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
                await context.write(response)
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
        made = MESSAGES["ModelStreamInferResponse"]
        try:
            with self._observed("ModelStreamInfer", context) as notes:
                if isinstance(request, BadRequest):
                    raise request
                asked = infer_request(request)
                notes["id"] = asked.id
                inference = await self._triton.infer(asked)
                notes.update(stream=inference.stream, in_chunks=inference.in_tokens)
                try:
                    async for response in inference.parts(inference.in_tokens):
                        answer = infer_response(asked, response)
                        answer.parameters["triton_final_response"].bool_param = response.final
                        await send(made(infer_response=answer), inference.stream)
                finally:
                    inference.close()
        except StreamError as error:  # of one request: the others of the stream go on
            await send(_failed(request, error.message), None)
        except Exception as error:  # whoever waits for this answer is told; where the client has gone, nobody is there
            say(f"ModelStreamInfer: {fault_of(error)}")
            with contextlib.suppress(Exception):
                await send(_failed(request, "the server failed; its log says why"), None)


def _failed(request: Any, message: str) -> Any:
    failed = MESSAGES["ModelInferResponse"](id=getattr(request, "id", ""))
    return MESSAGES["ModelStreamInferResponse"](error_message=message, infer_response=failed)


def _parser(name: str) -> Callable[[bytes], Any]:
    """Return a parser of messages, which returns a BadRequest for other bytes: gRPC logs what is raised."""

    def parsed(data: bytes) -> Any:
        try:
            return MESSAGES[name].FromString(data)
        except DecodeError:
            return BadRequest(f"message: expected a {name}, found {len(data)} bytes that are none")

    return parsed


async def _abort(context: Any, error: StreamError) -> None:
    again = error.retry_after
    trailing = () if again is None else (("retry-after", str(again)),)
    await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message, trailing)


def infer_request(message: Any) -> InferRequest:
    """Return a ModelInferRequest as the models take it. Raises BadRequest."""
    model = model_of(message.model_name, message.model_version)
    raw = message.raw_input_contents
    if raw and (len(raw) != len(message.inputs) or any(each.HasField("contents") for each in message.inputs)):
        raise BadRequest(f"raw_input_contents: expected one for each of {len(message.inputs)} inputs, found {len(raw)}")
    inputs: dict[str, Tensor] = {}
    for number, each in enumerate(message.inputs):
        if each.name in inputs:
            raise BadRequest(f"{each.name[:80]}: expected each input once, found it twice")
        inputs[each.name] = _tensor(each, raw[number] if raw else None)
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "", None)
        for name, value in message.parameters.items()
    }
    names = tuple(output.name for output in message.outputs) or None
    return InferRequest(model, message.id, inputs, names, parameters)


def _tensor(given: Any, raw: bytes | None) -> Tensor:
    name = given.name[:80]
    datatype = given.datatype
    shape = list(given.shape)
    check_parameters(name, {each: each in given.parameters for each in given.parameters})
    if raw is not None:
        return from_bytes(name, datatype, shape, raw)
    count = check_declaration(name, datatype, shape)
    values = list(getattr(given.contents, _CONTENTS[datatype])) if datatype in _CONTENTS else []
    if datatype != "BYTES":
        return from_list(name, datatype, shape, values)
    if len(values) != count:
        raise BadRequest(f"{name}: contents: expected {count} elements for shape {shape}, found {len(values)}")
    return of(name, datatype, values, *shape) if shape else of(name, datatype, values)


def infer_response(asked: InferRequest, response: InferResponse) -> Any:
    """Return the ModelInferResponse of a response."""
    made = MESSAGES["ModelInferResponse"](model_name=asked.model.name, model_version=VERSION, id=asked.id)
    if asked.model.name == "ensemble":
        for name, value in SEQUENCE.items():
            setattr(made.parameters[name], "bool_param" if isinstance(value, bool) else "int64_param", value)
    for tensor in response.outputs:
        made.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        made.raw_output_contents.append(to_bytes(tensor))
    return made
