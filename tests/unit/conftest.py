"""The demo checkpoint, taken through the stages that others build on, once a test run."""

from pathlib import Path

import pytest
from demo_model import DEMO, GOLDEN

from lockstep import golden
from lockstep.cache.store import Cache
from lockstep.checkpoint import resolve
from lockstep.engine import build
from lockstep.paths import Results
from lockstep.split import export
from lockstep.weights import convert


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Results:
    """Results of "demo-llama" in fp32 and fp16: checkpoint, weights, graphs, engines. Read only: copy what a test changes."""
    results = Results(tmp_path_factory.mktemp("demo"))
    checkpoint = resolve(str(DEMO), DEMO, results.checkpoint("demo-llama"))
    for precision in ("fp32", "fp16"):
        export(checkpoint, precision, results.assembly("demo-llama", precision))
        convert(checkpoint, precision, results.weights("demo-llama", precision))
        build(results.assembly("demo-llama", precision), "onnxruntime", results.engines("demo-llama", precision, "onnxruntime"))
    return results


@pytest.fixture(scope="session")
def references(demo) -> Results:
    """`demo` with the references of 2 and all layers, for the prompts and texts of config/config.yaml."""
    prompts = {"max_new_tokens": GOLDEN.max_new_tokens, "prompts": [prompt.text for prompt in GOLDEN.prompts]}
    for layers in (2, "all"):
        golden.make_reference(demo.checkpoint("demo-llama"), layers, prompts, demo.reference("demo-llama", layers))
    return demo


@pytest.fixture(autouse=True)
def no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")
