"""Steps of all sizes of rows give the bits of a request alone, and the comparison sees where they do not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from engine_steps import open_model

from lockstep.cli.main import main
from lockstep.runtime import Model
from lockstep.runtime.step_sizes import compare_step_sizes
from lockstep.step.advance import Advance
from lockstep.targets import Results
from real_server import make_tree


@pytest.fixture(scope="module")
def model(demo: Results) -> Model:
    return open_model(demo, max_batch_size=6, max_seq_len=64)


def test_all_sizes_agree_and_nothing_is_left_in_the_slots(model: Model) -> None:
    sizes = compare_step_sizes(model, 100)
    assert sizes.equal == (1, 2, 4, 6) and not sizes.differing and not sizes.untried
    assert str(sizes).startswith("steps of 1, 2, 4, 6 rows: the bits of a request alone, in all logits (")
    pool = model.tables.pool
    assert all(model.length(slot) == 0 for slot in range(6)) and pool.num_available == pool.num_pages


@pytest.mark.parametrize("num_tokens", [4, 4 * 9, 3 + 9], ids=["decode", "prompts", "both"])
def test_another_last_bit_in_steps_of_a_size_is_seen(
    model: Model, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    logits = model.executor.logits

    def faulty(advances: Sequence[Advance]) -> np.ndarray:
        values = logits(advances)
        if sum(len(advance.tokens) for advance in advances) == num_tokens:
            values[-1, 5] = np.nextafter(values[-1, 5], np.float32(0))
        return values

    monkeypatch.setattr(model.executor, "logits", faulty)
    sizes = compare_step_sizes(model, 100)
    assert sizes.equal == (1, 2) and sizes.differing == 4 and sizes.untried == (6,)
    assert "steps of 4 rows have others; not tried: 6" in str(sizes)
    assert all(model.length(slot) == 0 for slot in range(6))


def test_sizes_without_room_in_the_cache_are_untried(demo: Results, model: Model) -> None:
    small = open_model(demo, max_batch_size=6, max_seq_len=64, kv_bytes=3 * model.tables.pool.page_nbytes)
    sizes = compare_step_sizes(small, 100)
    assert sizes.equal == (1, 2) and not sizes.differing and sizes.untried == (4, 6)
    assert small.tables.pool.num_available == small.tables.pool.num_pages


def test_doctor_prints_what_agrees(demo: Results, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "results", demo)
    arguments = ["doctor", "--gpu", "demo-llama/fp32", "--results", str(tree)]
    as_text, as_json = (CliRunner().invoke(main, [*arguments, *options]) for options in ([], ["--json"]))
    assert re.search(r"^steps of 1, 2, 4 rows: the bits of a request alone, in all logits \(", as_text.stdout, re.M)
    assert json.loads(as_json.stdout)["step_sizes"]["equal"] == [1, 2, 4]


def test_sizes_without_time_are_said_to_be_untried(model: Model) -> None:
    sizes = compare_step_sizes(model, 0)
    assert sizes.equal == () and sizes.untried == (1, 2, 4, 6)
