"""HTTP to `lockstep serve --unix`, for the model.py files of this repository.

NumPy and the standard library.
"""

import contextlib
import http.client
import json
import socket

import numpy as np
import triton_python_backend_utils as pb_utils

_KINDS = {"b": "BOOL", "i": "INT", "u": "UINT", "f": "FP", "O": "BYTES", "S": "BYTES"}
_CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 413: "INVALID_ARG", 429: "UNAVAILABLE", 503: "UNAVAILABLE"}


class ServerError(Exception):
    """The error of a request that the server refused, or could not take.

    status: of HTTP.
    """

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Connection(http.client.HTTPConnection):
    """A connection to the Unix socket at `path`."""

    def __init__(self, path, timeout=None):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self.path)
        except OSError as error:
            self.sock.close()
            raise ServerError(
                503, f"no server listens at {self.path} ({error}); the model tensorrt_llm starts it"
            ) from None


def call(connection, method, path, body=None):
    """Return the JSON of an answer; None of an empty one.

    Raises ServerError.
    """
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    data = json.loads(answer.read() or "null")
    if answer.status != 200:
        raise ServerError(answer.status, data["error"] if data and "error" in data else f"status {answer.status}")
    return data


class Stream:
    """The events of /generate_stream.

    `cancel`, from any thread, ends it: the server sees that its client is gone.
    """

    def __init__(self, path, model, body):
        self.is_cancelled = False
        self._connection = Connection(path)
        self._connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
        self._socket = self._connection.sock

    def __iter__(self):
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise ServerError(answer.status, json.loads(answer.read())["error"])
        for line in answer:
            if self.is_cancelled:  # what came before it is still to be read
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

    def close(self):
        self._connection.close()


def parameters(args):
    """Return the parameters of a model's config.pbtxt."""
    given = json.loads(args["model_config"])["parameters"]
    return {name: value["string_value"] for name, value in given.items()}


def output_types(args):
    """Return NumPy type and number of dimensions of each output of a model.

    The batch counts as a dimension.
    """
    outputs = json.loads(args["model_config"])["output"]
    kind = pb_utils.triton_string_to_numpy
    return {each["name"]: (kind(each["data_type"]), 1 + len(each["dims"])) for each in outputs}


def arrays(request):
    """Return the inputs of a request, by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def values(array):
    """Return an array's values as JSON has them, flat."""
    return [value.decode() if isinstance(value, bytes) else value for value in array.ravel().tolist()]


def infer_body(request, outputs=()):
    """Return the body of /infer for a request of Triton's.

    Raises ServerError.
    """
    inputs = []
    for name, array in arrays(request).items():
        kind = _KINDS[array.dtype.kind] + (str(8 * array.dtype.itemsize) if array.dtype.kind in "iuf" else "")
        inputs.append({"name": name, "datatype": kind, "shape": list(array.shape), "data": text_or_error(name, array)})
    wanted = [{"name": name} for name in request.requested_output_names() if name in outputs]
    return {"id": request.request_id(), "inputs": inputs, "outputs": wanted}


def text_or_error(name, array):
    """Return `values`, or raise ServerError for bytes that are no text."""
    try:
        return values(array)
    except UnicodeDecodeError as error:
        raise ServerError(400, f"{name}: expected text in UTF-8, found {error}") from None


def infer_response(answer, types):
    """Return Triton's response for an answer of /infer."""
    made = []
    for output in answer["outputs"]:
        data = [value.encode() for value in output["data"]] if output["datatype"] == "BYTES" else output["data"]
        made.append(tensor(output["name"], np.array(data, types[output["name"]][0]).reshape(output["shape"])))
    return pb_utils.InferenceResponse(made)


def tensor(name, array):
    return pb_utils.Tensor(name, array)


def error_response(error):
    """Return Triton's response for an error."""
    code = getattr(pb_utils.TritonError, _CODES.get(getattr(error, "status", 500), "INTERNAL"))
    return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error), code))
