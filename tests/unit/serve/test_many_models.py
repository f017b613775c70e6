"""Several fine-tunes in one server: each answers as an engine of it alone does, whatever happens to the others."""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from demo_model import CONFIG
from fine_tunes import add_fine_tune, make_fine_tunes

from lockstep.artifacts.weights import WeightsManifest
from lockstep.bundle.pack import pack
from lockstep.provenance.statements import build_key, write_statement
from lockstep.runtime import Engine, Model, ModelOptions, Request, Sampling
from lockstep.runtime.request import CheckpointFiles
from lockstep.runtime.target import open_model, open_tokenizer
from lockstep.stages import STAGES
from lockstep.step.advance import Advance
from lockstep.targets import Results, Target
from real_server import RealServer
from some import some

grpc = pytest.importorskip("grpc")
from lockstep_serve.triton.grpc_messages import MESSAGES, SERVICE  # noqa: E402

MODELS = ["demo-llama", "tuned", "other"]
TARGETS = [f"{name}/fp32/all" for name in MODELS]
PROMPTS = ["Once upon a time", "The pendulum", "San Francisco is a"]


@pytest.fixture(scope="module")
def tree(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fine_tunes(tmp_path_factory.mktemp("fine-tunes") / "results", demo, CONFIG, MODELS[1:])


def answers(server: RealServer, model: str) -> list[tuple[str, object]]:
    """Return text and log-probabilities, which have all bits of float32, of each prompt."""
    choices = []
    for prompt in PROMPTS:
        (choice,) = server.complete(prompt, 24, model=model, logprobs=2)["choices"]
        choices.append((choice["text"], choice["logprobs"]["token_logprobs"]))
    return choices


@pytest.fixture(scope="module")
def alone(tree: Path) -> dict[str, list[tuple[str, object]]]:
    """Return the answers of engines with one model each, as `answers` has them."""
    expected: dict[str, list[tuple[str, object]]] = {}
    for name, target in zip(MODELS, TARGETS, strict=True):
        engine = Engine(open_model(target, tree))
        completions = engine.generate(PROMPTS, open_tokenizer(target, tree), Sampling(logprobs=2), 24)
        expected[name] = []
        for (choice,) in (completion.choices for completion in completions):
            assert choice.logprobs is not None
            expected[name].append((choice.text, [entry.chosen for entry in choice.logprobs]))
    assert len({json.dumps(answer) for answer in expected.values()}) == len(MODELS)
    return expected


def check_together(server: RealServer, alone: dict[str, list[tuple[str, object]]]) -> None:
    with ThreadPoolExecutor(6) as pool:
        results = [(name, pool.submit(answers, server, name)) for name in 4 * MODELS]
    for name, result in results:
        assert result.result() == alone[name]
    server.wait_idle()


def test_each_model_answers_as_alone_whatever_the_others_do(
    tree: Path, alone: dict[str, list[tuple[str, object]]], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    options = (*TARGETS[1:], "--max-loaded-models", 2, "--request-log", log)
    with RealServer(tree, *options, target=TARGETS[0]) as server:
        cards = server.get("/v1/models")["data"]
        assert [card["id"] for card in cards] == MODELS and len({card["root"] for card in cards}) == 3
        check_together(server, alone)
        index = json.loads(server.request("POST", "/v2/repository/index", b"")[2])
        assert [entry["name"] for entry in index][:3] == MODELS and index[3]["name"] == "ensemble"
        for name in MODELS:
            body = {"text_input": PROMPTS[0], "max_tokens": 24, "exclude_input_in_output": True}
            answer = server.post(f"/v2/models/{name}/generate", **body)
            assert answer["text_output"] == alone[name][0][0] and answer["model_name"] == name
        assert server.get("/v2/models/tuned/stats")["model_stats"][0]["inference_count"] == 1
        metrics = server.request("GET", "/metrics")[2].decode()
        tokens = re.findall(r'lockstep:generation_tokens_total{model_name="(.+)"} (.+)', metrics)
        times = re.findall(r'lockstep:inter_token_latency_seconds_count{model_name="(.+)"} (.+)', metrics)
        for series in (tokens, times):
            assert [name for name, _ in series] == MODELS and all(float(count) > 40 for _, count in series), metrics
        status, _, body = server.request("POST", "/v1/completions", {"model": "none", "prompt": "a"})
        assert status == 404 and b"expected one of demo-llama, tuned, other, found 'none'" in body
    logged = map(json.loads, log.read_text().splitlines())
    assert [line["model"] for line in logged if "/generate" in line["endpoint"]] == MODELS


def grpc_models(server: RealServer, key: str) -> list[str]:
    port = server.line.strip().rpartition(":")[2]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        read = MESSAGES["RepositoryIndexResponse"].FromString
        call = channel.unary_unary(f"/{SERVICE}/RepositoryIndex", response_deserializer=read)
        models = call(b"", metadata=[("authorization", f"Bearer {key}")], timeout=60).models
    return [model.name for model in models if model.name in MODELS]


def check_keys(server: RealServer) -> None:
    """A key with names is one of a server with these models alone; nothing tells of others."""
    opened = {
        "all-models": ["demo-llama", "other", "tuned"],
        "first-two": ["demo-llama", "tuned"],
        "last-one": ["other"],
    }
    for key, names in opened.items():
        server.headers = {"Authorization": f"Bearer {key}"}
        assert [card["id"] for card in server.get("/v1/models")["data"]] == names
        index = json.loads(server.request("POST", "/v2/repository/index", b"")[2])
        assert [entry["name"] for entry in index if entry["name"] in MODELS] == names
        assert grpc_models(server, key) == names
        generate = {"text_input": "a", "max_tokens": 1}
        for name in MODELS[1:]:
            status = server.request("POST", f"/v2/models/{name}/generate", generate)[0]
            assert status == (200 if name in names else 404)
        for name in (*MODELS, None):
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            status, _, data = server.request("POST", "/v1/completions", body)
            answer = json.loads(data)
            if name is None or name in names:
                assert (status, answer["model"]) == (200, name or names[0])
                continue
            paths = (f"/v1/models/{name}", f"/v2/models/{name}")
            assert status == 404 and all(server.request("GET", path)[0] == 404 for path in paths)
            assert answer["error"]["message"].endswith(f"{', '.join(names)}, found {name!r}")
        for path in ("/metrics", "/status"):
            assert server.request("GET", path)[0] == (200 if key == "all-models" else 403)
        for path in ("/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (server.request("POST", path, {})[0] == 403) == (key != "all-models")


def test_a_folder_of_bundles_is_served_after_the_targets(
    tree: Path, alone: dict[str, list[tuple[str, object]]], tmp_path: Path
) -> None:
    for name in MODELS[1:]:
        target = Target(name, "fp32", "all", "onnxruntime")
        config = CONFIG.model_copy(update={"models": {name: CONFIG.models["demo-llama"]}})
        for stage in ("export", "convert", "build"):
            job = STAGES[stage].job(config, tree, vars(target))
            if stage != "build":
                job = replace(job, inputs={})  # which such a tree does not have
            write_statement(job, build_key(job))
        limits = CONFIG.limits.plain()
        if name == "other":  # checked to shorter requests, and smaller steps
            limits = replace(limits, max_batch_size=2, max_seq_len=64, max_input_len=32)
        pack(Results(tree), target, limits, tmp_path / f"{name}.tar", with_weights=True)
    (tmp_path / "notes.txt").write_text("no bundle")
    keys = tmp_path / "keys"
    keys.write_text("all-models\nfirst-two demo-llama tuned\nlast-one other")
    options = ("--models", tmp_path, "--max-loaded-models", 1, "--api-key-file", keys, "--grpc-port", 0)
    with RealServer(tree, *options, target=TARGETS[0]) as server:
        check_keys(server)
        server.headers = {"Authorization": "Bearer all-models"}
        cards = {card["id"]: card["max_model_len"] for card in server.get("/v1/models")["data"]}
        assert cards == {"demo-llama": 256, "other": 64, "tuned": 256}
        for model, status in (("other", 400), ("tuned", 200)):
            body = {"model": model, "prompt": "Light", "max_tokens": 64}
            assert server.request("POST", "/v1/completions", body)[0] == status
        assert server.get("/status")["limits"]["max_batch_size"] == 2
        check_together(server, alone)


def test_a_model_that_is_damaged_stops_no_other_and_a_dead_engine_none(
    tree: Path, alone: dict[str, list[tuple[str, object]]], tmp_path: Path
) -> None:
    copy = Results(Path(shutil.copytree(tree, tmp_path / "results")))
    manifest_path = copy.weights("tuned", "fp32")
    manifest = WeightsManifest.load(manifest_path)
    path = manifest_path.parent / manifest.files[0].path
    data = path.read_bytes()

    def error_of_tuned() -> str:
        status, _, body = server.request("POST", "/v1/completions", {"model": "tuned", "prompt": "a"})
        assert status == 503
        assert answers(server, "demo-llama") == alone["demo-llama"]
        return json.loads(body)["error"]["message"]

    # In memory are the first and the other one: the damaged one is loaded when it is requested.
    with RealServer(copy.root, *TARGETS[:0:-1], "--max-loaded-models", 2, target=TARGETS[0]) as server:
        path.unlink()
        assert "found none; restore it or convert the checkpoint again" in error_of_tuned()
        path.write_bytes(data[:-4])
        assert f"expected {len(data)} bytes, found {len(data) - 4}" in error_of_tuned()
        path.write_bytes(bytes(4) + data[4:])
        assert "found sha256" in error_of_tuned() or "expected sha256" in error_of_tuned()
        path.write_bytes(data)
        place = min(manifest.numbered)
        moved = {**manifest.numbered, place: manifest.numbered[max(manifest.numbered)]}
        WeightsManifest(manifest.precision, manifest.files, moved).save(manifest_path)
        assert "expected the weights of when they were opened, found others" in error_of_tuned()
        manifest.save(manifest_path)
        assert answers(server, "tuned") == alone["tuned"]
        # Killed while it loads another model, or before: its requests go to the next engine, which needs no files but
        # those of the models that are requested.
        other_path = copy.weights("other", "fp32").with_name(path.name)
        data = other_path.read_bytes()
        other_path.unlink()
        with ThreadPoolExecutor(2) as pool:
            with server.stopped_engine():
                pending = [pool.submit(answers, server, name) for name in MODELS[:2]]
                server.wait_until(lambda status: status["streams"] == 2)
                metrics = server.request("GET", "/metrics")[2].decode()
                waiting = re.findall(r'lockstep:num_requests_waiting{model_name="(.+)"} (.+)', metrics)
                assert dict(waiting) == {"demo-llama": "1.0", "other": "0.0", "tuned": "1.0"}
                os.kill(server.engine_pid, signal.SIGKILL)
            assert [result.result() for result in pending] == [alone[name] for name in MODELS[:2]]
        status, _, body = server.request("POST", "/v1/completions", {"model": "other", "prompt": "a"})
        assert status == 503 and b"found none; restore it" in body
        other_path.write_bytes(data)
        assert answers(server, "other") == alone["other"]
        # Without the weights of the first one, which were converted anew, no engine starts.
        first_path = copy.weights("demo-llama", "fp32")
        first = WeightsManifest.load(first_path)
        names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(2)]
        moved = {**first.numbered, names[0]: first.numbered[names[1]]}
        WeightsManifest(first.precision, first.files, moved).save(first_path)
        os.kill(server.engine_pid, signal.SIGKILL)
        refused = "weights.json: expected engines and weights of when the server started, found others"
        server.wait_until(lambda _: refused in server.stderr)
        first.save(first_path)
        server.wait_until(lambda status: status["ready"])
        check_together(server, alone)


def open_checkpoints(tree: Path, first: str, others: list[str], max_bound: int | None = None) -> Model:
    results = Results(tree)
    assembly = str(results.assembly("demo-llama", "fp32"))
    tunes = [CheckpointFiles(name, assembly, str(results.weights(name, "fp32"))) for name in others]
    options = ModelOptions(max_batch_size=2, max_seq_len=64, threads=1, others=tunes, max_bound=max_bound)
    engines = results.engines("demo-llama", "fp32", "onnxruntime")
    return Model.open(engines, assembly, results.weights(first, "fp32"), options=options)


def logits_of(model: Model, network: int = 0) -> np.ndarray:
    """Return the logits of a prompt, and of a token after it."""
    prompt, token = Advance(0, np.array([1, 2, 3]), 0, network=network), Advance(0, np.array([4]), 3, network=network)
    return np.concatenate([model.step([prompt]), model.step([token])])


def test_checkpoints_share_the_blocks_whose_numbers_are_equal(tree: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tree, tmp_path / "results", copy_function=os.link))
    add_fine_tune(Results(copy), "two-layers", layers="[12]")
    both = open_checkpoints(copy, "demo-llama", ["two-layers"])
    base, tuned = both.executor.networks  # type: ignore[attr-defined]
    shared = [block is other for block, other in zip(base.blocks, tuned.blocks, strict=True)]
    # A block ends at a layer's attention, and begins after that of the layer before.
    assert shared == [True, True, False, False, False, *[True] * (len(shared) - 5)] and len(shared) > 5
    for network, name in enumerate(("demo-llama", "two-layers")):
        assert np.array_equal(logits_of(both, network), logits_of(open_checkpoints(copy, name, [])))


@pytest.mark.parametrize("count", some([40, 1000]))
def test_switches_leave_nothing_behind(tree: Path, count: int) -> None:
    """One model is in memory at a time, and each two requests are of another one than those before."""
    model = open_checkpoints(tree, MODELS[0], MODELS[1:], 1)
    engine = Engine(model)

    def switch(times: int) -> None:
        for name in itertools.islice(itertools.cycle([*MODELS[1:], ""]), times):
            assert len(list(engine.run([Request([1, 2, 3], 2, checkpoint=name)] * 2))) == 4

    def resources() -> tuple[int, int, int]:
        """Return how many files are open, how many are mapped, and the bytes of memory."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        maps = Path("/proc/self/maps").read_text().count(str(tree))
        return len(os.listdir("/proc/self/fd")), maps, pages * mmap.PAGESIZE

    switch(30)
    before = resources()
    switch(count)
    after = resources()
    assert model.checkpoints.residency is not None and model.checkpoints.residency.loads == 30 + count
    assert after[:2] == before[:2]
    nbytes = Results(tree).weights(MODELS[0], "fp32").with_name("weights.safetensors").stat().st_size
    assert after[2] - before[2] < count / 4 * nbytes  # a leak of each model is four times that; allocators keep some
