"""The models preprocessing and postprocessing: text to tokens, or back.

Of a Triton repository that `lockstep triton` wrote. The server does it: a request is passed on as it is.
"""

import contextlib
import http.client

import lockstep_http as server
import lockstep_watchdog


class TritonPythonModel:
    """The model, with one thread and one connection.

    Responses of a stream leave in the order in which they came.
    """

    def initialize(self, args):
        self._watchdog = lockstep_watchdog.Watchdog()
        self._path = f"/v2/models/{args['model_name']}/infer"
        self._types = server.output_types(args)
        self._connection = server.Connection(server.parameters(args)["lockstep_socket"], 60)

    def execute(self, requests):
        return [self._response(request) for request in requests]

    def finalize(self):
        self._connection.close()
        self._watchdog.close()

    def _response(self, request):
        try:
            body = server.infer_body(request, self._types)
            try:
                answer = server.call(self._connection, "POST", self._path, body)
            except (ConnectionError, http.client.HTTPException):
                # The server ended, or closed a connection that was idle. Doing a step twice changes nothing.
                self._connection.close()
                answer = server.call(self._connection, "POST", self._path, body)
            return server.infer_response(answer, self._types)
        except Exception as error:
            with contextlib.suppress(OSError):
                self._connection.close()
            return server.error_response(error)
