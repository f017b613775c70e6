"""An HTTP client of `lockstep serve --unix` for Triton's requests. NumPy and the standard library only."""

import contextlib
import http.client
import json
import socket

import numpy as np
import triton_python_backend_utils as pb_utils

_KINDS = {"b": "BOOL", "i": "INT", "u": "UINT", "f": "FP", "O": "BYTES", "S": "BYTES"}
_CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 413: "INVALID_ARG", 429: "UNAVAILABLE", 503: "UNAVAILABLE"}


class ServerError(Exception):
    """The error of a request that the server refused, or that did not reach it. status: of HTTP."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Connection(http.client.HTTPConnection):
    """A connection to the Unix socket at `path`. timeout: seconds, None for no limit."""

    def __init__(self, path, timeout=None):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except OSError as error:
            self.sock.close()
            message = f"no server listens at {self._path} ({error}); the model tensorrt_llm starts it"
            raise ServerError(503, message) from None

    def ask(self, method, url, body=None):
        """Return the JSON of an answer, None of an empty one. Raises ServerError.

        Tries twice, as the server may have closed an idle connection: requests are idempotent.
        """
        if body is not None:
            body = json.dumps(body)
        for is_last in (False, True):
            try:
                self.request(method, url, body)
                return json.loads(_checked(self.getresponse()).read() or "null")
            except (ConnectionError, http.client.HTTPException):
                self.close()
                if is_last:
                    raise


class Stream(Connection):
    """A POST that is answered with events. `cancel`, from any thread, closes it, which aborts it in the server."""

    def __init__(self, path, url, body):
        super().__init__(path)
        self.is_cancelled = False
        self.request("POST", url, json.dumps(body))
        self._socket = self.sock  # http.client forgets it with the last answer's headers

    def __iter__(self):
        for line in _checked(self.getresponse()):
            if self.is_cancelled:  # events that came before are still buffered
                return
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ServerError(500, event["error"])
                yield event

    def cancel(self):
        self.is_cancelled = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _checked(answer):
    if answer.status != 200:
        data = json.loads(answer.read() or "{}")
        raise ServerError(answer.status, data.get("error", f"status {answer.status}"))
    return answer


def infer_body(request, excludes_input):
    """Return the body of /infer. excludes_input: of a request that does not say. Raises ServerError."""
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    if excludes_input and "exclude_input_in_output" not in inputs:
        inputs["exclude_input_in_output"] = np.ones((len(next(iter(inputs.values()))), 1), bool)
    parameters = {**json.loads(request.parameters() or "{}"), "binary_data_output": False}
    tensors = [_input(name, array) for name, array in inputs.items()]
    return {"id": request.request_id(), "inputs": tensors, "parameters": parameters}


def _input(name, array):
    kind = _KINDS[array.dtype.kind]
    if array.dtype.kind in "iuf":
        kind += str(8 * array.dtype.itemsize)
    data = array.ravel().tolist()
    if kind == "BYTES":
        try:
            data = [value.decode() if isinstance(value, bytes) else value for value in data]
        except UnicodeDecodeError as error:
            raise ServerError(400, f"{name}: expected text in UTF-8, found {error}") from None
    return {"name": name, "datatype": kind, "shape": array.shape, "data": data}


def infer_response(answer, types):
    """Return the response for an answer of /infer. types: {name: NumPy's type} of the outputs in config.pbtxt."""
    tensors = []
    for output in answer["outputs"]:
        if output["name"] in types:
            data = output["data"]
            if output["datatype"] == "BYTES":
                data = [value.encode() for value in data]
            array = np.array(data, types[output["name"]]).reshape(output["shape"])
            tensors.append(pb_utils.Tensor(output["name"], array))
    return pb_utils.InferenceResponse(tensors)


def error_response(error):
    code = getattr(pb_utils.TritonError, _CODES.get(getattr(error, "status", 500), "INTERNAL"))
    return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error), code))
