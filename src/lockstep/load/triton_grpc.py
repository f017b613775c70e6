"""KServe v2 over gRPC, as Triton speaks it: prompts to messages, streams to records."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio

from lockstep.load.http import Client, NoAnswer, clock
from lockstep.load.records import FAILED, REFUSED, Planned, Prompt, Record
from lockstep.load.triton import answered, fields, judge, take
from lockstep.serve.grpc_messages import MESSAGES, SERVICE

_METHOD = f"/{SERVICE}/ModelStreamInfer"
_REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)  # as 429 and 503
_FORMATS = {"INT32": "i", "UINT64": "Q", "FP32": "f", "BOOL": "?"}
_DATATYPES = {bool: "BOOL", int: "INT32", float: "FP32", str: "BYTES"}
_UNSIGNED = ("seed", "random_seed")
# What is read of a response. Without the second, nobody knows how many tokens a text has.
_OUTPUTS = {"text_input": ("text_output", "output_log_probs"), "input_ids": ("output_ids", "sequence_length")}


def request(prompt: Prompt, model: str, extra: Mapping[str, Any], stream: bool) -> tuple[str, bytes]:
    """Return the method and the message. Raises InputError as `triton.fields`."""
    model, given = fields(prompt, model, extra, stream)
    message = MESSAGES["ModelInferRequest"](model_name=model)
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        datatype = "UINT64" if name in _UNSIGNED else _DATATYPES.get(type(values[0]), "BYTES")
        message.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        message.raw_input_contents.append(_to_bytes(datatype, values))
    for name in next(names for key, names in _OUTPUTS.items() if key in given):
        message.outputs.add(name=name)
    return _METHOD, message.SerializeToString()


class GrpcEndpoint:
    """A channel to one server, for requests side by side, as an async context."""

    def __init__(self, client: Client) -> None:
        self._address = f"[{client.host}]:{client.port}" if ":" in client.host else f"{client.host}:{client.port}"
        self._metadata = (("authorization", f"Bearer {client.api_key}"),) if client.api_key else ()

    async def __aenter__(self) -> GrpcEndpoint:
        self._channel = grpc.aio.insecure_channel(self._address, [("grpc.max_receive_message_length", 64 << 20)])
        parse = MESSAGES["ModelStreamInferResponse"].FromString
        # The method takes a stream of requests; one of a single request is the same on the wire. Writing to a stream
        # that the server has ended fails with an error of its own (INTERNAL), and what the server said is lost.
        self._call = self._channel.unary_stream(_METHOD, lambda data: data, parse)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def ask(self, one: Planned, record: Record, start: float, limit: float) -> None:
        """Send a request and fill its record: see `endpoints.HttpEndpoint`."""
        record.sent = clock() - start
        try:
            await asyncio.wait_for(self._read(one.body, record, start), limit)
        except grpc.aio.AioRpcError as error:
            record.status = REFUSED if error.code() in _REFUSALS else FAILED
            raise NoAnswer(_line(error)) from None
        judge(record)

    async def _read(self, body: bytes, record: Record, start: float) -> None:
        call = self._call(body, metadata=self._metadata)
        is_final = False
        try:
            # To the stream's end, after the final response: where a stream is cancelled between the two, Triton 2.51
            # never unloads its model.
            async for answer in call:
                now = clock() - start
                record.end = now
                if answer.error_message:
                    record.error = " ".join(answer.error_message.split())[:300]
                    return
                response = answer.infer_response
                if response.outputs:  # Triton's last one may have none
                    take(record, *answered(_outputs(response)), now)
                is_final |= response.parameters["triton_final_response"].bool_param
            if not is_final:
                record.error = "expected a stream that ends in a final response, found one that ends without it"
        except (KeyError, TypeError, struct.error):
            record.error = "expected a response with text_output or output_ids, found another"
        finally:
            call.cancel()  # does nothing where it has ended


def _line(error: grpc.aio.AioRpcError) -> str:
    return f"gRPC {error.code().name}: {' '.join((error.details() or '').split())[:300]}"


def _to_bytes(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        texts = [str(value).encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)


def _outputs(response: Any) -> dict[str, Any]:
    """Return the values of the outputs that are read, by name."""
    found: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents):
        if output.datatype == "BYTES":  # one string, after its length
            found[output.name] = raw[4:].decode(errors="replace")
        elif output.datatype in _FORMATS:
            kind = _FORMATS[output.datatype]
            found[output.name] = list(struct.unpack(f"<{len(raw) // struct.calcsize(kind)}{kind}", raw))
    return found
