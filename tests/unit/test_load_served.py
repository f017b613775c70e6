"""`lockstep load` against `lockstep serve`, the real one: every endpoint, and what it counts and checks there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_model import DEMO
from test_load import told

from lockstep.load import endpoints
from lockstep.load.http import Client, NoAnswer
from lockstep.load.records import Planned, Prompt, Record
from lockstep.load.report import LoadReport
from lockstep.targets import Results
from real_server import RealServer, make_tree
from some import some

TEXTS = ("Once upon a time", "What is machine learning?", "San Francisco is a", "Ice floats because", "The")
DRAWN = ("--token-norm-dist", "20,6,12,4", "--requests", 12, "--seed", 3)
KEY = "a-key"


@pytest.fixture(scope="module")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(make_tree(tmp_path_factory.mktemp("load") / "results", demo), "--grpc-port", 0) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def guarded(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, Path]]:
    """One that wants a key, and the file with it."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text(f"{KEY}\n")
    tree = make_tree(folder / "results", demo)
    with RealServer(tree, "--api-key-file", folder / "keys", "--grpc-port", 0) as server:
        yield server, folder / "keys"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of which some end by themselves."""
    path = tmp_path_factory.mktemp("dataset") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "max_tokens": 24}) + "\n" for text in TEXTS))
    return path


def grpc_port(server: RealServer) -> int:
    return int(server.line.rpartition(":")[2])


def where(server: RealServer, endpoint: str) -> list[object]:
    """The address of an endpoint, and the options that name it."""
    if endpoint == "grpc":
        return [f"127.0.0.1:{grpc_port(server)}", "-i", "grpc"]
    return [server.url, "--endpoint", endpoint]


def measured(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> tuple[LoadReport, list[Any]]:
    """The report of a run, and its records."""
    code, _, said = told(capsys, *arguments, "--out", folder)
    assert code == 0, said
    return LoadReport.load(folder / "load.json"), [
        json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("endpoint", some(["completions", "grpc", "chat", "triton"]))
def test_texts_of_a_file_are_the_same_alone_streamed_and_together(
    server: RealServer, capsys: pytest.CaptureFixture[str], dataset: Path, endpoint: str
) -> None:
    arguments = [*where(server, endpoint), "--dataset", dataset, "--functional", "--exact", "--json"]
    code, out, said = told(capsys, *arguments)
    assert code == 0, said
    assert json.loads(out) == {"prompts": len(TEXTS), "different": []}


@pytest.mark.long
def test_all_endpoints_count_the_same_tokens(
    server: RealServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, dataset: Path
) -> None:
    counts = {}
    for endpoint in ("completions", "triton", "grpc"):
        for ids in ((), ("--tokenizer-dir", DEMO)):
            folder = tmp_path / f"{endpoint}{len(ids)}"
            _, records = measured(capsys, folder, *where(server, endpoint), "--dataset", dataset, *ids)
            counts[folder.name] = [record["output_tokens"] for record in records]
    # OpenAI's usage counts the token that ends a text; the models of Triton do not give it out.
    openai = counts.pop("completions0")
    assert counts.pop("completions2") == openai
    for name, found in counts.items():
        assert all(few in (many, many - 1) for few, many in zip(found, openai)), name
        assert found == counts["grpc0"], name


def test_a_refusal_that_comes_before_the_request_is_written_is_told_as_it_is(guarded: tuple[RealServer, Path]) -> None:
    """Over gRPC a server may end a stream while the client still writes: that the write failed is not what counts."""
    address = f"127.0.0.1:{grpc_port(guarded[0])}"

    async def ask(endpoint: endpoints.Endpoint) -> str:
        try:
            path, body = endpoints.request("grpc", Prompt("word " * 20_000, 1), "", {})
            await endpoint.ask(Planned(0, 0.0, body, path), Record(0, 0.0), 0.0, limit=60)
        except NoAnswer as error:
            return str(error)
        return "an answer"

    async def ask_many() -> set[str]:
        async with endpoints.opened(Client(address), "grpc") as endpoint:
            return {said for _ in range(10) for said in await asyncio.gather(*(ask(endpoint) for _ in range(20)))}

    found = asyncio.run(ask_many())
    assert found == {"gRPC UNAUTHENTICATED: authorization: expected 'Bearer' and a key of this server, found nothing"}


def test_what_fits_no_endpoint_is_one_line(
    server: RealServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "chat.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "a"}]}]))
    for arguments, expected in (
        (["-i", "grpc", "--endpoint", "chat", *DRAWN], "expected --endpoint triton over gRPC, found chat"),
        (["--endpoint", "triton", "--dataset", tmp_path / "chat.json"], "token ids, found messages"),
        (["--endpoint", "triton", "--model", "gpt", *DRAWN], "HTTP 404"),
        (["--endpoint", "triton", "--body", '{"beam_width": 4}', *DRAWN], "beam_width"),
    ):
        code, _, said = told(capsys, server.url, *arguments)
        assert code in (1, 2) and expected in said and "Traceback" not in said, said
    grpc = [f"127.0.0.1:{grpc_port(server)}", "-i", "grpc", *DRAWN]
    code, _, said = told(capsys, *grpc, "--body", '{"beam_width": 4}')
    assert code == 1 and "beam_width" in said, said
    code, _, said = told(capsys, "127.0.0.1:1", "-i", "grpc", *DRAWN)
    assert code == 1 and "gRPC UNAVAILABLE" in said, said
