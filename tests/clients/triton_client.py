"""tritonclient against a server: `python triton_client.py HTTP_PORT GRPC_PORT` prints the answers as JSON.

It runs in its own environment (envs/tritonclient.txt), for its pins contradict the project's.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PROMPT = "What is machine learning?"
TEXT = {
    "text_input": np.array([[PROMPT]], object),
    "max_tokens": np.array([[20]], np.int32),
    "bad_words": np.array([[""]], object),
    "stop_words": np.array([[""]], object),
    "end_id": np.array([[2]], np.int32),
    "temperature": np.array([[1.0]], np.float32),
}


def tensors(module: Any, values: dict[str, np.ndarray]) -> list[Any]:
    results = []
    for name, value in values.items():
        tensor = module.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        results.append(tensor)
    return results


def described(client: Any, **options: Any) -> dict[str, Any]:
    """Return what both protocols say of the server."""
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": [client.is_model_ready("ensemble"), client.is_model_ready("tensorrt_llm", "1")],
        "server": client.get_server_metadata(**options),
        "metadata": client.get_model_metadata("tensorrt_llm", **options),
        "config": client.get_model_config("tensorrt_llm", **options),
        "index": client.get_model_repository_index(**options),
    }


def refused(call: Any) -> str:
    try:
        call()
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    return "taken"


def of_http(port: str) -> dict[str, Any]:
    client = httpclient.InferenceServerClient(f"127.0.0.1:{port}", concurrency=4)
    inputs = tensors(httpclient, TEXT)
    outputs = [httpclient.InferRequestedOutput("text_output", binary_data=binary) for binary in (True, False)]
    texts = [client.infer("ensemble", inputs, outputs=[output]).as_numpy("text_output") for output in outputs]
    texts.append(client.infer("ensemble", inputs).as_numpy("text_output"))
    together = [client.async_infer("tensorrt_llm_bls", inputs, request_id=str(number)) for number in range(4)]
    texts += [item.get_result().as_numpy("text_output") for item in together]
    return {
        **described(client),
        "texts": [text[0] if isinstance(text[0], str) else text[0].decode() for text in texts],
        "refused": refused(lambda: client.infer("gpt", inputs)),
    }


class Streamed:
    """Responses of a stream of requests, in the order in which they come."""

    def __init__(self, client: Any):
        self.client = client
        self.queue = queue.Queue()
        client.start_stream(callback=lambda result, error: self.queue.put((result, error)))

    def rest_of(self, id: str) -> list[Any]:
        """Responses of a request up to its last."""
        results = []
        while True:
            result, error = self.queue.get(timeout=30)
            if error is not None:
                raise error
            response = result.get_response()
            if response.id == id:
                results.append(result)
                if response.parameters["triton_final_response"].bool_param:
                    return results


def core(client: Any, num_tokens: int, **options: np.ndarray) -> dict[str, np.ndarray]:
    """Return inputs of tensorrt_llm as the model before it makes them. So do clients that chain the models."""
    query = {"QUERY": TEXT["text_input"], "REQUEST_OUTPUT_LEN": np.array([[num_tokens]], np.int32)}
    preprocessed = client.infer("preprocessing", tensors(grpcclient, query))
    names = {"INPUT_ID": "input_ids", "REQUEST_INPUT_LEN": "input_lengths", "REQUEST_OUTPUT_LEN": "request_output_len"}
    return {
        **{to: preprocessed.as_numpy(name) for name, to in names.items()},
        "end_id": np.array([[-1]], np.int32),
        **options,
    }


def stop_inputs() -> list[Any]:
    return tensors(grpcclient, {
        "input_ids": np.empty([1, 1], np.int32), "input_lengths": np.zeros([1, 1], np.int32),
        "request_output_len": np.array([[0]], np.int32), "stop": np.array([[True]]),
    })  # fmt: skip


def ids(results: list[Any]) -> list[int]:
    return np.concatenate([result.as_numpy("output_ids")[0][0] for result in results]).tolist()


def of_grpc(port: str) -> dict[str, Any]:
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}")
    streaming = np.array([[True]])
    answer = core(client, 24)
    long = core(client, 230, streaming=streaming)
    texts = {
        **described(client, as_json=True),
        "text": client.infer("ensemble", tensors(grpcclient, TEXT)).as_numpy("text_output")[0].decode(),
        "whole": ids([client.infer("tensorrt_llm", tensors(grpcclient, answer))]),
        "num_prompt_tokens": answer["input_ids"].shape[1],
        "refused": refused(lambda: client.infer("gpt", tensors(grpcclient, TEXT))),
    }
    stream = Streamed(client)
    client.async_stream_infer("tensorrt_llm", tensors(grpcclient, {**answer, "streaming": streaming}), request_id="a")
    client.async_stream_infer("ensemble", tensors(grpcclient, {**TEXT, "stream": streaming}), request_id="b")
    pieces: dict[str, list[Any]] = {"a": [], "b": []}
    finals = 0
    while finals < 2:
        result, error = stream.queue.get(timeout=30)
        response = result.get_response()
        pieces[response.id].append(result)
        finals += response.parameters["triton_final_response"].bool_param
    texts["streamed"] = ids(pieces["a"])
    texts["streamed_text"] = "".join(result.as_numpy("text_output")[0].decode() for result in pieces["b"])
    texts["sequence_lengths"] = [int(result.as_numpy("sequence_length")[0][0]) for result in pieces["a"]]
    # Two answers of one prompt, whole: a response each.
    client.async_stream_infer(
        "tensorrt_llm",
        tensors(grpcclient, {**answer, "num_return_sequences": np.array([[2]], np.int32)}),
        request_id="n",
    )
    texts["sequences"] = sorted(int(result.as_numpy("sequence_index")[0][0]) for result in stream.rest_of("n"))
    # Wrong: of this request alone.
    client.async_stream_infer("ensemble", tensors(grpcclient, {"text_input": TEXT["text_input"]}), request_id="wrong")
    texts["error"] = str(stream.queue.get(timeout=30)[1])
    client.async_stream_infer("tensorrt_llm", tensors(grpcclient, long), request_id="stopped")
    first = stream.queue.get(timeout=30)[0]
    client.async_stream_infer("tensorrt_llm", stop_inputs(), request_id="stopped")
    stopped = [first]
    finals = 0
    empty = 0
    while finals < 2:
        result, _ = stream.queue.get(timeout=30)
        finals += result.get_response().parameters["triton_final_response"].bool_param
        if result.as_numpy("output_ids") is None:
            empty += 1
        else:
            stopped.append(result)
    texts["stopped"] = len(ids(stopped))
    texts["stop_responses"] = empty
    # A stream that is cancelled, and a request that is.
    client.async_stream_infer("tensorrt_llm", tensors(grpcclient, long), request_id="cancelled")
    stream.queue.get(timeout=30)
    client.stop_stream(cancel_requests=True)
    results: queue.Queue[Any] = queue.Queue()
    running = client.async_infer(
        "tensorrt_llm", tensors(grpcclient, core(client, 230)), callback=lambda result, error: results.put(error)
    )
    time.sleep(0.05)
    running.cancel()
    texts["cancelled"] = str(results.get(timeout=30))
    return texts


print(json.dumps({"http": of_http(sys.argv[1]), "grpc": of_grpc(sys.argv[2])}))
