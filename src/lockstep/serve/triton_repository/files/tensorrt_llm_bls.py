"""The model tensorrt_llm_bls: text in, text out.

Of a Triton repository that `lockstep triton` wrote. The server does all steps, so that stop words are looked for in the
text and no token goes through Triton three times.
"""

import lockstep_streams


class TritonPythonModel:
    def initialize(self, args):
        self._streams = lockstep_streams.Streams(args, self._respond)

    def execute(self, requests):
        return self._streams.execute(requests)

    def finalize(self):
        self._streams.close()

    def _respond(self, event, state, number, body):
        log_probs = event.get("output_log_probs", [])
        made = lockstep_streams.common_outputs(event, number, len(log_probs) if isinstance(log_probs, list) else 1)
        return made | {"text_output": event["text_output"].encode()}
