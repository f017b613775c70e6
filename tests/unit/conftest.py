"""The demo checkpoint, taken through the stages that others build on, once a test run."""

import gc
import hashlib
import importlib
import json
import pickle
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_model import CONFIG, DEMO

import fake_gpu
from lockstep.artifacts.files import sha256_file
from lockstep.backends import build
from lockstep.checkpoint import resolve
from lockstep.checkpoint.tokenizer_file import check_loads
from lockstep.provenance.cache.store import Cache
from lockstep.targets import Results
from lockstep.verify import golden
from lockstep.weights import convert
from shared import Shared, shared_root


@pytest.fixture(scope="session")
def demo(shared: Shared) -> Results:
    """Results of "demo-llama" in fp32 and fp16: checkpoint, weights, graphs, engines. Read only: copy what a test
    changes."""
    return Results(shared.folder("demo", _make_demo))


def _make_demo(folder: Path) -> None:
    from lockstep.export import export  # loads torch

    results = Results(folder)
    checkpoint = resolve(str(DEMO), DEMO, results.checkpoint("demo-llama"))
    for precision in ("fp32", "fp16"):
        export(checkpoint, precision, results.assembly("demo-llama", precision))
        convert(checkpoint, precision, results.weights("demo-llama", precision))
        build(
            results.assembly("demo-llama", precision),
            "onnxruntime",
            results.engines("demo-llama", precision, "onnxruntime"),
        )


@pytest.fixture(scope="session")
def demo_bf16(shared: Shared) -> Results:
    """Results of "demo-llama" in bf16: checkpoint, weights, graphs. Read only."""

    def make(folder: Path) -> None:
        from lockstep.export import export  # loads torch

        results = Results(folder)
        checkpoint = resolve(str(DEMO), DEMO, results.checkpoint("demo-llama"))
        export(checkpoint, "bf16", results.assembly("demo-llama", "bf16"))
        convert(checkpoint, "bf16", results.weights("demo-llama", "bf16"))

    return Results(shared.folder("demo-bf16", make))


@pytest.fixture(scope="session")
def references(demo: Results, shared: Shared) -> Results:
    """`demo` with the references of 2 and all layers, for the prompts and texts of config/config.yaml."""

    def make(folder: Path) -> None:
        shutil.copytree(demo.root, folder, dirs_exist_ok=True)
        results = Results(folder)
        for layers in (2, "all"):
            golden.make_reference(
                results.checkpoint("demo-llama"),
                layers,
                CONFIG.reference_terms("demo-llama"),
                results.reference("demo-llama", layers),
            )

    return Results(shared.folder("references", make))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global traces_anew
    traces_anew = item.get_closest_marker("traces") is not None


traces_anew = False


def is_patched(module: str) -> bool:
    """Whether a model's module is a test's own, or a test has put a function or method there."""
    values = list(vars(sys.modules[module]).values())
    values += [method for value in values if isinstance(value, type) for method in vars(value).values()]
    files = {value.__code__.co_filename for value in values if isinstance(value, types.FunctionType)}
    return any(file.startswith(str(TESTS)) for file in files)


TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def each_model_is_traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A trace of layers takes seconds, and many tests export the same models: once a test run for each content, but
    for tests marked `traces`. Of the processes that tests start, each traces by itself."""
    unique_layers = sys.modules.get("lockstep.export.unique_layers")  # where no test loads it, it loads torch
    if unique_layers is None:
        yield
        return
    own, shared = unique_layers._cut, Shared(shared_root(tmp_path_factory.getbasetemp()))

    def cut(meta, indices):
        kind = type(meta)
        if traces_anew or is_patched(kind.__module__):
            return own(meta, indices)
        look = unique_layers._look(meta, {})  # the module tree, its tensors and plain settings
        content = [f"{kind.__module__}.{kind.__qualname__}", meta.config.to_json_string(False), look, list(indices)]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        make = lambda folder: (folder / "cut.pickle").write_bytes(pickle.dumps(own(meta, indices)))
        return pickle.loads((shared.folder(f"traces/{digest}", make) / "cut.pickle").read_bytes())

    unique_layers._cut = cut
    yield
    unique_layers._cut = own


@pytest.fixture(autouse=True)
def no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)


@pytest.fixture(autouse=True)
def each_tokenizer_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`resolve` loads a tokenizer in a process of its own: once for each content that has passed."""

    def check(path: Path) -> None:
        if (content := sha256_file(path)) not in PASSED:
            check_loads(path)
            PASSED.add(content)

    # by its name: the package has a function of that name too
    monkeypatch.setattr(importlib.import_module("lockstep.checkpoint.resolve"), "check_loads", check)


PASSED: set[str] = set()  # tokenizer files, by digest


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def tensorrt_version() -> str:
    """The version that `gpu` has: a module of tests may have a fixture of this name for another one."""
    return "8.6.0"


@pytest.fixture
def gpu(tensorrt_version: str) -> Iterator[fake_gpu.Gpu]:
    """The fake GPU with CUDA, cuDNN and TensorRT of that version. Nothing wrong may have been done to it."""
    with fake_gpu.installed(tensorrt_version) as gpu:
        yield gpu
        gc.collect()
    assert not gpu.faults
