"""The model tensorrt_llm: tokens in, tokens out; starts the server if needed."""
# Of a repository that `lockstep triton` wrote. The server of all models is started where none listens, and ended here.

import contextlib
import shlex
import threading

import lockstep_http as server
import lockstep_process
import lockstep_streams
import triton_python_backend_utils as pb_utils

_WINDOW = 32  # tokens before a piece by which postprocessing knows its spaces and unfinished characters


class TritonPythonModel:
    def initialize(self, args):
        given = server.parameters(args)
        self._path, seconds = given["lockstep_socket"], float(given["lockstep_start_seconds"])
        self._process = lockstep_process.Process(self._path, shlex.split(given["lockstep_command"]), seconds)
        self._process.ensure()
        # Kept: a metric is of no use once its family is deleted.
        self._family = pb_utils.MetricFamily("lockstep_requests", "Requests, by state.", pb_utils.MetricFamily.GAUGE)
        self._gauges = {state: self._family.Metric(labels={"state": state}) for state in ("running", "waiting")}
        self._streams = lockstep_streams.Streams(args, self._respond)
        self._ended, period = threading.Event(), int(given["stats_check_period_ms"]) / 1000
        # The only thread that touches metrics: several kill Triton's stub process.
        self._reporter = threading.Thread(target=self._report, args=(period,), daemon=True)
        self._reporter.start()

    def execute(self, requests):
        return self._streams.execute(requests)

    def finalize(self):
        self._ended.set()
        self._process.stop()
        self._reporter.join()
        self._streams.close()

    def _report(self, period):
        while not self._ended.wait(period):
            with contextlib.suppress(Exception):  # of any kind: nothing else starts the server again
                if self._process.has_died():
                    self._process.ensure()
                with contextlib.closing(server.Connection(self._path, 10)) as connection:
                    status = server.call(connection, "GET", "/status")
                self._streams.watchdog.check()
                for state, gauge in self._gauges.items():
                    gauge.set(status[state])

    def _respond(self, event, state, number, body):
        length, ids = event["sequence_length"], event["output_ids"]
        ids = (ids if isinstance(ids, list) else [ids])[:length]
        has_prompt = not (body.get("streaming") == [True] or body["exclude_input_in_output"] in (True, [True]))
        num_prompt = body["input_lengths"][0]
        # Postprocessing keeps nothing between pieces: each brings tokens before it, else it would be a text's first.
        before = state.get("ids", [] if has_prompt else body["input_ids"][:num_prompt][-_WINDOW:])
        state["ids"] = (before + ids)[-_WINDOW:]
        made = lockstep_streams.common_outputs(event, number, length - num_prompt * has_prompt)
        made |= {"output_ids": ids or [-1], "sequence_length": length, "CONTEXT_IDS": before or [-1]}
        return made | {"IS_LAST": event["answer_ended"]}
