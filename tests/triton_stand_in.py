"""The part of `triton_python_backend_utils` that the model.py files use.

That module exists inside Triton alone, where `make triton-test` runs them. `requested` makes a request as Triton would
give it.
"""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
_TYPES = {"TYPE_STRING": np.object_, "TYPE_BOOL": bool, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32}


def triton_string_to_numpy(name: str) -> Any:
    return _TYPES.get(name) or np.dtype(name.removeprefix("TYPE_").lower()).type


class Tensor:
    def __init__(self, name: str, array: np.ndarray):
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError(Exception):
    INVALID_ARG = "INVALID_ARG"
    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class InferenceResponse:
    def __init__(self, tensors: list[Tensor], error: TritonError | None = None):
        self.arrays = {tensor.name(): tensor.as_numpy() for tensor in tensors}
        self.error = error


class MetricFamily:
    GAUGE = "gauge"

    def __init__(self, *arguments: Any) -> None:
        self.metrics: list[MetricFamily] = []

    def Metric(self, labels: dict[str, str]) -> MetricFamily:
        return self

    def set(self, value: float) -> None:
        pass


class Sender:
    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[InferenceResponse | None, int]] = queue.Queue()
        self.cancelled = False
        self.open = threading.Event()  # cleared: `send` returns late, as with a slow reader
        self.open.set()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        self.sent.put((response, flags))
        assert self.open.wait(120)

    def is_cancelled(self) -> bool:
        return self.cancelled

    def all(self) -> list[InferenceResponse]:
        """Responses up to the final flag."""
        programs = []
        while True:
            response, flags = self.sent.get(timeout=120)
            programs += [] if response is None else [response]
            if flags:
                return programs


class Request:
    def __init__(self, arrays: dict[str, np.ndarray], outputs: tuple[str, ...], id: str, parameters: dict[str, Any]):
        self._arrays = arrays
        self._outputs = outputs
        self._id = id
        self._parameters = parameters
        self.sender = Sender()

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self._arrays.items()]

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def get_response_sender(self) -> Sender:
        return self.sender
