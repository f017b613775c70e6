"""The demo checkpoint, taken through the stages that others build on. Once a test run."""

import gc
import importlib
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_model import CONFIG, DEMO

import fake_gpu
from fake_gpu import compiled
from lockstep.artifacts.files import read_json, sha256_file, sha256_json
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve, tokenizer_file
from lockstep.checkpoint.resolve import SIDE_FILES
from lockstep.provenance.cache import Cache
from lockstep.targets import Results
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.weights import convert
from real_server import RealServer, make_tree
from shared import Shared, shared_root

# ONNX Runtime's pool has one size in a process, and some tests ask for one thread.
os.environ.setdefault("LOCKSTEP_THREADS", "1")


@pytest.fixture(scope="session")
def demo(shared: Shared) -> Results:
    """Return results of "demo-llama" in fp32 and fp16.

    Checkpoint, weights, graphs, engines. Read only: copy what a test changes.
    """
    return Results(shared.folder("demo", _make_demo))


def _make_demo(folder: Path) -> None:
    from lockstep.export.run import export  # loads torch

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
        from lockstep.export.run import export  # loads torch

        results = Results(folder)
        checkpoint = resolve(str(DEMO), DEMO, results.checkpoint("demo-llama"))
        export(checkpoint, "bf16", results.assembly("demo-llama", "bf16"))
        convert(checkpoint, "bf16", results.weights("demo-llama", "bf16"))

    return Results(shared.folder("demo-bf16", make))


@pytest.fixture(scope="session")
def references(demo: Results, shared: Shared) -> Results:
    """Return `demo` with the references of 2 and all layers. For the prompts and texts of config/config.yaml."""

    def make(folder: Path) -> None:
        shutil.copytree(demo.root, folder, dirs_exist_ok=True)
        results = Results(folder)
        for layers in (2, "all"):
            make_reference(
                results.checkpoint("demo-llama"),
                layers,
                GoldenTerms.from_json(CONFIG.reference_terms("demo-llama")),
                results.reference("demo-llama", layers),
            )

    return Results(shared.folder("references", make))


@pytest.fixture(scope="session")
def hypotheses(references: Results, shared: Shared) -> Path:
    """Return the folder of "demo-llama" with hypotheses on an endpoint of it, of few questions. Read only."""
    from lockstep.certify.tables import make_hypotheses  # loads torch

    def make(folder: Path) -> None:
        shutil.copytree(references.root, folder, dirs_exist_ok=True, copy_function=os.link)
        results = Results(folder)
        out = folder / "demo-llama" / "hypotheses" / "all.json"
        out.parent.mkdir()
        reference = results.reference("demo-llama", "all")
        make_hypotheses(results.checkpoint("demo-llama"), reference, out, completions=60)

    return shared.folder("hypotheses", make) / "demo-llama"


@pytest.fixture(scope="session")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Serve the demo in fp32, for all tests that leave the server as it is; who needs options starts another."""
    with RealServer(make_tree(tmp_path_factory.mktemp("server") / "results", demo)) as running:
        yield running


@pytest.fixture(autouse=True)
def no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)


@pytest.fixture(autouse=True)
def each_tokenizer_is_loaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load a tokenizer once a test run for each content that has passed.

    `resolve` loads it in its own process, which imports transformers: more than a second.
    """
    shared = Shared(shared_root(tmp_path_factory.getbasetemp()))
    module = importlib.import_module("lockstep.checkpoint.resolve")  # the package has a function of that name too

    def check(path: Path) -> None:
        if (content := sha256_file(path)) not in PASSED:
            tokenizer_file.check_loads(path)
            PASSED.add(content)

    def load(folder: Path) -> tokenizer_file.TokenizerOfTransformers:
        paths = map(folder.joinpath, sorted({*SIDE_FILES} - {"config.json"}))
        files = tuple(sha256_file(path) if path.is_file() else "" for path in paths)
        files += (str(read_json(folder / "config.json").get("model_type")),)  # AutoTokenizer reads it

        def make(place: Path) -> None:
            (place / "loaded.pickle").write_bytes(pickle.dumps(tokenizer_file.load_as_transformers(folder)))

        return pickle.loads((shared.folder(f"tokenizers/{sha256_json(files)}", make) / "loaded.pickle").read_bytes())

    monkeypatch.setattr(module, "check_loads", check)
    monkeypatch.setattr(module, "load_as_transformers", load)


PASSED: set[str] = set()  # tokenizer files, by digest


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture(scope="session", autouse=True)
def each_kernel_is_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    compiled.folders = Shared(shared_root(tmp_path_factory.getbasetemp()))


@pytest.fixture
def tensorrt_version() -> str:
    """Return the version that `gpu` has. A module of tests may have a fixture of this name for another one."""
    return "10.6.0"


@pytest.fixture
def gpu(tensorrt_version: str) -> Iterator[fake_gpu.Gpu]:
    """Give the fake GPU with CUDA, cuDNN and TensorRT of that version. Nothing wrong may have been done to it."""
    with fake_gpu.installed(tensorrt_version) as gpu:
        yield gpu
        gc.collect()
    assert not gpu.faults
