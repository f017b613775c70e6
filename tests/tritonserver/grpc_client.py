"""tritonclient against Triton over gRPC: `python grpc_client.py PORT` prints the answers as JSON. With `cancel` as its
second argument it only cancels streams of the ensemble. Runs in the environment of envs/triton.txt."""

from __future__ import annotations

import json
import queue
import sys
import time
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

TEXT = {
    "text_input": np.array([["What is machine learning?"]], object),
    "max_tokens": np.array([[20]], np.int32),
    "end_id": np.array([[-1]], np.int32),
}
YES = np.array([[True]])


def tensors(values: dict[str, np.ndarray]) -> list[Any]:
    results = []
    for name, value in values.items():
        tensor = grpcclient.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        results.append(tensor)
    return results


class Streamed:
    def __init__(self, client: Any):
        self.client = client
        self.queue = queue.Queue()
        client.start_stream(callback=lambda result, error: self.queue.put((result, error)))

    def ask(self, model: str, values: dict[str, np.ndarray], id: str) -> None:
        # Else the end of a stream whose last response is empty is not told.
        self.client.async_stream_infer(model, tensors(values), request_id=id, enable_empty_final_response=True)

    def next(self) -> Any:
        result, error = self.queue.get(timeout=60)
        if error is not None:
            raise error
        return result

    def all(self, finals: int) -> list[Any]:
        """Responses until that many requests are through."""
        results = []
        while finals:
            results.append(self.next())
            finals -= results[-1].get_response().parameters["triton_final_response"].bool_param
        return results


def ids(results: list[Any]) -> list[int]:
    token_ids = []
    for result in results:
        tokens = result.as_numpy("output_ids")
        if tokens is not None:
            token_ids += tokens[0][0][: result.as_numpy("sequence_length")[0][0]].tolist()
    return token_ids


def texts(results: list[Any]) -> str:
    pieces = [result.as_numpy("text_output") for result in results]
    return "".join(piece.ravel()[0].decode() for piece in pieces if piece is not None)


def core(client: Any, num_tokens: int, **options: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of tensorrt_llm, made by preprocessing."""
    query = {"QUERY": TEXT["text_input"], "REQUEST_OUTPUT_LEN": np.array([[num_tokens]], np.int32)}
    preprocessed = client.infer("preprocessing", tensors(query))
    names = {"INPUT_ID": "input_ids", "REQUEST_INPUT_LEN": "input_lengths", "REQUEST_OUTPUT_LEN": "request_output_len"}
    return {
        **{to: preprocessed.as_numpy(name) for name, to in names.items()},
        "end_id": np.array([[-1]], np.int32),
        **options,
    }


client = grpcclient.InferenceServerClient(f"127.0.0.1:{sys.argv[1]}")
if sys.argv[2:] == ["cancel"]:  # at once, and after each of the first pieces
    for pieces in (0, 1, 2, 3, 5, 8, 13, 21):
        stream = Streamed(client)
        stream.ask("ensemble", {**TEXT, "max_tokens": np.array([[230]], np.int32), "stream": YES}, "cancelled")
        for _ in range(pieces):
            stream.next()
        client.stop_stream(cancel_requests=True)
    sys.exit()
stream = Streamed(client)
answers: dict[str, Any] = {}
stream.ask("ensemble", {**TEXT, "exclude_input_in_output": YES}, "whole")
answers["whole_text"] = texts(stream.all(1))
stream.ask("ensemble", {**TEXT, "stream": YES}, "a")
pieces = stream.all(1)
answers["streamed_text"] = texts(pieces)
answers["num_pieces"] = len(pieces)
inputs = core(client, 24, exclude_input_in_output=YES)
stream.ask("tensorrt_llm", inputs, "b")
answers["whole_ids"] = ids(stream.all(1))
stream.ask("tensorrt_llm", {**inputs, "streaming": YES}, "c")
answers["streamed_ids"] = ids(stream.all(1))
# A batch of two prompts, not streamed: a response each, with its number.
stream.ask("tensorrt_llm", {name: np.concatenate([value, value]) for name, value in inputs.items()}, "batch")
batch = [result for result in stream.all(1) if result.as_numpy("output_ids") is not None]
answers["batch"] = sorted([int(result.as_numpy("batch_index").item()), ids([result])] for result in batch)
# Stopped by another request of its id, after 200 ms as its client's --stop-after-ms has it, or sooner.
long = core(client, 230, streaming=YES)
stop = {"input_ids": np.ones([1, 1], np.int32), "input_lengths": np.ones([1, 1], np.int32)}
stop |= {"request_output_len": np.array([[1]], np.int32), "stop": YES}
stream.ask("tensorrt_llm", long, "stopped")
first = stream.next()
stream.ask("tensorrt_llm", stop, "stopped")
answers["stopped"] = len(ids([first, *stream.all(2)]))
# Of the last one a prompt of two is wrong: Triton could not end if the other ran.
two_prompts = {name: np.concatenate([value, value]) for name, value in {**TEXT, "stream": YES}.items()}
for model, wrong in (
    ("tensorrt_llm", {**inputs, "lora_task_id": np.array([[3]], np.uint64)}),
    ("tensorrt_llm", {**inputs, "beam_width": np.array([[2]], np.int32)}),
    ("ensemble", {**two_prompts, "max_tokens": np.array([[230], [0]], np.int32)}),
):
    stream.ask(model, wrong, "wrong")
    _, error = stream.queue.get(timeout=60)
    answers.setdefault("errors", []).append(str(error))
    time.sleep(0.2)
    while not stream.queue.empty():
        stream.queue.get()
stream.ask("tensorrt_llm", long, "cancelled")
stream.next()
client.stop_stream(cancel_requests=True)
print(json.dumps(answers))
