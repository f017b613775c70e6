"""Bundles whose digests are right and whose documents say absurd things: one line, or the right text; never a
traceback, a hang, or memory or files beyond reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_model import DEMO, LIMITS
from recorded import recorded

import fuzz_bundle
from lockstep.bundle.pack import pack
from lockstep.targets import Results, Target

TARGET = Target("demo-llama", "fp16", 2, "onnxruntime")
ROOT = Path(__file__).parents[3]
# Where another value is another model, or other text from it, and no absurdity.
OTHER_TEXT = ("graphs/tokenizer.json: ", "weights/weights.json: tensors.", "bundle.json: target.layers")


@pytest.fixture(scope="module")
def bundles(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Of two layers, with and without weights: the archive, and the folder of its weights or "-"."""
    folder = tmp_path_factory.mktemp("bundles")
    results = recorded(demo, folder / "results")
    return {
        name: (pack(results, TARGET, LIMITS, folder / f"{name}.tar", name == "inside"), where)
        for name, where in (("apart", str(DEMO)), ("inside", "-"))
    }


def tried(bundle: Path, weights: str, work: Path) -> list[dict[str, Any]]:
    """What came of each case, the unchanged bundle first."""
    work.mkdir()
    environment = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "TMPDIR": str(work),
        "HOME": str(work),
        "LOCKSTEP_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # its cached files are no writes of the bundle's
        "PATH": "/usr/bin:/bin",
    }
    command = [sys.executable, fuzz_bundle.__file__, str(bundle), weights, str(work)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert ended.returncode == 0, f"{ended.returncode} at {lines[-1:]}: {ended.stderr[-500:]}"
    assert not [line for line in lines if "wrote" in line]
    assert [path.name for path in work.iterdir() if path.name.startswith("lockstep")] == []
    return [line for line in lines if "outcome" in line]


def wrong(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    expected = cases[0]["outcome"]
    assert expected.startswith("text: ")
    wrong_cases = []
    for case in cases:
        outcome = case["outcome"]
        is_refusal = outcome.startswith("refused: ") and len(outcome.splitlines()) == 1 and len(outcome) < 1000
        is_other_text = outcome.startswith("text: ") and case["path"].startswith(OTHER_TEXT)
        if outcome != expected and not is_refusal and not is_other_text:
            wrong_cases.append(case)
    return wrong_cases


@pytest.mark.long
@pytest.mark.parametrize("name", ["apart", "inside"])
def test_a_sealed_bundle_with_absurd_values_is_one_line_or_runs_as_before(
    bundles: dict, tmp_path: Path, name: str
) -> None:
    cases = tried(*bundles[name], tmp_path / "work")
    assert len(cases) > 5000 and sum(case["outcome"].startswith("refused: ") for case in cases) > len(cases) / 2
    assert not wrong(cases)


NAMED = {
    "a cache beyond any memory": ("graphs/assembly.json", ("kinds", "attention", "num_kv_heads"), 10**9,
        "kinds.attention.prefill: key: expected num_tokens, 40000000000"),
    "a backend that is a path": ("bundle.json", ("target", "backend"), "../x",
        "bundle.json: target.backend: expected a backend's name, found '../x'"),
    "another backend": ("bundle.json", ("target", "backend"), "tensorrt",
        "engines/engines.json: expected tensorrt, as bundle.json says, found onnxruntime"),
    "a number of layers that it lacks": ("bundle.json", ("target", "layers"), 7,
        "layers: expected 1 to 6 or 'all', found 7"),
    "an engine that lies elsewhere": ("engines/engines.json", ("engines", "entry", "file"), "../x",
        "engines.entry.file: expected the name of a file in its folder, found '../x'"),
    "a slot of another block": ("graphs/assembly.json", ("layers", 0, "block", "class"), "exit",
        "layers[0].block.slots: expected"),
    "a size that the graphs have not": ("graphs/assembly.json", ("vocab_size",), 769,
        "vocab_size: expected num_requests, 769, found ['num_requests', 768]"),
    "a key that is missing": ("graphs/assembly.json", ("max_position_embeddings",), fuzz_bundle.MISSING,
        "expected an object with max_position_embeddings,"),
    "a file again and again": ("weights/weights.json", ("files",), fuzz_bundle.AGAIN,
        "files: expected each file once, found 'model.safetensors'"),
    "not a number": ("engines/engines.json", ("engines",), float("nan"), "expected JSON, found NaN, which is no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("document, path, value, line", NAMED.values(), ids=NAMED)
def test_what_is_wrong_is_named(
    bundles: dict, tmp_path: Path, document: str, path: tuple, value: Any, line: str
) -> None:
    bundle, weights = bundles["apart"]
    fuzz_bundle.Bundle(bundle).write(tmp_path / "case.tar", document, path, value)
    outcome = fuzz_bundle.outcome(tmp_path / "case.tar", Path(weights))
    assert outcome.startswith("refused: ") and line in outcome


def test_engines_of_other_sizes_than_the_assembly_says_are_refused(bundles: dict, tmp_path: Path) -> None:
    """An assembly that agrees with itself, and not with its engines: heads of half the size, twice as many."""
    bundle, weights = bundles["apart"]
    source = fuzz_bundle.Bundle(bundle)
    text = json.dumps(source.documents["graphs/assembly.json"]["kinds"]["attention"])
    for old, new in (
        ('"num_kv_heads": 2', '"num_kv_heads": 4'),
        ('"num_heads": 6', '"num_heads": 12'),
        ('head_dim": 40', 'head_dim": 20'),
        ("2, 40]", "4, 20]"),
        ('2, "past_capacity", 40', '4, "past_capacity", 20'),
    ):
        assert old in text
        text = text.replace(old, new)
    source.write(tmp_path / "case.tar", "graphs/assembly.json", ("kinds", "attention"), json.loads(text))
    assert "'past_key': expected float16 [1, 4, any, 20], found float16 [1, 2, any, 40]" in fuzz_bundle.outcome(
        tmp_path / "case.tar", Path(weights)
    )
