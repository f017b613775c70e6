"""Triton's generate extension: a flat JSON object in and out.

POST /v2/models/NAME/generate and /generate_stream. A name of the body that is an input of the model is that tensor, of
one value or a list; any other is a parameter. An answer has Triton's keys; a value of one element stands without its
list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from lockstep.serve.bodies import Access, BadRequest, decoded, read_body
from lockstep.serve.kserve import SEQUENCE, InferAnswer, asked_model, events_of, model_routes
from lockstep.serve.tensors import Tensor, to_list, values_array
from lockstep.serve.triton_infer import InferResponse, Triton
from lockstep.serve.triton_inputs import InferRequest
from lockstep.serve.triton_models import VERSION, Spec


def generate_routes(route: Callable[..., Route], triton: Triton, access: Access) -> list[Route]:
    """Return the routes of the extension. route: as for `kserve_routes`."""

    async def generate(request: Request) -> Any:
        asked = await _request_of(request, access)
        return InferAnswer(await triton.infer(asked), lambda response: (_answer(asked, response), _JSON))

    async def generate_stream(request: Request) -> Any:
        asked = await _request_of(request, access)
        inference = await triton.infer(asked)
        # Tokens, unless the body says that it wants none: upstream gives one event where `stream` is left out.
        in_tokens = inference.in_tokens or not {"stream", "streaming"} & asked.inputs.keys()
        events = events_of(inference, in_tokens, lambda response: _answer(asked, response))
        return InferAnswer(inference, lambda response: (_answer(asked, response), _JSON), events)

    whole = (route, "/generate", generate, "POST")
    streamed = (route, "/generate_stream", generate_stream, "POST")
    return model_routes(*whole) + model_routes(*streamed)


_JSON = {"content-type": "application/json"}


async def _request_of(request: Request, access: Access) -> InferRequest:
    model = asked_model(request)
    body = await decoded(await read_body(request, access), dict[str, Any])
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
            raise BadRequest(f"{name[:80]}: expected an input of the model {model.name}, found no such one", name[:80])
        else:
            parameters[name] = value
    # As upstream had them at first, with zeros for log-probabilities that were not asked for.
    outputs = tuple(model.outputs) if "text_output" in model.outputs else None
    return InferRequest(model, id, inputs, outputs, parameters)


def _tensor(name: str, spec: Spec, value: Any) -> Tensor:
    """Return a value as a tensor of a batch of one; the innermost free dimension takes the values, others 1."""
    array = values_array(name, spec.datatype, value if isinstance(value, list) else [value])
    free = [place for place, size in enumerate(spec.dims) if size == -1]
    shape = [max(1, size) for size in spec.dims]
    fixed = math.prod(shape)
    if free and len(array) % fixed == 0:
        shape[free[-1]] = len(array) // fixed
    if math.prod(shape) != len(array):
        raise BadRequest(f"{name}: expected {'a multiple of ' if free else ''}{fixed} values, found {len(array)}", name)
    return Tensor(name, spec.datatype, array.reshape(1, *shape))


def _answer(asked: InferRequest, response: InferResponse) -> bytes:
    values: Mapping[str, Any] = {tensor.name: to_list(tensor) for tensor in response.outputs}
    flat = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
    given: dict[str, Any] = {"id": asked.id} if asked.id else {}
    return msgspec.json.encode(
        {**given, "model_name": asked.model.name, "model_version": VERSION, **SEQUENCE, **flat}, order="sorted"
    )
