"""Each command of `python -m benchmarks`, started once: as small as it can be made, on the CPU or on the fake GPU."""

from __future__ import annotations

import contextlib
import copy
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import test_soak
from benchmarks import (
    batches,
    certify,
    certify_faults,
    chart,
    cold,
    gpu,
    gpu_transformers,
    invariance,
    many_models,
    serving,
)  # fmt: skip
from benchmarks.__main__ import bench
from benchmarks.cold import function_named
from benchmarks.measure import THREADS_VARIABLE, thread_count
from click.testing import CliRunner

import fake_gpu
import lockstep
from lockstep.artifacts.files import read_json, write_json
from lockstep.backends.builder import build
from real_server import make_tree
from shared import Shared
from some import some

# Started by the default run elsewhere.
ELSEWHERE = {"soak": test_soak.test_a_short_run_finds_nothing_and_asks_everything}
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 2048, "eos_token_id": 2,
}  # fmt: skip
ONE_ROUND = ("--rounds", 1)


@dataclass
class Here:
    """What a start may take."""

    folder: Path
    shared: Shared
    patch: pytest.MonkeyPatch
    stack: contextlib.ExitStack
    request: pytest.FixtureRequest
    device: fake_gpu.Gpu | None = None

    @property
    def shape(self) -> Path:
        """The name of a shape: that of its file, without the ending."""
        write_json(self.folder / "tiny.json", SHAPE)
        return self.folder / "tiny"

    @property
    def checkpoint(self) -> Path:
        def make(folder: Path) -> None:
            lockstep.make_random_checkpoint(f"{self.shape}.json", 0, folder / "tiny")

        return self.shared.folder("bench-checkpoint", make) / "tiny"

    def smaller(self, module: Any, **constants: Any) -> None:
        for name, value in constants.items():
            self.patch.setattr(module, name, value)

    def in_this_process(self) -> None:
        """Run here what would run in its own process."""
        self.smaller(cold, ask=_call)

    def on_the_fake_gpu(self) -> None:
        """Have all of the benchmark in this process, with the fake GPU, and transformers on the CPU."""
        self.device = self.stack.enter_context(fake_gpu.installed(name="cuda"))
        self.in_this_process()
        self.smaller(gpu, _in_transformers=_in_transformers)
        self.smaller(gpu, CONTEXT=20, PREFILL=40, WARM=2, STEPS=2)
        self.smaller(batches, CONTEXT=20, WARM=1, STEPS=2, MIXED_STEPS=1, BATCHES=(1, 4), SAMPLED_BATCHES=(2,))
        self.smaller(batches, ROWS=(1,), CHUNKS=(16,), PROMPTS=(40,), REQUESTS=2)
        self.smaller(batches, LIMITS={"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128})
        self.smaller(batches, lengths=lambda: (np.array([5, 9]), np.array([3, 2])))


def _call(function: str, /, **arguments: Any) -> Any:
    return function_named(function)(**arguments)


def _in_transformers(request: dict[str, Any]) -> Any:
    for layers in request.get("layers", ()):
        gpu_transformers.reference({**request, "device": "cpu"}, layers)
    return {"torch": gpu_transformers.torch.__version__}


@pytest.fixture
def case(
    tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Here]:
    monkeypatch.setenv(THREADS_VARIABLE, str(thread_count(None)))  # some set it
    with contextlib.ExitStack() as stack:
        case = Here(tmp_path, shared, monkeypatch, stack, request)
        yield case
    assert case.device is None or not case.device.faults


Start = Callable[[Here], Sequence[Any]]
STARTS: dict[str, tuple[Start, str]] = {}


def starts(command: str, measures: str) -> Callable[[Start], None]:
    """Give a command its start, which returns the arguments. measures: keys of its record, to something measured."""
    return lambda start: STARTS.update({command: (start, measures)})


@starts("cpu-peers", "peak_relative_to_weights")
def _(case: Here) -> Sequence[Any]:
    options = "--batch", 2, "--prompt", 4, "--context", 4, "--steps", 2, "--threads", 1, "--work", case.folder / "work"
    return "--model", case.checkpoint, "--contestant", "fp32", "--contestant", "transformers fp32", *options, *ONE_ROUND


@starts("throughput", "models demo-llama/fp32/all mixed seconds")
def _(case: Here) -> Sequence[Any]:
    tree = make_tree(case.folder / "results", case.request.getfixturevalue("demo"))
    sizes = "--requests", 2, "--mean-prompt", 4, "--mean-new", 2, "--prefix", 0
    return "--target", "demo-llama/fp32/all", "--results", tree, *sizes, *ONE_ROUND


class ServerStandIn(serving.Server):
    """A server that is no process."""

    url = "http://127.0.0.1:1"
    ready_seconds = 0.1

    def __enter__(self) -> ServerStandIn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def streams(self, number: int, rounds: int, seed: int = 0) -> dict[str, Any]:
        speeds = {"median": 1.0}
        return {"tokens_per_second": speeds, "api_cpu_microseconds_per_token": speeds}

    def wait_until_warm(self) -> float:
        return 0.2

    def refusals(self) -> dict[str, float]:
        return {"p50": 1.0, "p99": 1.0}


def _without_processes(case: Here) -> None:
    case.in_this_process()
    case.smaller(serving, Server=ServerStandIn, STREAMS_PROMPT=4, STREAMS_NEW=2)
    case.smaller(serving, load=create_autospec(serving.load, return_value={"ttft_p50_ms": 1.0}))
    case.smaller(serving, long_prompt=create_autospec(serving.long_prompt, return_value={}))


@starts("certify", "rows")
def _(case: Here) -> Sequence[Any]:
    case.smaller(certify, POWER_DRAWS=2)
    case.smaller(certify_faults, DTYPES=("bfloat16",), FAULTS=("fp8 by tensors",))
    return "--model", case.request.getfixturevalue("hypotheses"), "--draws", 2


@starts("serving", "models tiny streams 1 bare_tokens_per_second")
def _(case: Here) -> Sequence[Any]:
    case.smaller(serving, STREAMS_PROMPT=4, STREAMS_NEW=2, REFUSALS=2)
    return "--model", case.checkpoint, "--streams", 1, "--threads", thread_count(None), *ONE_ROUND


@starts("models", "families Qwen3 result")
def _(case: Here) -> Sequence[Any]:
    return ["Qwen3"]


@starts("families-gpu", "benchmark")
def _(case: Here) -> Sequence[Any]:
    return "Qwen3", "--seconds", 1  # its processes know no fake GPU: by then no family is done


@starts("many-models", "parts requests first_token_seconds all p99")
def _(case: Here) -> Sequence[Any]:
    case.in_this_process()
    case.smaller(many_models, PROMPT=8, NEW_TOKENS=2, STEPS=2, _serve=lambda place: {"ready": 1.0, "token": 1.0})
    case.smaller(many_models, LIMITS={"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 64})
    sizes = "--models", 3, "--loaded", 2, "--requests", 6, "--rate", 100, *ONE_ROUND
    target = "--precision", "fp32", "--backend", "onnxruntime"
    return "--shape", f"{case.shape}.json", "--work", case.folder / "work", *sizes, *target


@starts("gpu", "check all passes")
def _(case: Here) -> Sequence[Any]:
    case.on_the_fake_gpu()
    return "--shape", f"{case.shape}.json", "--work", case.folder / "work", *ONE_ROUND


@starts("batches", "mixed 1 16")
def _(case: Here) -> Sequence[Any]:
    case.on_the_fake_gpu()
    return "--shape", case.shape, "--work", case.folder / "work", *ONE_ROUND


@starts("invariance", "positions")
def _(case: Here) -> Sequence[Any]:
    case.on_the_fake_gpu()
    case.smaller(invariance, EDGES=(1, 64), NEW=2)
    case.smaller(invariance, LIMITS={"max_batch_size": 4, "max_num_tokens": 128, "max_seq_len": 128})
    return f"{case.shape}.json/fp16", "--layers", 2, "--positions", 20, "--work", case.folder / "work"


@starts("serving-gpu", "streams 64 bare_tokens_per_second")
def _(case: Here) -> Sequence[Any]:
    case.on_the_fake_gpu()
    _without_processes(case)
    work = case.folder / "work"
    assembly = case.shared.exported(SHAPE, "fp16") / "assembly.json"
    (work / "graphs").parent.mkdir()
    (work / "graphs").symlink_to(assembly.parent)
    gpu.random_weights(lockstep.Assembly.load(assembly), work / "weights")
    build(assembly, "cuda", work / "cuda" / "engines.json", batches.LIMITS)
    return "--work", work, "--requests", 1, *ONE_ROUND


def record_of(command: str, case: Here) -> dict[str, Any]:
    start, measures = STARTS[command]
    started = start(case)
    ended = CliRunner().invoke(bench, [command, *map(str, started)], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    record = document = (
        json.loads(ended.stdout) if ended.stdout.startswith("{") else read_json(Path(ended.stdout.strip()))
    )
    for key in measures.split():
        document = document[key]
    assert document, measures
    return record


@pytest.mark.exports
@pytest.mark.parametrize("command", some(sorted(set(bench.commands) - set(ELSEWHERE)), "throughput"))
def test_each_command_starts(command: str, case: Here) -> None:
    record = record_of(command, case)
    if command in ("gpu", "batches", "serving-gpu"):
        assert record["backend"] == "cuda" and {"cublas", "cudnn", "nvrtc"} < set(record["versions"])
        assert record["device"]["name"] == "fake"


@pytest.mark.long
@pytest.mark.exports
def test_invariance_goes_on_where_it_was_and_keeps_what_other_processes_gave(case: Here) -> None:
    arguments = [*STARTS["invariance"][0](case), "--backend", "onnxruntime"]
    # Room for chunks of 256, which are longer than the prompts: no schedule may cut these.
    case.smaller(invariance, LIMITS={"max_batch_size": 4, "max_num_tokens": 320, "max_seq_len": 128})
    runs = []
    for positions in (1, 1, 200):
        ended = CliRunner().invoke(bench, ["invariance", *map(str, arguments), "--positions", str(positions)])
        assert ended.exit_code == 0, ended.output
        runs.append(read_json(Path(ended.stdout.strip())))
    (row,) = runs[2]["models"].values()
    assert runs[0] == runs[1] and runs[0]["positions"] < 200 <= runs[2]["positions"] == row["positions"]
    assert runs[2]["differing"] == 0 and len(row["digests"]) == 1 and row["schedules"] > 1
    on_a_card = copy.deepcopy(runs[2])
    on_a_card["models"][next(iter(runs[2]["models"]))]["device"]["name"] = "NVIDIA H200"
    picture = ElementTree.fromstring(chart.draw_bits(on_a_card))
    assert f"{row['positions']:,}, 0 differ" in [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    path = Path(ended.stdout.strip())
    (name,) = runs[2]["models"]
    row["digests"] = ["of another process"]
    write_json(path, {**runs[2], "models": {name: {**row, "positions": 0}}})
    ended = CliRunner().invoke(bench, ["invariance", *map(str, arguments)])
    assert ended.exit_code == 1 and "found 0 positions that differ, and 2 digests" in ended.stderr, ended.output
