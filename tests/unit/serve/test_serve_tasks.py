"""Tasks and threads of a server that end: another one is started, or the server ends; none waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import queue
import resource
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from demo_model import LIMITS

from lockstep.errors import CheckError, InputError
from lockstep.runtime.grammar.trial import Refusal, TrialProcess
from lockstep.runtime.tokenizer import Tokenizer, tokenizer_path
from lockstep.targets import Results
from lockstep.verify.served.client import Answer, complete, get
from lockstep_serve import adapter_loader, link
from lockstep_serve.adapter_loader import AdapterLoader
from lockstep_serve.bodies import Access
from lockstep_serve.frames import Load
from lockstep_serve.log import log, start_log
from lockstep_serve.run import listening
from lockstep_serve.service import Service
from lockstep_serve.settings import EngineOptions, ServedModelOptions, ServiceOptions
from real_server import ENDS
from some import some

ASKED = {"model": "demo-llama", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of the log."""
    lines: list[str] = []
    monkeypatch.setattr(log, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(log.handlers[0], "handle", lambda record: lines.append(record.getMessage()))
    return lines


@pytest.fixture
def service(demo: Results, lines: list[str]) -> Service:
    """The demo's service, not started; `lines`: its log."""
    paths = [demo.engines("demo-llama", "fp32", "onnxruntime")]
    paths += [demo.assembly("demo-llama", "fp32"), demo.weights("demo-llama", "fp32")]
    options = EngineOptions(*map(str, paths), "all", asdict(LIMITS), threads=1)
    tokenizer = Tokenizer.open(paths[1])
    return Service(ServiceOptions([ServedModelOptions("demo-llama", tokenizer)], options))


async def answered(socket: Path, at_first: Callable[[], None] | None = None) -> Answer:
    """The answer to `ASKED`. at_first: called when its first token is there."""
    answer = Answer()
    async for partial_answer in complete(socket, ASKED):
        answer = partial_answer
        if at_first is not None:
            at_first()
            at_first = None
    return answer


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(ENDS):
        while not holds():
            await asyncio.sleep(0.02)


def break_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def broken(*arguments: Any) -> Any:
        setattr(owner, name, original)
        raise ValueError("a fault of the\ntest")

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("fault", some(["a frame that cannot be handled", "a frame that is none"]))
def test_another_engine_is_started_for_what_cannot_be_handled(
    service: Service, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async def run() -> tuple[Answer, Answer]:
        async with listening(service, tmp_path / "socket"):
            full = await answered(tmp_path / "socket")
            owner = (link, "unpacked")
            if fault != "a frame that is none":
                owner = (service.default.metrics.generation_tokens, "inc")
            return full, await answered(tmp_path / "socket", lambda: break_once(monkeypatch, *owner))

    full, broken = asyncio.run(run())
    assert broken == full and service.restarts == 1
    assert any("one of its frames cannot be handled: ValueError: a fault of the test (" in line for line in lines)


def test_a_token_that_cannot_be_handled_ends_its_own_answer(
    service: Service, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> list[Any]:
        async with listening(service, tmp_path / "socket"):
            full = await answered(tmp_path / "socket")
            break_it = functools.partial(break_once, monkeypatch, service.default.metrics, "token")
            tasks = (answered(tmp_path / "socket", break_it), answered(tmp_path / "socket"))
            return [full, *await asyncio.gather(*tasks, return_exceptions=True)]

    full, *answers = asyncio.run(run())
    assert full in answers and service.restarts == 0 and len(lines) == 1
    assert [str(item) for item in answers if item != full] == ["/v1/completions: the server failed; its log says why"]


def test_requests_wait_for_another_engine_however_many_descriptors_are_open(service: Service, tmp_path: Path) -> None:
    """The engine's socket then has a number that `select` does not take."""

    async def run() -> tuple[Answer, Answer]:
        async with listening(service, tmp_path / "socket"):
            full = await answered(tmp_path / "socket")
            with contextlib.ExitStack() as stack:
                while (number := os.dup(0)) < 1100:
                    stack.callback(os.close, number)
                os.close(number)
                assert service.engine_pid is not None
                os.kill(service.engine_pid, signal.SIGKILL)
                await until(lambda: not service.is_ready)
                return full, await asyncio.wait_for(answered(tmp_path / "socket"), ENDS)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    try:
        full, late = asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert late == full and service.restarts == 1


def test_a_grammar_is_tried_whatever_the_numbers_of_descriptors(demo: Results) -> None:
    text = tokenizer_path(demo.assembly("demo-llama", "fp32")).read_text()
    with contextlib.ExitStack() as stack:
        while (number := os.dup(0)) < 1100:
            stack.callback(os.close, number)
        os.close(number)
        trial = TrialProcess(text, 768, [0])
        stack.callback(trial.close)
        trial.check("regex", "[a-z]+", 30.0)
        with pytest.raises(Refusal):
            trial.check("regex", "[a-z", 30.0)


@pytest.mark.long
def test_an_engine_is_started_again_when_descriptors_are_free_again(
    service: Service, lines: list[str], tmp_path: Path
) -> None:
    async def run() -> None:
        async with listening(service, tmp_path / "socket"):
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            last = os.dup(0)
            os.close(last)
            resource.setrlimit(resource.RLIMIT_NOFILE, (last, limits[1]))  # open files stay open
            try:
                assert service.engine_pid is not None
                os.kill(service.engine_pid, signal.SIGKILL)
                await until(lambda: any("does not start" in line for line in lines))
                assert not service.is_ready and service.is_live
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await until(lambda: service.is_ready)
            assert (await answered(tmp_path / "socket")).finish == "length"

    asyncio.run(run())
    assert any("does not start: engine process: expected" in line for line in lines), lines
    assert service.restarts == 1


@pytest.mark.long
@pytest.mark.parametrize("task", ["measure", "resubmit"])
def test_a_task_that_ends_is_the_end_of_the_server(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """`measure` is of the task that watches, `resubmit` of the one that starts engines again."""

    def broken(*arguments: Any) -> None:
        raise ValueError("a fault of the test")

    async def fails_and_is_not_live() -> None:
        async with listening(service, tmp_path / "socket"):
            first = asyncio.create_task(answered(tmp_path / "socket", break_it))
            with pytest.raises(CheckError, match="the server failed; its log says why"):
                await asyncio.wait_for(first, ENDS)
            for path in ("/health/live", "/health/ready"):
                with pytest.raises(CheckError, match="503"):
                    await get(tmp_path / "socket", path)
            with pytest.raises(CheckError, match="server_failed|the server failed"):
                await answered(tmp_path / "socket")
            with pytest.raises(CheckError, match="expected its task .* to run, found ValueError: a fault of the test"):
                service.check()

    def break_it() -> None:
        monkeypatch.setattr(service, task, broken)
        if task == "resubmit":
            assert service.engine_pid is not None
            os.kill(service.engine_pid, signal.SIGKILL)
        else:  # its next look is in a second: the answer must not have ended by then
            assert service.engine_pid is not None
            os.kill(service.engine_pid, signal.SIGSTOP)

    asyncio.run(fails_and_is_not_live())


def test_a_line_has_a_level_and_one_that_nobody_reads_stops_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    start_log("warning")
    log.info("not this one")
    log.warning("a line")
    assert capsys.readouterr().err == "lockstep: warning: a line\n"

    def write(text: str) -> None:
        raise BrokenPipeError

    log.handlers[0].setStream(SimpleNamespace(write=write, flush=lambda: None))  # type: ignore[attr-defined]
    log.warning("a line")
    log.setLevel(logging.NOTSET)


def test_a_folder_that_cannot_be_read_is_told_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(folder: Path, name: str, *arguments: Any) -> str:
        if name == "first":
            raise OSError(24, "Too many open files")
        raise InputError(f"{name} is none")

    monkeypatch.setattr(adapter_loader, "read_folder", read)
    monkeypatch.setattr(adapter_loader.CheckpointManifest, "load", lambda path: None)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loader = AdapterLoader(SimpleNamespace(most_bytes=1), {"": "checkpoint.json"}, results.put)  # type: ignore[arg-type]
    for number, name in enumerate(("first", "second")):
        loader.start(Load(number, name, f"/{name}"))
    assert "expected an adapter, found OSError: [Errno 24] Too many" in results.get(timeout=ENDS).adapter
    assert results.get(timeout=ENDS) == (1, "second is none")


def test_a_fault_at_one_request_of_a_grpc_stream_is_its_answer() -> None:
    grpc = pytest.importorskip("grpc")
    from lockstep_serve.triton.grpc_messages import MESSAGES, SERVICE
    from lockstep_serve.triton.grpc_server import GrpcServer
    from lockstep_serve.triton.models import MODELS

    async def infer(infer_request: Any) -> Any:
        raise ValueError("a fault of the test")

    async def run() -> Any:
        service = SimpleNamespace(observers=(), limits=SimpleNamespace(slow_reader=30.0))
        triton: Any = SimpleNamespace(service=service, infer=infer, models=MODELS)
        server = GrpcServer(triton, Access(), "127.0.0.1", 0)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.stream_stream(
                f"/{SERVICE}/ModelStreamInfer",
                MESSAGES["ModelInferRequest"].SerializeToString,
                MESSAGES["ModelStreamInferResponse"].FromString,
            )(timeout=ENDS)
            await call.write(MESSAGES["ModelInferRequest"](id="7", model_name="ensemble"))
            answer = await call.read()
            call.cancel()
        await server.stop(0)
        return answer

    answer = asyncio.run(run())
    assert answer.infer_response.id == "7" and answer.error_message == "the server failed; its log says why"
