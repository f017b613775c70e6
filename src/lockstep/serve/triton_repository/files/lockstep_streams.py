"""The streams of tensorrt_llm and tensorrt_llm_bls.

Each prompt of a request is one stream of the server, whose events become responses as they come. NumPy and the standard
library.
"""

import contextlib
import json
import threading

import lockstep_http as server
import lockstep_watchdog
import numpy as np
import triton_python_backend_utils as pb_utils


class Streams:
    """The streams of a model that run.

    respond: makes the arrays of a response, by name, of an event, the state of its answer (a dict that starts empty),
    the number of its prompt, and the body of its request.
    """

    def __init__(self, args, respond):
        self.name, self.types, self._respond = args["model_name"], server.output_types(args), respond
        given = server.parameters(args)
        self.path, self._period = given["lockstep_socket"], int(given["cancellation_check_period_ms"]) / 1000
        self._exclude = given["exclude_input_in_output"] == "true"
        self.decoupled = json.loads(args["model_config"])["model_transaction_policy"]["decoupled"]
        self._running, self._lock, self._ended = {}, threading.Lock(), threading.Event()
        self.watchdog = lockstep_watchdog.Watchdog()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def execute(self, requests):
        """Return what a model's `execute` returns.

        Nothing yet where the model is decoupled.
        """
        if not self.decoupled:
            return [self._whole(request) for request in requests]
        for request in requests:
            self._start(request, request.get_response_sender())

    def close(self):
        """End all streams that run."""
        self._ended.set()
        self._watcher.join()
        with self._lock:
            for stream in self._running:
                stream.cancel()
        self.watchdog.close()

    def _watch(self):
        """End the streams whose requests are cancelled.

        Also of those that wait, or of which a prompt is read.
        """
        while not self._ended.wait(self._period):
            with self._lock:  # a sender is not asked any more once its last response may be out
                for stream, sender in self._running.items():
                    if not stream.is_cancelled and sender.is_cancelled():
                        stream.cancel()

    def _start(self, request, sender):
        # Inputs may be read until `execute` returns, and not after it.
        try:
            bodies = self._bodies(request)
        except server.ServerError as error:
            return sender.send(server.error_response(error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        left = [len(bodies)]
        for number, body in enumerate(bodies):
            threading.Thread(target=self._run, args=(sender, body, number, left), daemon=True).start()

    def _bodies(self, request):
        inputs = server.arrays(request)
        sizes = {len(array) for array in inputs.values()}
        if len(sizes) != 1:
            raise server.ServerError(400, f"batch: expected one size of all inputs, found {sorted(sizes)}")
        # Parameters have names that are no input's, so they do not hide one.
        common = {**json.loads(request.parameters() or "{}"), "triton_final_response": True}
        common |= {} if "exclude_input_in_output" in inputs else {"exclude_input_in_output": self._exclude}
        common |= {"id": request.request_id()} if request.request_id() else {}
        common |= {} if {"stream", "streaming"} & inputs.keys() else {self.stream_input: False}
        return [
            common | {name: server.text_or_error(name, array[row]) for name, array in inputs.items()}
            for row in range(sizes.pop())
        ]

    @property
    def stream_input(self):
        return "streaming" if "output_ids" in self.types else "stream"

    def _run(self, sender, body, number, left):
        """Send the responses of one prompt; the last one of the last prompt is final."""
        stream, final, states = None, False, {}
        try:
            stream = server.Stream(self.path, self.name, body)
            with self._lock:
                self._running[stream] = sender
            for event in stream:
                state = states.setdefault(event.get("sequence_index", 0), {})
                if "text_output" in event or "output_ids" in event:  # a request to stop another one has no output
                    response = self.response(self._respond(event, state, number, body))
                    final = event["triton_final_response"] and left == [1]
                    if final:
                        self._forget(stream)
                    sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
        except Exception as error:
            if stream is None or not stream.is_cancelled:
                # With its error: a final flag that follows an error does not end the request of an ensemble.
                final = left == [1]
                self._forget(stream)
                sender.send(server.error_response(error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
        finally:
            self._forget(stream)
            with self._lock:
                left[0] -= 1
                last = not left[0]
            if last and not final:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            if stream is not None:
                stream.close()

    def _forget(self, stream):
        with self._lock:
            self._running.pop(stream, None)

    def response(self, made):
        """Return Triton's response of arrays by name.

        Of those that the model's config has.
        """
        shaped = {name: np.array(value, self.types[name][0]) for name, value in made.items() if name in self.types}
        return pb_utils.InferenceResponse(
            [
                server.tensor(name, array.reshape((1,) * (self.types[name][1] - 1) + (-1,)))
                for name, array in shaped.items()
            ]
        )

    def _whole(self, request):
        """Return one response for all of a request, of a model that is not decoupled."""
        try:
            with contextlib.closing(server.Connection(self.path)) as connection:
                body = server.infer_body(request)
                return server.infer_response(
                    server.call(connection, "POST", f"/v2/models/{self.name}/infer", body), self.types
                )
        except Exception as error:
            return server.error_response(error)


def common_outputs(event, number, length):
    """Return the outputs that both models have.

    length: of the answer's new tokens; log-probabilities are zeros where the request has none.
    """
    log_probs = event.get("output_log_probs", [0.0] * length)
    return {
        "cum_log_probs": event.get("cum_log_probs", 0.0),
        "output_log_probs": log_probs if log_probs != [] else [0.0],
        "batch_index": number,
        "sequence_index": event.get("sequence_index", 0),
    }
