"""A generator of clients, unchanged, on /openapi.json of `lockstep serve`: generated models read and reject bodies."""

from __future__ import annotations

import json
from pathlib import Path

from client import run_client

from real_server import RealServer

CHECK = """
import generated, pydantic
body = generated.ChatBody(messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream_options={})
print(body.model_dump_json(exclude_unset=True))
try:
    generated.ChatBody(messages=[], max_tokens="many")
except pydantic.ValidationError as error:
    print(error.error_count())
"""


def test_classes_of_bodies_are_made_of_it(server: RealServer, tmp_path: Path) -> None:
    (tmp_path / "openapi.json").write_bytes(server.request("GET", "/openapi.json")[2])
    options = ("--input-file-type", "openapi", "--output-model-type", "pydantic_v2.BaseModel")
    files = ("--input", "openapi.json", "--output", "generated.py")
    run_client("bfcl", "datamodel-codegen", *files, *options, work=tmp_path, cwd=tmp_path)
    body, errors = run_client("bfcl", "python", "-c", CHECK, work=tmp_path, cwd=tmp_path).split()
    sent = {**json.loads(body), "model": "demo-llama", "temperature": 0}
    assert server.post("/v1/chat/completions", **sent)["usage"]["completion_tokens"] == 3 and int(errors) > 0
