"""A server of onnxruntime-genai, for `lockstep certify`: one token an answer, in OpenAI's form.

    python genai_server.py FOLDER PORT

FOLDER: of genai's model builder (`genai_steps.py`), with tokenizer.json. Runs in the environment of envs/genai.txt.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading

import numpy as np
import onnxruntime_genai as og
from transformers import AutoTokenizer


class Engine:
    """A model of a folder, and its tokenizer."""

    def __init__(self, folder: str) -> None:
        self._model = og.Model(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._lock = threading.Lock()

    def answer(self, body: dict) -> dict:
        """Return the choice of a request for one token."""
        ids = self._ids(body)
        parameters = og.GeneratorParams(self._model)
        parameters.set_search_options(max_length=len(ids) + 1, do_sample=False)
        with self._lock:
            generator = og.Generator(self._model, parameters)
            generator.append_tokens(np.array([ids], np.int32))
            logits = generator.get_logits().reshape(-1).astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        likeliest = np.argsort(-logprobs)[: body.get("top_logprobs") or body["logprobs"]]
        entries = [
            {"token": self._tokenizer.decode(token), "id": token, "logprob": logprobs[token]}
            for token in likeliest.tolist()
        ]
        content = {"content": [{**entries[0], "top_logprobs": entries}]}
        text = entries[0]["token"]
        return {"index": 0, "text": text, "message": {"content": text}, "logprobs": content}

    def _ids(self, body: dict) -> list[int]:
        if "prompt" in body:
            return self._tokenizer(body["prompt"])["input_ids"]
        return self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)


class Handler(http.server.BaseHTTPRequestHandler):
    """POST of both of OpenAI's paths."""

    engine: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"choices": [self.engine.answer(body)]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    Handler.engine = Engine(sys.argv[1])
    http.server.ThreadingHTTPServer.request_queue_size = 128  # 65 connect at once
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
