"""Adapters in NVIDIA's Triton Inference Server: six clients at once, three adapters and none, in one batch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lora_folders import CONFIG, LIGHT, TARGET, served_lora, sizes, tensors, write
from real_triton import TritonServer, write_repository

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import write_json
from lockstep.targets import Results
from lockstep.weights.check_adapters import resolve_adapters
from shared import Shared

TEXT = ["ensemble", "tensorrt_llm_bls"]
NAMES = (None, "captain", "other", "shakespeare")  # by lora_task_id
PROMPTS = ("Light", "San Francisco is a", "A bridge must carry its own weight before it can carry anything else.")


@pytest.fixture(scope="module")
def triton(demo: Results, shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The demo's two adapters and a random one, of which two are resident at a time."""
    folder = tmp_path_factory.mktemp("t")
    tree = Results(shutil.copytree(served_lora(demo, shared).root, folder / "results"))
    modules = sizes(Assembly.load(tree.assembly("demo-lora", "fp32")))
    other = write(folder / "other", 8, tensors(modules, 8, seed=3, size=0.5))
    folders = {**CONFIG.adapter_folders("demo-lora", [Path(__file__).parents[2]]), "other": other}
    sources = {name: str(path) for name, path in folders.items()}
    resolve_adapters(sources, folders, tree.checkpoint("demo-lora"), 8, None, tree.adapters("demo-lora"))
    config: Any = CONFIG.dump()
    config["models"]["demo-lora"]["adapters"]["other"] = {"source": str(other)}
    write_json(tree.config(), config)
    write_repository(TARGET, tree.root, folder / "repository")
    with TritonServer(Path(os.environ["LOCKSTEP_TRITON"]), folder / "repository", folder) as server:
        yield server


def say(triton: TritonServer, model: str, number: int, prompt: str = "Light", **options: Any) -> str:
    body = {"text_input": prompt, "max_tokens": 16, "exclude_input_in_output": True, **options}
    answer: str = triton.generate(model, **body, lora_task_id=number)["text_output"]
    return answer


@pytest.mark.parametrize("model", TEXT)
def test_each_adapter_says_what_it_says(triton: TritonServer, model: str) -> None:
    results = [say(triton, model, number).strip() for number in range(4)]
    for name, text in zip(NAMES, results, strict=True):
        assert name not in LIGHT or text.startswith(LIGHT[name].strip())
    assert len(set(results)) == 4


@pytest.mark.parametrize("model", TEXT)
def test_six_clients_at_once_get_what_each_gets_alone(triton: TritonServer, model: str) -> None:
    asks = [
        {"number": n % 4, "prompt": PROMPTS[n // 4 % 3], "temperature": 0.8, "top_k": 20, "seed": n} for n in range(24)
    ]
    alone = [say(triton, model, **ask) for ask in asks]
    with ThreadPoolExecutor(6) as clients:
        assert list(clients.map(lambda ask: say(triton, model, **ask), asks)) == alone
    assert len(set(alone)) > 12
    triton.wait_idle()


@pytest.mark.parametrize("model", TEXT)
def test_a_number_that_is_no_adapters_is_refused(triton: TritonServer, model: str) -> None:
    body = {"text_input": "Light", "max_tokens": 4, "lora_task_id": 4}
    status, data = triton.request("POST", f"/v2/models/{model}/generate", body)
    assert status >= 400 and b"expected 0 (none) to 3" in data and b"captain, other, shakespeare" in data
