"""`POST /update_weights`: a running server gets the weights of a folder, between steps, and loses no request."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import CONFIG
from fine_tunes import make_fine_tunes
from safetensors.numpy import load_file, save_file

from lockstep.runtime import Engine, Model, Request, Sampling
from lockstep.targets import Results
from real_server import RealServer

PROMPTS = [list(range(3, 12)), list(range(100, 180))]
NEW = 24


@pytest.fixture(scope="module")
def tree(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fine_tunes(tmp_path_factory.mktemp("updates") / "results", demo, CONFIG, ["tuned"])


@pytest.fixture(scope="module")
def root(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of weights: those of the demo and of its fine-tune, and wrong ones."""
    root = tmp_path_factory.mktemp("weights")
    for name in ("demo-llama", "tuned"):
        manifest = Results(tree).weights(name, "fp32")
        folder = root / name
        folder.mkdir()
        for file in json.loads(manifest.read_text())["files"]:
            shutil.copy(manifest.parent / file["path"], folder / Path(file["path"]).name)
    tensors = load_file(*(root / "tuned").iterdir())
    name = "model.layers.0.mlp.up_proj.weight"
    changed = {
        "shape": {**tensors, name: np.ascontiguousarray(tensors[name][1:])},
        "dtype": {**tensors, name: tensors[name].astype(np.float16)},
        "extra": {**tensors, "extra": tensors[name]},
        "missing": {other: values for other, values in tensors.items() if other != name},
    }
    for fault, values in changed.items():
        (root / fault).mkdir()
        save_file(values, root / fault / "model.safetensors")
    (root / "cut").mkdir()
    data = (root / "missing" / "model.safetensors").read_bytes()
    (root / "cut" / "model.safetensors").write_bytes(data[:-100])
    (root / "empty").mkdir()
    (root / "linked").mkdir()
    (root / "linked" / "model.safetensors").symlink_to(next((tree / "tuned").rglob("*.safetensors")).resolve())
    return root


@pytest.fixture(scope="module")
def expected(tree: Path) -> dict[str, list[Any]]:
    """Return by model the tokens and log-probabilities of each prompt."""
    answers: dict[str, list[Any]] = {}
    results = Results(tree)
    for name in ("demo-llama", "tuned"):
        engines = results.engines(name, "fp32", "onnxruntime")
        engine = Engine(Model.open(engines, results.assembly(name, "fp32"), results.weights(name, "fp32")))
        sampling = Sampling(logprobs=0)
        rows: list[Any] = [([], []) for _ in PROMPTS]
        for token in engine.run([Request(prompt, NEW, sampling=sampling) for prompt in PROMPTS]):
            assert token.logprobs is not None
            rows[token.request][0].append(token.token)
            rows[token.request][1].append(token.logprobs.chosen)
        answers[name] = rows
    return answers


@pytest.fixture(scope="module")
def server(tree: Path, root: Path) -> Iterator[RealServer]:
    with RealServer(tree, "--allow-weight-updates", root) as server:
        yield server


def complete(server: RealServer) -> tuple[tuple[int, str], list[Any]]:
    """Return version and fingerprint of an answer, and its choices as `expected` has them."""
    body = {"temperature": 0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    answer = server.complete(PROMPTS, NEW, **body)
    choices = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    return (answer["weights_version"], answer["system_fingerprint"]), choices


def update(server: RealServer, path: object) -> tuple[int, Any]:
    status, _, data = server.request("POST", "/update_weights", {"path": str(path)})
    return status, json.loads(data)


def test_each_answer_is_of_one_version_and_none_is_lost(server: RealServer, expected: dict[str, list[Any]]) -> None:
    first = server.get("/status")["weights"]
    assert first["checked"] and first["weights_version"] == 0
    names = ["demo-llama", "tuned", "demo-llama"]
    fingerprints = [first["system_fingerprint"]]
    with ThreadPoolExecutor(3) as pool:
        for version, name in enumerate(names[1:], start=1):
            running = [pool.submit(complete, server) for _ in range(6)]
            status, answer = update(server, name)
            assert status == 200 and answer["weights_version"] == version and not answer["checked"], answer
            fingerprints.append(answer["system_fingerprint"])
            for result in [*running, pool.submit(complete, server)]:
                (number, fingerprint), choices = result.result()
                assert number in (version - 1, version) and fingerprint == fingerprints[number]
                assert choices == expected[names[number]]
            assert number == version and server.get("/status")["weights"] == answer
    assert len(set(fingerprints)) == 3
    assert "weights 1: those of" in server.stderr and "no check has seen" in server.stderr


@pytest.mark.parametrize(
    "path, status, message",
    [
        ("shape", 400, "model.layers.0.mlp.up_proj.weight': expected F32 ["),
        ("dtype", 400, "as served, found F16 ["),
        ("extra", 400, "tensors that are served, found also extra"),
        ("missing", 400, "tensors that are served, found no model.layers.0.mlp.up_proj.weight"),
        ("cut", 400, "bytes, as its header says, found"),
        ("empty", 400, "expected files *.safetensors, found none"),
        ("absent", 400, "expected files *.safetensors, found none"),
        ("..", 403, "expected a folder in that of --allow-weight-updates, found '..'"),
        ("/etc", 403, "expected a folder in that of --allow-weight-updates"),
        ("linked", 403, "expected a folder in that of --allow-weight-updates"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    server: RealServer, root: Path, path: str, status: int, message: str
) -> None:
    before = server.get("/status")["weights"]
    actual, answer = update(server, path)
    assert actual == status and message in answer["error"]["message"]
    assert server.get("/status")["weights"] == before and complete(server)[0][0] == before["weights_version"]


def test_an_update_waits_for_what_runs_and_no_other_one_begins(
    server: RealServer, expected: dict[str, list[Any]]
) -> None:
    before = server.get("/status")["weights"]["weights_version"]
    with ThreadPoolExecutor(3) as pool:
        with server.stopped_engine():
            running = pool.submit(complete, server)
            server.wait_until(lambda status: status["streams"])
            first = pool.submit(update, server, "tuned")
            server.wait_until(lambda status: status["weights"]["updating"])
            assert update(server, "demo-llama")[0] == 409
            late = pool.submit(complete, server)
        assert running.result()[0][0] == before
        assert first.result()[1]["weights_version"] == before + 1
        assert late.result()[0][0] == before + 1 and late.result()[1] == expected["tuned"]


def test_a_new_engine_has_the_weights_that_the_killed_one_had(
    server: RealServer, root: Path, expected: dict[str, list[Any]]
) -> None:
    _, answer = update(server, "tuned")
    killed = server.engine_pid
    os.kill(killed, signal.SIGKILL)
    about, choices = complete(server)
    assert server.engine_pid != killed and choices == expected["tuned"]
    assert about == (answer["weights_version"], answer["system_fingerprint"])
