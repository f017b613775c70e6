"""Several checkpoints on a GPU, here the fake one: weights are copied into networks whose addresses stay."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from demo_model import CONFIG, LIMITS
from fine_tunes import make_fine_tunes

import fake_gpu
from lockstep.artifacts.files import read_json
from lockstep.backends.builder import build
from lockstep.errors import InputError
from lockstep.runtime import Engine, Model, ModelOptions, Request, Sampling
from lockstep.runtime.request import CheckpointFiles
from lockstep.runtime.step_sizes import compare_step_sizes
from lockstep.step.sampling import Logprobs
from lockstep.targets import Results
from lockstep.weights.replacement import write_manifest

SIZES = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
NAMES = ["tuned", "other", "third"]


@pytest.fixture(scope="module")
def results(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("fine-tunes-gpu") / "results"
    return Results(make_fine_tunes(folder, demo, CONFIG, NAMES, "fp16"))


@pytest.fixture
def gpu() -> Iterator[fake_gpu.Gpu]:
    with fake_gpu.installed(name="cuda") as gpu:
        yield gpu
    assert not gpu.faults


def open_model(
    results: Results, folder: Path, first: str, more: Sequence[str] = (), max_bound: int | None = None
) -> Model:
    assembly = results.assembly("demo-llama", "fp16")
    engines = folder / "engines" / "engines.json"
    if not engines.is_file():
        build(assembly, "cuda", engines, SIZES)
    files = [CheckpointFiles(name, str(assembly), str(results.weights(name, "fp16"))) for name in more]
    weights = results.weights(first, "fp16")
    return Model.open(engines, assembly, weights, 2, ModelOptions(**SIZES, others=files, max_bound=max_bound))


def answers(model: Model, checkpoints: list[str]) -> dict[str, list[int]]:
    """Return the tokens of a request of each checkpoint, which run at a time."""
    prompt = np.random.default_rng(0).integers(0, 768, 70)
    tokens: dict[str, list[int]] = {name: [] for name in checkpoints}
    for token in Engine(model).run([Request(prompt, 6, checkpoint=name) for name in checkpoints]):
        tokens[checkpoints[token.request]].append(token.token)
    return tokens


@pytest.mark.parametrize("max_bound", [2, None])
def test_each_checkpoint_answers_as_alone(results: Results, gpu: fake_gpu.Gpu, tmp_path: Path, max_bound) -> None:
    alone = {}
    for name in ["demo-llama", *NAMES]:
        alone[name] = answers(open_model(results, tmp_path, name), [""])[""]
    alone[""] = alone.pop("demo-llama")
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    model = open_model(results, tmp_path, "demo-llama", NAMES, max_bound)
    for _ in range(3):
        assert answers(model, ["", *NAMES]) == alone
    if max_bound:
        assert model.checkpoints.residency is not None and model.checkpoints.residency.loads > 3
    assert model.checkpoints.residency is not None and (model.checkpoints.residency.places == -1).all()


def test_weights_of_a_folder_take_the_place_of_others_and_given_answers_have_their_bits(
    results: Results, gpu: fake_gpu.Gpu, tmp_path: Path
) -> None:
    tuned = open_model(results, tmp_path, "tuned")
    assert compare_step_sizes(tuned, 100).equal == (1, 2, 4)
    expected = answers(tuned, [""])[""]
    model = open_model(results, tmp_path, "demo-llama")
    assert answers(model, [""])[""] != expected
    engine = Engine(model)
    before = engine.root_key("", None, "")
    write_manifest(results.weights("tuned", "fp16").parent, results.weights("demo-llama", "fp16"), tmp_path / "w.json")
    identity = engine.update_weights(tmp_path / "w.json")
    assert identity == engine.root_key("", None, "").hex() != before.hex()
    prompts = [np.random.default_rng(seed).integers(0, 768, length).tolist() for seed, length in enumerate((70, 5, 33))]
    assert answers(model, [""])[""] == expected
    requests = [Request(prompt, 20, sampling=Sampling(1.2, seed=3, logprobs=1)) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[Logprobs | None]] = [[] for _ in requests]
    for token in engine.run(requests):
        tokens[token.request].append(token.token)
        logprobs[token.request].append(token.logprobs)
    assert engine.score(prompts, tokens, 1) == logprobs == Engine(tuned).score(prompts, tokens, 1)


def test_equal_tensors_are_in_host_memory_once_and_are_not_copied(
    results: Results, gpu: fake_gpu.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep_gpu import weights as device_weights
    from lockstep_gpu.host_pool import HostPool

    pool = HostPool(1 << 30)
    monkeypatch.setattr(device_weights, "_pool", pool)
    model = open_model(results, tmp_path, "demo-llama", NAMES[:1], 1)
    assert len(list(model.checkpoints.preload())) == 2
    digests = set(pool._digests.values())
    assert len(digests) < len(pool._digests) and set(pool._pieces) == digests  # embedding and head are equal


@pytest.mark.parametrize("share", [0.0, 0.6, 2.0])
def test_weights_come_from_the_pool_and_from_files(
    results: Results, gpu: fake_gpu.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Where the pool has room for none, for some, and for all."""
    from lockstep_gpu import weights as device_weights
    from lockstep_gpu.host_pool import HostPool

    alone = {name: answers(open_model(results, tmp_path, name), [""])[""] for name in NAMES[:2]}
    size = read_json(results.weights("tuned", "fp16"))["files"][0]["size"]
    pool = HostPool(int(share * size))
    monkeypatch.setattr(device_weights, "_pool", pool)
    model = open_model(results, tmp_path, "demo-llama", NAMES[:2], 1)
    for _ in range(2):  # before and after
        assert answers(model, NAMES[:2]) == alone
        assert all(part is None for part in model.checkpoints.preload())
    assert answers(model, NAMES[:2]) == alone
    nbytes = sum(piece.nbytes for pieces in pool._pieces.values() for piece in pieces)
    assert nbytes <= share * size and bool(nbytes) == bool(share)


def test_weights_that_change_end_their_requests_alone(results: Results, gpu: fake_gpu.Gpu, tmp_path: Path) -> None:
    shutil.copytree(results.root, tmp_path / "changed")
    tree = Results(tmp_path / "changed")
    model = open_model(tree, tmp_path, "demo-llama", NAMES[:1], 1)
    for path in tree.weights("tuned", "fp16").parent.glob("*.safetensors"):
        path.unlink()
    engine = Engine(model)
    with pytest.raises(InputError, match="restore it or convert the checkpoint again"):
        list(engine.run([Request([1, 2, 3], 4, checkpoint="tuned")]))
    assert not engine.has_work and len(list(engine.run([Request([1, 2, 3], 4)]))) == 4
