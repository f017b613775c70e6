"""A model of a repository that `lockstep triton` wrote: a client of the server, which tensorrt_llm starts if needed."""

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
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        parameters = {key: value for key, value in parameters.items() if value not in ("", "none")}
        self._types = {}
        for output in config["output"]:
            self._types[output["name"]] = pb_utils.triton_string_to_numpy(output["data_type"])
        self._excludes_input = parameters.get("exclude_input_in_output", "").lower() == "true"
        self._is_decoupled = config["model_transaction_policy"]["decoupled"]
        self._path = parameters["lockstep_socket"]
        self._url = f"/v2/models/{name}/infer"
        # One thread and one connection, so that postprocessing keeps the order of a stream's responses.
        timeout = 60 if name in ("preprocessing", "postprocessing") else None
        self._connection = http.Connection(self._path, timeout)
        self._watchdog = lockstep_watchdog.Watchdog()
        self.process = None
        if "lockstep_command" in parameters:
            self.process = lockstep_process.Process(parameters, self._watchdog)
        self.running = {}  # senders of responses, by stream
        self._lock = threading.Lock()
        period = float(parameters.get("cancellation_check_period_ms", 100)) / 1000
        self._watcher = lockstep_watchdog.Every(period, self._end_cancelled)

    def execute(self, requests):
        """Return a response for each request; None where the model is decoupled: they come later."""
        if not self._is_decoupled:
            return [self._infer(request) for request in requests]
        for request in requests:  # their inputs must be read before `execute` returns
            sender = request.get_response_sender()
            try:
                body = http.infer_body(request, self._excludes_input)
            except http.ServerError as error:
                sender.send(http.error_response(error), _FINAL)
            else:
                threading.Thread(target=self._stream, args=(body, sender), daemon=True).start()

    def finalize(self):
        if self.process is not None:
            self.process.close()
        self._watcher.close()
        with self._lock:
            for stream in self.running:
                stream.cancel()
        self._connection.close()
        self._watchdog.close()

    def _infer(self, request):
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
                self.running[stream] = sender
            for event in stream:
                if event["outputs"]:  # a request that stops another one has none
                    response = http.infer_response(event, self._types)
                    is_final = event["parameters"]["triton_final_response"]
                    if is_final:
                        self._forget(stream)
                    sender.send(response, _FINAL if is_final else 0)
        except Exception as error:
            if not is_final and (stream is None or not stream.is_cancelled):
                # One response with both: a final flag after an error does not end an ensemble's request.
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
            self.running.pop(stream, None)

    def _end_cancelled(self):
        """Close the streams of cancelled requests, also of those that wait for their first token."""
        with self._lock:  # a sender must not be used after its last response
            for stream, sender in self.running.items():
                if not stream.is_cancelled and sender.is_cancelled():
                    stream.cancel()
