"""How likely an endpoint's answers are under each hypothesis. NumPy only: observations in, likelihoods out.

The answer to question i is some log-probabilities y_c, of candidates c, and the token that was chosen. A member m of a
hypothesis says that y_c = mu_mc + error, where the k errors of a question have rms s_mi. Errors are heavy-tailed, and
those of one question are not independent (they are one hidden state's), so their density is Student's t in k' = 1 + (k
- 1) / 4 dimensions with nu = 4, at the rms of the k residuals r:

    log f = lgamma((nu + k') / 2) - lgamma(nu / 2) - k' / 2 log(pi nu s^2) - (nu + k') / 2 log(1 + k' r^2 / (nu s^2))

The chosen token is the likeliest one: of y, where log-probabilities are given, else of mu with logistic noise of rms s,
P(c) = softmax(mu / (0.8 s)); or it is drawn, from softmax(mu / temperature). Either has a floor.

"As published" is composite: fp32, fp16 and bf16, each with kernels of more and of less noise. The evidence against it
is the ratio of the mean likelihood of all other members to the largest of its own, so that its expectation is at most 1
whichever of its members is true; by Ville's inequality it ever reaches 2,000 with a probability of at most 1/2,000, and
may be looked at as often as one likes (answers alone and in company have half of the false alarms each). That holds as
far as the densities do: records/certify.md has the measured rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.artifacts.certificate import EVERY

PUBLISHED = "as published"
FALSE_ALARMS = 1e-3
LIMIT = -math.log(FALSE_ALARMS / 2)
UNKNOWN = -1  # the token chosen: its text is not told
STRANGE = -2  # the token chosen: none that any hypothesis expects
_NU = 4.0
_SHARE = 0.25  # of a further log-probability of a question, in independent ones
# Of the probability of a token: what no hypothesis expects happens; less so by the endpoint's own log-probabilities.
_FLOOR = 1e-4
_OWN_FLOOR = 1e-6
_TIE = 2e-3  # log-probabilities that close may come in any order
_LEAST = 2e-4  # the rms error of log-probabilities of fp32, as JSON may round them
_LOGISTIC = 0.8
_DRAWS = 100  # of a stated power
_LISTED = 20  # log-probabilities of a question that endpoints give at most
# Of a precision's noise in transformers: engines round elsewhere, in fp32 in sums of other order.
_KERNELS = {"fp32": (2.0**-8, 2.0**-6, 2.0**-4), "fp16": (0.5, 1.0, 2.0), "bf16": (0.5, 1.0, 2.0)}
_OTHER = (0.3, 1.0, 3.0)  # rms differences of log-probabilities to another model
OTHER = "another revision or model"
SAMPLER = "tokens drawn, not greedy"
PENALTY = "a repetition penalty"
_TEMPERATURES = (1.0, 0.6)


@dataclass(frozen=True)
class Tables:
    """Expected answers: {name: log-probabilities [questions, candidates]}, {precision: rms noise [questions]}.

    -inf: no candidate. A hypothesis' name is the part before " / " of a table's; "as published" has the first.
    """

    values: Mapping[str, np.ndarray]
    noise: Mapping[str, np.ndarray]

    def at(self, questions: Sequence[int]) -> Tables:
        rows = np.asarray(questions, int)
        return Tables(
            {name: table[rows] for name, table in self.values.items()},
            {name: table[rows] for name, table in self.noise.items()},
        )


@dataclass(frozen=True)
class Answers:
    """What an endpoint said: values [questions, candidates], NaN where it gave none, and the candidate chosen."""

    values: np.ndarray
    chosen: np.ndarray


@dataclass(frozen=True)
class Member:
    """One way of a hypothesis. means [questions, candidates], scale [questions].

    choices: log-probabilities that the token is chosen by, None for the endpoint's own. temperature: 0 is greedy.
    """

    hypothesis: str
    means: np.ndarray
    scale: np.ndarray
    choices: np.ndarray | None = None
    temperature: float = 0.0


def members(tables: Tables, precisions: Sequence[str] = ("fp32", "fp16", "bf16")) -> list[Member]:
    """Return the members of all hypotheses, those of "as published" first. precisions: it may be served in."""
    published = tables.values[PUBLISHED]
    noise = {**tables.noise, "fp32": tables.noise["fp16"]}
    scales = []
    for precision in precisions:
        scales += [np.hypot(_LEAST, factor * noise[precision]) for factor in _KERNELS[precision]]
    all_members = [Member(PUBLISHED, published, scale) for scale in scales]
    everywhere = np.ones(len(published))
    for name, means in tables.values.items():
        if name == PUBLISHED:
            continue
        hypothesis = name.partition(" / ")[0]
        if name == PENALTY:
            # Endpoints give log-probabilities of before the penalty, or of after it.
            all_members += [Member(PENALTY, published, scale, means) for scale in scales]
            all_members += [Member(PENALTY, means, scale) for scale in scales]
            continue
        all_members += [Member(hypothesis, means, scale) for scale in scales]
        # Another way of doing the same, as another quantiser, is as far away in another direction.
        away = np.sqrt(np.mean(np.square(_difference(means, published)), axis=1))
        all_members += [Member(hypothesis, published, np.hypot(scale, away)) for scale in scales]
    for temperature in _TEMPERATURES:
        all_members += [Member(SAMPLER, published, scale, None, temperature) for scale in scales]
        processed = _log_softmax(published / temperature)
        all_members += [Member(SAMPLER, processed, scale, None) for scale in scales if temperature != 1]
    all_members += [Member(OTHER, published, scale * everywhere) for scale in _OTHER]
    return all_members


def log_likelihoods(members: Sequence[Member], answers: Answers) -> np.ndarray:
    """Return the log-likelihood of each answer under each member, [members, questions]."""
    return np.stack([_log_density(member, answers) + _log_choice(member, answers) for member in members])


def by_hypothesis(members: Sequence[Member], sums: np.ndarray) -> dict[str, float]:
    """Return {hypothesis: log-likelihood} of sums [members]: of the mean member, of the best published one."""
    names = [member.hypothesis for member in members]
    likelihoods = {}
    for name in dict.fromkeys(names):
        of_name = sums[[other == name for other in names]]
        likelihoods[name] = float(of_name.max() if name == PUBLISHED else _log_mean_exp(of_name))
    return likelihoods


def log_evidence(likelihoods: Mapping[str, float]) -> float:
    """Return the logarithm of the evidence against "as published"."""
    alternatives = [value for name, value in likelihoods.items() if name != PUBLISHED]
    return float(_log_mean_exp(np.array(alternatives))) - likelihoods[PUBLISHED]


def _log_density(member: Member, answers: Answers) -> np.ndarray:
    is_listed = np.isfinite(answers.values)
    count = is_listed.sum(axis=1)
    residuals = np.where(is_listed, answers.values - _floored(member.means), 0.0)
    mean_square = np.square(residuals).sum(axis=1) / np.maximum(count, 1)
    k = 1 + (count - 1) * _SHARE
    variance = np.square(member.scale)
    density = (
        _lgamma((_NU + k) / 2)
        - math.lgamma(_NU / 2)
        - k / 2 * np.log(math.pi * _NU * variance)
        - (_NU + k) / 2 * np.log1p(k * mean_square / (_NU * variance))
    )
    return np.where(count > 0, density, 0.0)


def _log_choice(member: Member, answers: Answers) -> np.ndarray:
    rows = np.arange(len(answers.chosen))
    listed = np.where(np.isfinite(answers.values), answers.values, -np.inf)
    has_values = np.isfinite(answers.values).any(axis=1)
    if member.temperature:
        table = np.where(has_values[:, None], listed, member.means) / member.temperature
        probability = np.exp(_log_softmax(table))[rows, answers.chosen]
    else:
        choices = member.means if member.choices is None else member.choices
        probability = np.exp(_log_softmax(choices / (_LOGISTIC * member.scale[:, None])))[rows, answers.chosen]
        if member.choices is None:
            is_largest = listed[rows, answers.chosen] >= listed.max(axis=1) - _TIE
            probability = np.where(has_values, is_largest, probability)
    probability = np.where(answers.chosen == STRANGE, 0.0, probability)
    floor = np.where(has_values, _OWN_FLOOR, _FLOOR)
    return np.where(answers.chosen == UNKNOWN, 0.0, np.log(floor + (1 - floor) * probability))


def _log_softmax(table: np.ndarray) -> np.ndarray:
    shifted = table - table.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _difference(means: np.ndarray, published: np.ndarray) -> np.ndarray:
    """Return differences of the candidates that an endpoint lists: the first ones."""
    table = means[:, :_LISTED]
    first = published[:, :_LISTED]
    return np.where(np.isfinite(first), table, 0.0) - np.where(np.isfinite(first), first, 0.0)


def _floored(table: np.ndarray) -> np.ndarray:
    lowest = np.where(np.isfinite(table), table, np.inf).min(axis=1, keepdims=True)
    return np.where(np.isfinite(table), table, lowest)


def _lgamma(values: np.ndarray) -> np.ndarray:
    return np.array([math.lgamma(value) for value in values.tolist()])


def penalised(row: np.ndarray, ids: Sequence[int], penalty: float) -> np.ndarray:
    """Return logits [vocab_size] after a repetition penalty on the tokens `ids`, as transformers has it."""
    changed = row.copy()
    repeated = np.unique(ids)
    logits = row[repeated]
    changed[repeated] = np.where(logits > 0, logits / penalty, logits * penalty)
    return changed


def simulated(member: Member, listed: int, random: np.random.Generator) -> Answers:
    """Return answers to each question by an endpoint of which a member is true. listed: log-probabilities it gives."""
    spread = np.sqrt(random.chisquare(_NU, len(member.scale)) / _NU)
    errors = random.standard_normal(member.means.shape) * (member.scale / spread)[:, None]
    values = member.means + np.where(np.isfinite(member.means), errors, 0.0)
    choices = values if member.choices is None else member.choices
    if member.temperature:
        choices = choices / member.temperature + random.gumbel(size=choices.shape)
    chosen = choices.argmax(axis=1)
    is_listed = np.argsort(np.argsort(-values, axis=1), axis=1) < listed
    return Answers(np.where(is_listed & np.isfinite(values), values, np.nan), chosen)


def alarms(members: Sequence[Member], likelihoods: np.ndarray, requests: int, draws: int, seed: int = 0) -> np.ndarray:
    """Return after how many requests each of `draws` resamplings of answers is an alarm; 0: never.

    likelihoods: of `log_likelihoods`, [members, answers]. Each resampling draws `requests` answers, with replacement.
    """
    random = np.random.default_rng(seed)
    names = np.array([member.hypothesis for member in members])
    hypotheses = [names == name for name in dict.fromkeys(names.tolist()) if name != PUBLISHED]
    first = np.zeros(draws, int)
    for draw in range(draws):
        drawn = likelihoods[:, random.integers(likelihoods.shape[1], size=(requests // EVERY, EVERY))]
        sums = drawn.sum(axis=2).cumsum(axis=1)
        families = np.stack([_log_mean_exp(sums[is_of_it]) for is_of_it in hypotheses])
        evidence = _log_mean_exp(families) - sums[names == PUBLISHED].max(axis=0)
        above = np.flatnonzero(evidence >= LIMIT)
        if len(above):
            first[draw] = EVERY * (above[0] + 1)
    return first


def power(members: Sequence[Member], true: Member, listed: int, requests: int) -> dict[str, float]:
    """Return for each hypothesis the chance that `requests` requests show that an endpoint of it is not as published.

    true: the member of "as published" that fits best, whose noise the endpoint has. Of the hypothesis' first member.
    """
    random = np.random.default_rng(0)
    chances = {}
    for member in members:
        if member.hypothesis in chances or member.hypothesis == PUBLISHED:
            continue
        scale = true.scale
        if member.hypothesis == OTHER:
            scale = member.scale
        likelihoods = log_likelihoods(members, simulated(replace(member, scale=scale), listed, random))
        chances[member.hypothesis] = float(np.mean(alarms(members, likelihoods, requests, _DRAWS) > 0))
    return chances


def _log_mean_exp(values: np.ndarray) -> np.ndarray:
    largest = values.max(axis=0)
    return largest + np.log(np.mean(np.exp(values - largest), axis=0))
