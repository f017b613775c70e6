"""State that is moved, and positions far from edges: the golden check finds each fault of them, and names it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from demo_model import LIMITS, TOLERANCES
from graph_faults import plant_in_engine
from onnx import helper, numpy_helper

from faults.table import FAULTS
from lockstep.artifacts.files import read_json
from lockstep.errors import CheckError
from lockstep.targets import Results, Target
from lockstep.verify.golden.check import GoldenCheck, check_engines
from lockstep.verify.golden.moved import MovedCheck
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms

MODEL = "demo-llama"
BACKEND = "onnxruntime"
SCENARIOS = [
    "copies for n choices", "swapped out and back", "a reused prefix", "slots of cancelled requests",
    "the last pages of the cache",
]  # fmt: skip


def opened(results: Results, reference: Path | None = None, **limits: int) -> GoldenCheck:
    return GoldenCheck(
        results.assembly(MODEL, "fp32"), results.weights(MODEL, "fp32"), results.engines(MODEL, "fp32", BACKEND),
        reference or results.reference(MODEL, 2), Target(MODEL, "fp32", 2, BACKEND), TOLERANCES["fp32"],
        replace(LIMITS, **limits), (), None,
    )  # fmt: skip


def moved(check: GoldenCheck) -> dict[str, Any]:
    assert check.long is not None
    return {state.name: state for state in MovedCheck(check, check.long).run()}


def test_a_right_engine_set_gives_the_same_bits_wherever_state_lies(references: Results) -> None:
    check = opened(references)
    states = moved(check)
    assert not check.failures and list(states) == SCENARIOS
    assert all(state.requests and state.max_logit_difference == 0 for state in states.values())
    check.model.tables.pool.check()


WORDS = {
    "copy-key": "prompt of 6 tokens, choice 1 of 3 copies, compared with alone: expected",
    "copy-layer": "choice 1 of 3 copies, compared with alone: expected",
    "swap-values": "swapped out and back, compared with alone: expected",
    "swap-late": "swapped out and back, compared with alone: expected",
    "prefix-values": "on a cached prefix: expected a logit error of at most",
    "prefix-late": "on a cached prefix: expected a logit error of at most",
    "slot-sampling": "step 0, in the slot of a cancelled request: expected token",
}


@pytest.mark.parametrize("fault", WORDS)
def test_a_fault_of_state_that_is_moved_is_seen(references: Results, fault: str) -> None:
    check = opened(references)
    with FAULTS[fault].change():
        moved(check)
    assert WORDS[fault] in check.failures[0]


def test_what_limits_leave_no_room_for_is_said_not_to_be_run(references: Results) -> None:
    states = moved(opened(references, max_batch_size=1, max_num_tokens=60))
    reasons = {name: state.not_run for name, state in states.items()}
    assert reasons == {
        **dict.fromkeys(SCENARIOS),
        "copies for n choices": "max_batch_size is 1",
        "swapped out and back": "max_batch_size is 1: one request alone always has room",
        "a reused prefix": "this attention, or a step of so few tokens, keeps no prefix",
    }


def test_a_long_prompt_that_is_short_leaves_no_room(references: Results, demo: Results, tmp_path: Path) -> None:
    reference = make_reference(
        demo.checkpoint(MODEL), 2, GoldenTerms(2, ("Light",), long_prompt=4), tmp_path / "reference.json"
    )
    states = moved(opened(references, reference=reference))
    assert {state.not_run for state in states.values()} == {"the long prompt and its answer have fewer than 10 tokens"}


# --- long decode ---


def wrong_from(low: int, high: int) -> Any:
    """Forget the first token when decoding after `low` to `high` tokens."""

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.input[:] = ["changed" if item == "past_lengths" else item for item in node.input]
        for name, number in (("low", low), ("high", high), ("one", 1)):
            graph.initializer.append(numpy_helper.from_array(np.array(number), name))
        nodes = [
            helper.make_node("GreaterOrEqual", ["past_lengths", "low"], ["above"]),
            helper.make_node("LessOrEqual", ["past_lengths", "high"], ["below"]),
            helper.make_node("And", ["above", "below"], ["within"]),
            helper.make_node("Sub", ["past_lengths", "one"], ["less"]),
            helper.make_node("Where", ["within", "less", "past_lengths"], ["changed"], name="planted"),
        ]
        for at, node in enumerate(nodes):
            graph.node.insert(at, node)

    return change


def test_a_fault_far_from_every_edge_is_seen_when_decoding(references: Results, demo: Results, tmp_path: Path) -> None:
    """Lengths of up to 512: no edge lies between 257 and 384."""
    limits = replace(LIMITS, max_seq_len=512)
    reference = make_reference(
        demo.checkpoint(MODEL), 2, GoldenTerms(8, ("Light",), long_prompt=504), tmp_path / "reference.json"
    )
    paths = demo.assembly(MODEL, "fp32"), demo.weights(MODEL, "fp32")

    def checked(engines: Path) -> Path:
        return check_engines(
            *paths, engines, reference, Target(MODEL, "fp32", 2, BACKEND), TOLERANCES["fp32"], limits,
            tmp_path / "golden.json", tmp_path / "speed.json",
        )  # fmt: skip

    right = demo.engines(MODEL, "fp32", BACKEND)
    long = read_json(checked(right))["long_prompt"]
    assert 323 + 32 < long["decoded_positions"] < long["positions"] == 511, "those before edges, and those drawn"
    engines = shutil.copytree(right.parent, tmp_path / "engines") / "engines.json"
    plant_in_engine(engines, "attention.decode", wrong_from(300, 320))
    with pytest.raises(CheckError, match=r"the long prompt', after 3[0-2]\d tokens, token by token: expected a logit"):
        checked(engines)
