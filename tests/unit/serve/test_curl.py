"""`curl` lines of the documents, and those that users of Triton's backend type, by a shell on the real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from demo_model import ROOT

from real_server import RealServer

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed here")
PROMPT = "What is machine learning?"
BODY = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
# A command in a block of code, to the end of the block or to an empty line.
COMMAND = re.compile(r"^(?: {4})?curl .*?(?=\n\n|\n```|\Z)", re.DOTALL | re.MULTILINE)
DOCUMENTED = []
for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
    for number, command in enumerate(COMMAND.findall(page.read_text())):
        DOCUMENTED.append(pytest.param(command, id=f"{page.name}-{number}"))


def shell(server: RealServer, command: str, folder: Path) -> str:
    """What a command prints that a user types where a server listens at port 8000."""
    typed = command.replace("localhost:8000", f"localhost:{server.port}")
    typed = re.sub(r"\bcurl ", "curl --silent --show-error --fail-with-body ", typed)
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", typed], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    return ended.stdout


def objects(text: str) -> list[Any]:
    """JSON objects, one after another."""
    results = []
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        results.append(value)
        text = text[end:].strip()
    return results


def test_the_documents_have_a_command() -> None:
    assert len(DOCUMENTED) >= 1


@pytest.mark.parametrize("command", DOCUMENTED)
def test_a_command_of_the_documents_is_answered(server: RealServer, command: str, tmp_path: Path) -> None:
    command = command.replace("my-tuned", "demo-llama")  # the reader's own model in the tutorial
    assert shell(server, command, tmp_path).strip()


def test_twenty_at_once_from_a_file_get_one_text(server: RealServer, tmp_path: Path) -> None:
    (tmp_path / "tmp.txt").write_text(json.dumps(BODY))
    post = "curl -X POST localhost:8000/v2/models/ensemble/generate -d @tmp.txt"
    (alone,) = objects(shell(server, post, tmp_path))
    assert alone["text_output"].startswith(PROMPT) and len(alone["text_output"]) > len(PROMPT)
    answers = objects(shell(server, f"printf '%s\\n' {{1..20}} | xargs -I % -P 20 {post}", tmp_path))
    assert answers == [alone] * 20


def test_a_stream_comes_as_events(server: RealServer, tmp_path: Path) -> None:
    (tmp_path / "tmp.txt").write_text(json.dumps({**BODY, "stream": True}))
    full = server.post("/v2/models/ensemble/generate", **BODY)["text_output"]
    printed = shell(server, "curl -N -X POST localhost:8000/v2/models/ensemble/generate_stream -d @tmp.txt", tmp_path)
    events = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: ")]
    assert PROMPT + "".join(event["text_output"] for event in events) == full
