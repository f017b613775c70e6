"""The statistics of `lockstep certify`: drawn answers in, alarms out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.certify.likelihood import (
    EXCLUDED,
    LIMIT,
    OTHER,
    PENALTY,
    PUBLISHED,
    SAMPLER,
    SOME,
    STRANGE,
    UNKNOWN,
    Answers,
    Member,
    Tables,
    by_hypothesis,
    log_evidence,
    log_likelihoods,
    members,
    members_at,
    power,
    resampled,
    simulated,
)

QUESTIONS = 120
CANDIDATES = 40


def log_softmax(table: np.ndarray) -> np.ndarray:
    shifted = table - table.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def tables() -> Tables:
    """Of a model that was not there: as int8 is off by 0.03, as int4 by 0.5, and fp16 by 0.01."""
    random = np.random.default_rng(0)
    published = -np.sort(-log_softmax(2 * random.standard_normal((QUESTIONS, CANDIDATES))), axis=1)
    values = {PUBLISHED: published}
    for name, size in {"int8": 0.03, "int4": 0.5, PENALTY: 0.3}.items():
        values[name] = log_softmax(published + size * random.standard_normal(published.shape))
    return Tables(values, {"fp16": np.full(QUESTIONS, 0.01), "bf16": np.full(QUESTIONS, 0.08)})


def log_ratios(tables: Tables, answers: Answers) -> dict[str, float]:
    all_members = members(tables)
    return by_hypothesis(all_members, log_likelihoods(all_members, answers).sum(axis=1))


def share_of_alarms(all_members: list[Member], answers: Answers, draws: int) -> float:
    batches = resampled(all_members, log_likelihoods(all_members, answers), 200, draws)
    return float(np.mean([(log_evidence(batch) >= LIMIT).any(axis=1) for batch in batches]))


@pytest.mark.parametrize("listed", [0, 1, 5, 20])
def test_answers_as_published_are_no_alarm(tables: Tables, listed: int) -> None:
    all_members = members(tables)
    random = np.random.default_rng(1)
    for member in [member for member in all_members if member.hypothesis == PUBLISHED][::16]:
        sums = np.cumsum(log_likelihoods(all_members, simulated(member, listed, random)), axis=1)
        assert np.all(log_evidence(by_hypothesis(all_members, sums)) < LIMIT)


@pytest.mark.parametrize("hypothesis", ["int8", "int4", SAMPLER, OTHER])
@pytest.mark.parametrize("listed", [5])
def test_each_hypothesis_is_an_alarm_by_its_name(tables: Tables, hypothesis: str, listed: int) -> None:
    all_members = members(tables)
    member = next(member for member in all_members if member.hypothesis == hypothesis)
    answers = simulated(member, listed, np.random.default_rng(2))
    assert share_of_alarms(all_members, answers, 100) > 0.9
    ratios = log_ratios(tables, answers)
    assert log_evidence(ratios) > LIMIT
    assert max(ratios, key=lambda name: ratios[name]) == hypothesis


def test_tokens_alone_tell_what_is_drawn_but_not_int8(tables: Tables) -> None:
    all_members = members(tables)
    random = np.random.default_rng(3)
    drawn = next(member for member in all_members if member.temperature)
    rounded = next(member for member in all_members if member.hypothesis == "int8")
    shares = [share_of_alarms(all_members, simulated(member, 0, random), 50) for member in (drawn, rounded)]
    assert shares[0] == 1
    assert shares[1] < 0.5
    ratios = log_ratios(tables, simulated(all_members[0], 0, random))
    assert ratios[SAMPLER] < ratios[PUBLISHED] - EXCLUDED


def test_tokens_that_nobody_expects_are_of_another_model(tables: Tables) -> None:
    nothing = np.full((QUESTIONS, CANDIDATES), np.nan)
    ratios = log_ratios(tables, Answers(nothing, np.full(QUESTIONS, STRANGE)))
    assert max(ratios, key=lambda name: ratios[name]) == OTHER
    ratios = log_ratios(tables, Answers(nothing, np.full(QUESTIONS, UNKNOWN)))
    assert [*ratios.values()] == pytest.approx([0] * len(ratios))


def test_a_fault_takes_as_many_requests_whatever_each_answers(tables: Tables) -> None:
    all_members = members(tables)
    answers = simulated(
        next(member for member in all_members if member.hypothesis == PUBLISHED), 20, np.random.default_rng(5)
    )
    by_number = by_hypothesis(all_members, log_likelihoods(all_members, answers).sum(axis=1))
    assert by_number[SOME] < by_number[PUBLISHED] - EXCLUDED
    is_first = np.arange(QUESTIONS) % 12 == 0  # ten requests, each of which answers twelve questions
    together = log_likelihoods(all_members, replace(answers, is_first=is_first)).sum(axis=1)
    by_number = by_hypothesis(all_members, together)
    assert by_number[SOME] == pytest.approx(by_number[PUBLISHED] + 10 * np.log(0.9))


def test_the_stated_power_is_that_of_the_weakest_way(tables: Tables) -> None:
    near = tables.values[PUBLISHED] + 1e-5 * np.random.default_rng(6).standard_normal((QUESTIONS, CANDIDATES))
    all_members = members(Tables({**tables.values, "int4 / near": log_softmax(near)}, tables.noise))
    listed = np.where(np.arange(QUESTIONS) < QUESTIONS // 2, 0, 5)
    assert (np.isfinite(simulated(all_members[0], listed, np.random.default_rng(0)).values).sum(axis=1) == listed).all()
    assert power(members(tables), all_members[0], listed, 100, ["int4"])["int4"] == 1
    assert power(all_members, all_members[0], listed, 100, ["int4"])["int4"] < 0.5


def test_answers_that_are_left_out_change_nothing(tables: Tables) -> None:
    answers = simulated(members(tables)[0], 20, np.random.default_rng(4))
    ratios = log_ratios(tables, answers)
    half = range(0, QUESTIONS, 2)
    odd = range(1, QUESTIONS, 2)
    parts = []
    for rows in (half, odd):
        all_members = members_at(members(tables), rows)
        part = Answers(answers.values[list(rows)], answers.chosen[list(rows)])
        parts.append(log_likelihoods(all_members, part).sum(axis=1))
    assert by_hypothesis(members(tables), parts[0] + parts[1]) == pytest.approx(ratios)
