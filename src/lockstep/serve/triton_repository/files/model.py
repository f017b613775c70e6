"""A model of a repository that `lockstep triton` wrote: it asks the server, which tensorrt_llm starts if needed."""

import json
import threading

import lockstep_http as http
import lockstep_process
import lockstep_watchdog
import triton_python_backend_utils as pb_utils

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        name = args["model_name"]
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        given = {key: value for key, value in given.items() if value not in ("", "none")}
        self._types = {each["name"]: pb_utils.triton_string_to_numpy(each["data_type"]) for each in config["output"]}
        self._excludes_input = given.get("exclude_input_in_output", "").lower() == "true"
        self._is_decoupled = config["model_transaction_policy"]["decoupled"]
        self._path = given["lockstep_socket"]
        self._url = f"/v2/models/{name}/infer"
        # One thread and one connection: responses of a stream leave postprocessing in the order in which they came.
        self._connection = http.Connection(self._path, 60 if name in ("preprocessing", "postprocessing") else None)
        self._watchdog = lockstep_watchdog.Watchdog()
        self._process = lockstep_process.Process(given, self._watchdog) if "lockstep_command" in given else None
        # senders of responses, by stream
        self._running = {}
        self._lock = threading.Lock()
        period = float(given.get("cancellation_check_period_ms", 100)) / 1000
        self._watcher = lockstep_watchdog.Every(period, self._end_cancelled)

    def execute(self, requests):
        """Return a response for each request; None where the model is decoupled: they come later."""
        if not self._is_decoupled:
            return [self._whole(request) for request in requests]
        for request in requests:  # inputs may be read until `execute` returns, and not after it
            sender = request.get_response_sender()
            try:
                body = http.infer_body(request, self._excludes_input)
            except http.ServerError as error:
                sender.send(http.error_response(error), _FINAL)
            else:
                threading.Thread(target=self._stream, args=(body, sender), daemon=True).start()

    def finalize(self):
        if self._process is not None:
            self._process.close()
        self._watcher.close()
        with self._lock:
            for stream in self._running:
                stream.cancel()
        self._connection.close()
        self._watchdog.close()

    def _whole(self, request):
        try:
            body = http.infer_body(request, self._excludes_input)
            return http.infer_response(self._connection.ask("POST", self._url, body), self._types)
        except Exception as error:
            self._connection.close()
            return http.error_response(error)

    def _stream(self, body, sender):
        """Send the responses of a request as its events come; the last one is final."""
        stream = None
        is_final = False
        try:
            stream = http.Stream(self._path, f"{self._url}_stream", body)
            with self._lock:
                self._running[stream] = sender
            for event in stream:
                if event["outputs"]:  # a request to stop another one has none
                    response = http.infer_response(event, self._types)
                    is_final = event["parameters"]["triton_final_response"]
                    if is_final:
                        self._forget(stream)
                    sender.send(response, _FINAL if is_final else 0)
        except Exception as error:
            if not is_final and (stream is None or not stream.is_cancelled):
                # With its error: a final flag that follows an error does not end the request of an ensemble.
                is_final = True
                self._forget(stream)
                sender.send(http.error_response(error), _FINAL)
        finally:
            self._forget(stream)
            if not is_final:
                sender.send(flags=_FINAL)
            if stream is not None:
                stream.close()

    def _forget(self, stream):
        with self._lock:
            self._running.pop(stream, None)

    def _end_cancelled(self):
        """End the streams whose requests are cancelled, also those that wait, or of which a prompt is read."""
        with self._lock:  # a sender is not asked any more once its last response may be out
            for stream, sender in self._running.items():
                if not stream.is_cancelled and sender.is_cancelled():
                    stream.cancel()
