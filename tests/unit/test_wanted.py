"""What a run asks for, and the pattern of many names."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from lockstep.config import load
from lockstep.pipeline.stages import all_steps
from lockstep.pipeline.wanted import Made, all_jobs, names_pattern, wanted
from lockstep.targets import Results

CONFIG = {
    "models": {
        name: {"source": source, "layers": [1, "all"], "golden": {"prompts": [{"text": "ab"}]}}
        for name, source in (("m", "folder"), ("r", "random:config.json"))
    }
}
CHAIN = [Made(["a"], []), Made(["b", "b2"], ["a"]), Made(["c"], ["b"]), Made(["d"], ["a"])]


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        ("", "c d"),  # a first run: the ends bring the rest
        ("a b b2 c d", "c d"),
        ("b b2 c d", "a c d"),
        ("a b2 c d", "b c d"),
        ("a b c d", "b2 c d"),
        ("c", "b c d"),  # which brings a
        ("a", "c d"),
    ],
)
def test_what_nothing_reads_and_what_was_lost_is_asked_for(there: str, asked: str) -> None:
    assert wanted(CHAIN, set(there.split()).__contains__) == asked.split()


def test_a_first_run_asks_for_the_config_and_the_last_results() -> None:
    config = load.load(CONFIG)
    jobs = all_jobs(config, Results(), all_steps(config, Results(), config.targets()))
    assert wanted(jobs, lambda path: False) == ["results/config.json", "results/report/error_by_layer.svg"]
    everything = {path for made in jobs for path in made.outputs}
    for lost in everything:
        assert lost in wanted(jobs, (everything - {lost}).__contains__), lost
    assert "results/r/source.json" in everything and "results/m/source.json" not in everything


def test_names_are_fitted_and_nothing_else_is() -> None:
    draw = random.Random(3)
    names = {"".join(draw.choices("ab.-", k=draw.randint(1, 5))) for _ in range(200)} | {"a", "aa", "aab"}
    pattern = re.compile(names_pattern(names))
    others = {"".join(draw.choices("ab.-x", k=draw.randint(0, 6))) for _ in range(2000)} - names
    assert all(pattern.fullmatch(name) for name in names)
    assert not any(pattern.fullmatch(name) for name in others)
    assert not re.search(names_pattern([]), "") and not re.search(names_pattern([]), "a")
    assert re.fullmatch(names_pattern(["a.b"]), "a.b") and not re.fullmatch(names_pattern(["a.b"]), "axb")


def test_the_longest_names_fit() -> None:
    names = ["a" * length for length in range(1, 101)]
    assert all(re.fullmatch(names_pattern(names), name) for name in names)
    assert not re.fullmatch(names_pattern(names), "a" * 101)


def test_pages_lie_in_a_folder_of_their_own() -> None:
    target = load.load(CONFIG).targets()[0]
    assert Results().target_page(target) == Path("results/report/targets/m-fp32-1-onnxruntime.html")
