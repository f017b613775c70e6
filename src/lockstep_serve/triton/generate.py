"""Triton's generate extension: a flat JSON object in and out.

POST /v2/models/NAME/generate and /generate_stream. A field of the body that names an input of
the model is that tensor, one value or a list; any other is a parameter. An answer has Triton's keys; a list of one
value is sent as the value.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
from starlette.requests import Request

from lockstep_serve.bodies import Access, BadRequest, decode_body, read_body
from lockstep_serve.openapi import Endpoint
from lockstep_serve.triton.infer import InferResponse, Triton
from lockstep_serve.triton.inputs import InferRequest
from lockstep_serve.triton.kserve import SEQUENCE, InferAnswer, events_of, model_endpoints, path_model
from lockstep_serve.triton.models import VERSION, Model, Spec
from lockstep_serve.triton.tensors import Tensor, to_list, values_array

_JSON = {"content-type": "application/json"}


def generate_endpoints(triton: Triton, access: Access) -> list[Endpoint]:

    async def answer(request: Request, is_stream: bool) -> InferAnswer:
        infer_request = await _infer_request(request, path_model(triton, request), access)
        inference = await triton.infer(infer_request)
        events = None
        if is_stream:
            # Tokens are streamed unless the body says otherwise; upstream sends one event if `stream` is absent.
            in_tokens = inference.in_tokens or not {"stream", "streaming"} & infer_request.inputs.keys()
            events = events_of(inference, in_tokens, lambda response: _answer(infer_request, response))
        return InferAnswer(inference, lambda response: (_answer(infer_request, response), _JSON), events)

    generate = functools.partial(answer, is_stream=False)
    generate_stream = functools.partial(answer, is_stream=True)
    return model_endpoints("/generate", generate, "POST") + model_endpoints("/generate_stream", generate_stream, "POST")


async def _infer_request(request: Request, model: Model, access: Access) -> InferRequest:
    body = await decode_body(await read_body(request, access), dict[str, Any])
    id = body.pop("id", "")
    if not isinstance(id, str):
        raise BadRequest(f"id: expected a string, found {str(id)[:40]}", "id")
    inputs: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    for name, value in body.items():
        if name in model.inputs:
            if value is not None:
                inputs[name] = _tensor(name, model.inputs[name], value)
        elif isinstance(value, list | dict):
            raise BadRequest(f"{name[:80]}: expected an input of the model {model.name}, found another name", name[:80])
        else:
            parameters[name] = value
    # As in upstream's first versions, with zeros for log-probabilities that were not requested.
    outputs = tuple(model.outputs) if "text_output" in model.outputs else None
    return InferRequest(model, id, inputs, outputs, parameters)


def _tensor(name: str, spec: Spec, value: Any) -> Tensor:
    """Return a value as a tensor of a batch of one; the innermost free dimension takes the values, others 1."""
    if not isinstance(value, list):
        value = [value]
    array = values_array(name, spec.datatype, value)
    free = [axis for axis, size in enumerate(spec.dims) if size == -1]
    shape = [max(1, size) for size in spec.dims]
    fixed = math.prod(shape)
    expected = f"{fixed} values"
    if free:
        expected = f"a multiple of {expected}"
        shape[free[-1]] = len(array) // fixed
    if math.prod(shape) != len(array):
        raise BadRequest(f"{name}: expected {expected}, found {len(array)}", name)
    return Tensor(name, spec.datatype, array.reshape(1, *shape))


def _answer(request: InferRequest, response: InferResponse) -> bytes:
    answer: dict[str, Any] = {"model_name": request.model.name, "model_version": VERSION, **SEQUENCE}
    if request.id:
        answer["id"] = request.id
    for tensor in response.outputs:
        values = to_list(tensor)
        answer[tensor.name] = values[0] if len(values) == 1 else values
    return msgspec.json.encode(answer, order="sorted")
