"""What a step on GPUs computes: decided by NumPy and Python alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from lockstep.step.advance import PREVIOUS_TOKEN, Advance
from lockstep_gpu.plan import StepLimits, StepPlan, warm_up_plans

LIMITS = StepLimits(num_slots=6, max_seq_len=64, max_num_tokens=48, vocab_size=50, captured_tokens=40)


def prompt(slot: int, count: int, start: int = 0) -> Advance:
    return Advance(slot, np.arange(count) % 50, start)


def test_no_gpu_is_needed() -> None:
    code = "import sys, lockstep_gpu.plan; print([name for name in sys.modules if name.startswith('cuda')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_chunks_are_packed_the_shortest_first_and_padded_to_a_size_of_graphs() -> None:
    plan = StepPlan.of([prompt(4, 9), prompt(1, 3, 20)])
    packed = plan.pack(LIMITS)
    assert plan.lengths == {4: 9, 1: 23} and len(packed.rows) == 16
    assert packed.rows.tolist() == [1] * 3 + [4] * 9 + [-1] * 4
    assert packed.tokens.position_ids[:5].tolist() == [20, 21, 22, 0, 1]
    assert packed.slots.tolist() == [1, 4] and packed.logit_rows.tolist() == [2, 11] and packed.logits == {1: 0, 4: 1}
    assert packed.chunks == [(1, 20, 0, 3), (4, 0, 3, 12)] and not packed.has_previous and not len(packed.decoding)
    assert len(StepPlan.of([prompt(0, 41)]).pack(LIMITS).rows) == 41  # too long for a graph
    warm = plan.pack(LIMITS, write=False)
    assert set(warm.rows) == set(warm.slots) == {-1} and warm.logit_rows.tolist() == packed.logit_rows.tolist()


def test_rows_that_decode_come_before_the_chunks_and_requests_are_slots() -> None:
    plan = StepPlan.of([Advance(2, PREVIOUS_TOKEN, 7), prompt(4, 5), Advance(0, PREVIOUS_TOKEN, 3)])
    packed = plan.pack(LIMITS)
    assert packed.num_decoding == 3 and packed.decoding.tolist() == [0, -1, 2, -1] and packed.has_previous
    assert packed.rows.tolist() == [0, -1, 2] + [4] * 5
    assert packed.slots.tolist() == [0, -1, 2, -1, 4, -1] and packed.logit_rows.tolist() == [0, 0, 2, 0, 7, 0]
    assert packed.chunks == [(4, 0, 0, 5)] and packed.logits == {2: 2, 0: 0, 4: 4}
    assert set(packed.tokens.token_ids[:3]) == {-1, 0}


@pytest.mark.parametrize(("tuned", "num_passes"), [(512, 1), (200, 2)])
def test_a_step_is_one_pass_if_that_is_no_slower(tuned: int, num_passes: int) -> None:
    """With profiles tuned for 200 and 512 tokens, the rows of 198 and more tokens would cost what 512 do."""
    plan = StepPlan.of([Advance(1, PREVIOUS_TOKEN, 7), prompt(2, 199)])
    passes = plan.passes(4, lambda count: tuned if count <= tuned else 512)
    assert len(passes) == num_passes
    advances = []
    for planned in passes:
        advances += [*planned.decoding, *planned.chunks]
    assert advances == [*plan.decoding, *plan.chunks]


def test_a_step_in_flight_is_taken_only_if_it_computes_the_same() -> None:
    before = StepPlan.of([prompt(0, 5), Advance(1, np.array([3]), 10)])
    lengths = before.lengths_after(np.array([0, 10, 0, 0, 0, 0]))
    assert lengths.tolist() == [5, 11, 0, 0, 0, 0]
    in_flight = StepPlan.of([Advance(0, PREVIOUS_TOKEN, 5), Advance(1, PREVIOUS_TOKEN, 11), prompt(2, 4)])
    assert in_flight.can_follow(before, lengths, LIMITS)
    tokens = np.array([7, 8, 0, 0, 0, 0])
    rows = [Advance(0, np.array([7]), 5), Advance(1, np.array([8]), 11)]
    assert in_flight.computes(StepPlan.of([*rows, prompt(2, 4)]), tokens)
    assert in_flight.computes(StepPlan.of([rows[1], prompt(2, 4)]), tokens)  # a request ended
    for other in (prompt(2, 5), prompt(2, 4, 1), prompt(3, 4)):
        assert not in_flight.computes(StepPlan.of([*rows, other]), tokens)
    assert not in_flight.computes(StepPlan.of([Advance(0, np.array([6]), 5), rows[1], prompt(2, 4)]), tokens)
    in_flight.lengths.pop(1)  # its request has changed
    assert not in_flight.computes(StepPlan.of([*rows, prompt(2, 4)]), tokens)


@pytest.mark.parametrize(
    "advances",
    [
        [Advance(0, np.array([3]), 5)],  # not the token that the step before chooses
        [Advance(0, PREVIOUS_TOKEN, 6)],
        [Advance(2, PREVIOUS_TOKEN, 0)],  # of a slot that the step before lacks
        [prompt(3, 4, 1)],
        [prompt(9, 4)],
        [Advance(0, PREVIOUS_TOKEN, 5), prompt(0, 4, 5)],
        [prompt(3, 49)],  # too many tokens
        [Advance(3, np.array([4, 50]), 0)],  # of another vocabulary
    ],
)
def test_a_step_that_the_model_would_refuse_is_not_launched(advances: list[Advance]) -> None:
    lengths = np.array([5, 0, 0, 0, 0, 0])
    assert not StepPlan.of(advances).can_follow(StepPlan.of([prompt(0, 5)]), lengths, LIMITS)


def test_a_warm_up_packs_every_size_of_a_pass_that_is_captured() -> None:
    sizes = set()
    for plan, is_captured in warm_up_plans(LIMITS):
        packed = plan.pack(LIMITS, write=False)
        assert set(packed.rows) == {-1}
        if is_captured:
            sizes.add(len(packed.rows))
    assert sizes == {2, 4, 8, 16, 32, 40}
    assert not list(warm_up_plans(replace(LIMITS, max_seq_len=1)))
