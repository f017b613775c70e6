"""How likely an endpoint's answers are under each hypothesis. NumPy only: observations in, likelihoods out.

The answer to question i is some log-probabilities y_c, of candidates c, and the token that was chosen. A member m of a
hypothesis says that logits have independent errors e_c of rms s_mi. Those of log-probabilities, y_c - mu_mc = e_c - sum
of p_j e_j, then have the covariance s^2 K, K_cd = (c = d) - p_c - p_d + sum of p_j^2, with p of the published model:
where a token is almost certain, its own error is small, and the others share one. That is of first order; of the
second they have b = s^2 (1 - sum of p_j^2), and a = 1e-4 of JSON. With the eigenvalues l_i of K and the errors along
its eigenvectors, z_i, their variances are v_i = s^2 l_i + b^2 + a^2. Errors are heavy-tailed, so the density of k of
them is Student's t with nu = 4, in k' = 1 + (k - 1) / 4 dimensions since logits of one hidden state are not quite
independent:

    log f = lgamma((nu + k') / 2) - lgamma(nu / 2) - k' / 2 (log(pi nu) + mean of log v_i)
            - (nu + k') / 2 log(1 + k' / nu mean of z_i^2 / v_i)

The chosen token is the likeliest one: of y, where it has several log-probabilities, else of mu with logistic noise of
rms s, P(c) = softmax(mu / (0.8 s)); or it is drawn, from softmax(mu / temperature). Either has a floor.

"As published" is composite: fp32, fp16 and bf16, each with kernels of more and of less noise. The evidence against it
is the ratio of the mean likelihood of the other hypotheses to the largest of its members, so that its expectation is at
most 1 whichever of these is true; by Ville's inequality it ever reaches 50,000 with a probability of at most 1/50,000,
and may be looked at as often as one likes. Where some answers are faulty the others are as a member of it says, and the
best of these 108 counts: a wrong noise would exclude a fault that no request has met. Two such hypotheses among 12 make
it at most 1/2,600. That holds as far as the densities do, and the false alarms that are allowed are 1/1,000: at 20,000
a bf16 server that gives one log-probability had 3 of 5,000.
records/certify.md has the measured rates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.artifacts.certificate import AS_PUBLISHED, LOOK_INTERVAL

PUBLISHED = AS_PUBLISHED
LIMIT = math.log(50_000)  # of the evidence, in nats
# Likelihood ratio from which "as published" excludes a fault, in nats. An endpoint of that fault reaches it with a
# probability of at most 1/1,000 for each member of "as published": less than the 1 % of its faults that may pass. Of
# 5,000 honest bf16 endpoints of the demo 4,845 pass, and 155 are undecided: there int8 errs by 0.6 of bf16's noise.
EXCLUDED = math.log(1_000)
UNKNOWN = -1  # the token chosen: its id is not told, and its text is no candidate's, or that of several
STRANGE = -2  # the token chosen: by its id none that any hypothesis expects
OTHER = "another revision or model"
SOME = "a fault in 1 of 10 answers"
RARE = "a fault in 1 of 50 answers"
SAMPLER = "tokens drawn, not greedy"
PENALTY = "a repetition penalty"
_NU = 4.0
_FURTHER_WEIGHT = (
    0.25  # a further log-probability of the same question tells as much as a quarter of an independent one
)
# Of the probability of a token: what no hypothesis expects happens; less so by the endpoint's own log-probabilities.
_FLOOR = 1e-4
_OWN_FLOOR = 1e-6
_STRANGE_SHARE = 0.1  # probability that another model chooses a token that no hypothesis expects
_TIE = 2e-3  # log-probabilities that close may come in any order
_ROUNDING = 1e-4  # of log-probabilities in JSON
_LOGISTIC = 0.8
_RMS_ITERATIONS = 5  # fixed-point iterations for the rms of errors
_DRAWS = 100  # of a stated power
_BATCH = 25  # draws at once
# Of a precision's noise in transformers: engines round elsewhere, in fp32 in sums of other order.
_KERNEL_FACTORS = {"fp32": (2.0**-8, 2.0**-6, 2.0**-4), "fp16": (0.5, 1.0, 1.4), "bf16": (0.5, 1.0, 1.4)}
_NOISE_GRID = 2.0 ** np.array([-0.5, -0.25, 0.0, 0.25])  # of each, for "as published"
_ABSENT = 1e3  # the eigenvalue of a candidate that is not listed: above all of K
_MAX_LISTED = 20  # log-probabilities of a question that count
_OTHER_MODEL_RMS = (1.0, 0.3, 3.0)  # rms differences of logits to another model,
_REVISION_FACTORS = (4.0, 8.0, 16.0)  # and to another revision, in the noise of bf16
_FAULTY_SHARES = {SOME: 0.1, RARE: 0.02}  # of requests
_TEMPERATURES = (1.0, 0.6)


@dataclass(frozen=True)
class Tables:
    """Expected answers: {name: log-probabilities [questions, candidates]}, {precision: rms noise [questions]}.

    -inf: no candidate. A hypothesis' name is the part before " / " of a table's; "as published" has the first. Noise is
    that of logits.
    """

    values: Mapping[str, np.ndarray]
    noise: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Answers:
    """What an endpoint said: values [questions, candidates], NaN where it gave none, and the candidate chosen.

    is_new: [questions], or one for all; False where the values were weighed before, and the choice was not. is_first:
    the same; False where an answer came by the request of the one before.
    """

    values: np.ndarray
    chosen: np.ndarray
    is_new: np.ndarray | bool = True
    is_first: np.ndarray | bool = True

    @functools.cached_property
    def listed(self) -> np.ndarray:
        """The values, -inf where the endpoint gave none."""
        return np.where(np.isfinite(self.values), self.values, -np.inf)

    @functools.cached_property
    def has_values(self) -> np.ndarray:
        """Whether the endpoint gave values of other tokens than the one that was chosen."""
        return np.isfinite(self.values).sum(axis=1) > 1

    @functools.cached_property
    def is_largest(self) -> np.ndarray:
        """Whether the token that was chosen has the largest value."""
        chosen = self.listed[np.arange(len(self.chosen)), self.chosen]
        return chosen >= self.listed.max(axis=1) - _TIE


@dataclass(frozen=True)
class Member:
    """A case of a hypothesis. means [questions, candidates], noise, the rms error of logits [questions].

    way: the hypothesis, and after " / " which way of it. choices: log-probabilities that the token is chosen by, None
    for the endpoint's own. temperature: 0 is greedy. share: of the requests, that are answered as the first member of
    `OTHER`.
    """

    way: str
    means: np.ndarray
    noise: np.ndarray
    choices: np.ndarray | None = None
    temperature: float = 0.0
    share: float = 0.0

    @property
    def hypothesis(self) -> str:
        return self.way.partition(" / ")[0]


def members_at(members: Sequence[Member], questions: Sequence[int]) -> list[Member]:
    """Return the members on some of the questions. Those that share an array share its part."""
    rows = np.asarray(questions, int)
    parts: dict[int, np.ndarray] = {}
    at_rows = []
    for member in members:
        if id(member.means) not in parts:
            parts[id(member.means)] = member.means[rows]
        choices = None if member.choices is None else member.choices[rows]
        at_rows.append(replace(member, means=parts[id(member.means)], noise=member.noise[rows], choices=choices))
    return at_rows


class ErrorModel:
    """How errors of log-probabilities follow from those of logits.

    logprobs: the published ones [questions, candidates]. is_listed: which an endpoint gave; `_MAX_LISTED` count.
    """

    def __init__(self, logprobs: np.ndarray, is_listed: np.ndarray) -> None:
        self._places = np.argsort(~is_listed, axis=1, kind="stable")[:, :_MAX_LISTED]
        self._is_listed = np.take_along_axis(is_listed, self._places, axis=1)
        self.count = self._is_listed.sum(axis=1)
        probabilities = np.exp(logprobs)
        listed = np.take_along_axis(probabilities, self._places, axis=1)
        square = np.square(probabilities).sum(axis=1)
        identity = np.eye(listed.shape[1])
        covariance = identity - listed[:, :, None] - listed[:, None, :] + square[:, None, None]
        are_listed = self._is_listed[:, :, None] & self._is_listed[:, None, :]
        eigenvalues, self._eigenvectors = np.linalg.eigh(np.where(are_listed, covariance, _ABSENT * identity))
        self._eigenvalues = np.maximum(eigenvalues, 0.0)
        self._counts = eigenvalues < _ABSENT / 2
        self._second = np.square(1 - square)[:, None]
        self._k = 1 + (np.maximum(self.count, 1) - 1) * _FURTHER_WEIGHT
        log_gammas = np.array([math.lgamma((_NU + k) / 2) for k in self._k.tolist()])
        self._constant = log_gammas - math.lgamma(_NU / 2) - self._k / 2 * math.log(math.pi * _NU)

    def along(self, errors: np.ndarray) -> np.ndarray:
        """Return the errors [questions, candidates] along the eigenvectors."""
        listed = np.where(self._is_listed, np.take_along_axis(errors, self._places, axis=1), 0.0)
        return np.einsum("qji,qj->qi", self._eigenvectors, listed)

    def fit(self, along: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean square of errors along the eigenvectors by their variances, and the mean log variance."""
        square = np.square(noise)[:, None]
        variances = square * (self._eigenvalues + square * self._second) + _ROUNDING**2
        count = np.maximum(self.count, 1)
        mean_log = np.where(self._counts, np.log(variances), 0.0).sum(axis=1) / count
        return (np.square(along) / variances).sum(axis=1) / count, mean_log

    def log_density(self, along: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Return the log density of errors along the eigenvectors, 0 where none is listed."""
        mean_square, mean_log = self.fit(along, noise)
        k = self._k
        density = self._constant - k / 2 * mean_log - (_NU + k) / 2 * np.log1p(k / _NU * mean_square)
        return np.where(self.count > 0, density, 0.0)


def rms_difference(logprobs: np.ndarray, published: np.ndarray) -> np.ndarray:
    """Return the rms difference of logits to the published ones, of the likeliest candidates: [questions]."""
    model = ErrorModel(published, np.isfinite(published))
    along = model.along(_floored(logprobs) - _floored(published))
    size = np.full(len(published), _OTHER_MODEL_RMS[0])
    for _ in range(_RMS_ITERATIONS):  # the errors' variances depend on it
        mean_square, _ = model.fit(along, size)
        size = size * np.sqrt(mean_square)
    return size


def members(tables: Tables) -> list[Member]:
    """Return the members of all hypotheses, those of "as published" first: in fp32, fp16 and bf16."""
    published = tables.values[PUBLISHED]
    noise = {**tables.noise, "fp32": tables.noise["fp16"]}
    usual = []
    for precision, factors in _KERNEL_FACTORS.items():
        usual += [Member(PUBLISHED, published, factor * noise[precision]) for factor in factors]
    all_members = []
    for member in usual:
        all_members += [replace(member, noise=between * member.noise) for between in _NOISE_GRID]
    # One draw of roundings says little of a question: noise may be as even, or as uneven as other errors are.
    profiles = [np.ones(len(published))]
    if "int8" in tables.values:
        profiles.append(rms_difference(tables.values["int8"], published))
    for member in [*all_members]:
        for profile in profiles:
            size = np.sqrt(np.mean(np.square(member.noise)) / np.mean(np.square(profile)))
            all_members.append(replace(member, noise=size * profile))
    published_members = [*all_members]
    for name, means in tables.values.items():
        if name == PENALTY:
            # Endpoints give log-probabilities of before the penalty, or of after it.
            all_members += [replace(member, way=PENALTY, choices=means) for member in usual]
            all_members += [replace(member, way=f"{PENALTY} / before", means=means) for member in usual]
        elif name != PUBLISHED:
            all_members += [replace(member, way=name, means=means) for member in usual]
            if " / " not in name:
                # Another way of doing the same, as another quantiser, is as far away in another direction. Of further
                # tables each may look like bf16's noise, and then honest endpoints stay undecided.
                away = rms_difference(means, published)
                for member in usual:
                    noise_away = np.hypot(member.noise, away)
                    all_members.append(replace(member, way=name, noise=noise_away))
    for temperature in _TEMPERATURES:
        way = f"{SAMPLER} / at {temperature}"
        all_members += [replace(member, way=way, temperature=temperature) for member in usual]
        if temperature != 1:
            processed = _log_softmax(published / temperature)
            # Log-probabilities of after the temperature.
            all_members += [
                replace(member, way=f"{way}, processed", means=processed, temperature=1.0) for member in usual
            ]
    everywhere = np.ones(len(published))
    revisions = [Member(OTHER, published, size * everywhere) for size in _OTHER_MODEL_RMS]
    # Multiples of fp16's noise would be as large as bf16's.
    revisions += [Member(f"{OTHER} / near", published, factor * noise["bf16"]) for factor in _REVISION_FACTORS]
    all_members += revisions
    for name, share in _FAULTY_SHARES.items():
        all_members += [replace(member, way=name, share=share) for member in published_members]
    return all_members


def log_likelihoods(members: Sequence[Member], answers: Answers) -> np.ndarray:
    """Return the log-likelihood of each answer under each member, [members, questions]; the first one is published.

    Where a share of the requests is faulty, that of all answers to a request stands at the first one.
    """
    error_model = ErrorModel(members[0].means, np.isfinite(answers.values))
    names = np.array([member.hypothesis for member in members])
    has_value = np.isfinite(answers.values)
    likelihoods = np.zeros((len(members), len(answers.chosen)))
    errors: dict[int, np.ndarray] = {}  # of each array of means, along the eigenvectors
    for row, member in enumerate(members):
        if member.share:
            continue
        likelihoods[row] = _log_choice(member, answers)
        if has_value.any():
            if id(member.means) not in errors:
                differences = np.where(has_value, answers.values - _floored(member.means), 0.0)
                errors[id(member.means)] = error_model.along(differences)
            density = error_model.log_density(errors[id(member.means)], member.noise)
            likelihoods[row] += np.where(answers.is_new, density, 0.0)
    firsts = np.flatnonzero(np.broadcast_to(answers.is_first, answers.chosen.shape))
    right = np.add.reduceat(likelihoods[names == PUBLISHED], firsts, axis=1)
    faulty = np.add.reduceat(likelihoods[names == OTHER][0], firsts)
    for name, share in _FAULTY_SHARES.items():
        rows = np.flatnonzero(names == name)
        likelihoods[np.ix_(rows, firsts)] = np.logaddexp(math.log1p(-share) + right, math.log(share) + faulty)
    return likelihoods


def by_hypothesis(members: Sequence[Member], sums: np.ndarray) -> dict[str, np.ndarray]:
    """Return {hypothesis: log-likelihood} of sums [members, ...]: of the mean member.

    Of the best one as published, and where some answers are faulty: the noise of the others tells nothing of a fault.
    """
    names = np.array([member.hypothesis for member in members])
    likelihoods = {}
    for name in dict.fromkeys(names.tolist()):
        rows = sums[names == name]
        if name in (PUBLISHED, SOME, RARE):
            likelihoods[name] = rows.max(axis=0)
        else:
            likelihoods[name] = _log_mean_exp(rows)
    return likelihoods


def log_evidence(likelihoods: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the logarithm of the evidence against "as published"."""
    alternatives = [value for name, value in likelihoods.items() if name != PUBLISHED]
    return _log_mean_exp(np.stack(alternatives)) - likelihoods[PUBLISHED]


def _log_choice(member: Member, answers: Answers) -> np.ndarray:
    rows = np.arange(len(answers.chosen))
    has_values = answers.has_values
    if member.temperature:
        table = np.where(has_values[:, None], answers.listed, member.means) / member.temperature
        probability = np.exp(_log_softmax(table))[rows, answers.chosen]
    elif member.choices is None and has_values.all():
        probability = answers.is_largest
    else:
        choices = member.means if member.choices is None else member.choices
        spread = _LOGISTIC * np.hypot(_ROUNDING, member.noise)
        probability = np.exp(_log_softmax(choices / spread[:, None]))[rows, answers.chosen]
        if member.choices is None:
            probability = np.where(has_values, answers.is_largest, probability)
    strange = 0.0
    if member.hypothesis == OTHER:
        strange = _STRANGE_SHARE
    probability = np.where(answers.chosen == STRANGE, strange, (1 - strange) * probability)
    floor = np.where(has_values, _OWN_FLOOR, _FLOOR)
    return np.where(answers.chosen == UNKNOWN, 0.0, np.log(floor + (1 - floor) * probability))


def _log_softmax(table: np.ndarray) -> np.ndarray:
    shifted = table - table.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _floored(table: np.ndarray) -> np.ndarray:
    lowest = np.where(np.isfinite(table), table, np.inf).min(axis=1, keepdims=True)
    return np.where(np.isfinite(table), table, lowest)


def _log_mean_exp(values: np.ndarray) -> np.ndarray:
    largest = values.max(axis=0)
    return largest + np.log(np.mean(np.exp(values - largest), axis=0))


def penalised(row: np.ndarray, ids: Sequence[int], penalty: float) -> np.ndarray:
    """Return logits [vocab_size] after a repetition penalty on the tokens `ids`, as transformers has it."""
    changed = row.copy()
    repeated = np.unique(ids)
    logits = row[repeated]
    changed[repeated] = np.where(logits > 0, logits / penalty, logits * penalty)
    return changed


def simulated(member: Member, listed: int | np.ndarray, random: np.random.Generator) -> Answers:
    """Return answers to each question by an endpoint of which a member is true.

    listed: how many log-probabilities it gives, for all questions or [questions].
    """
    spread = np.sqrt(random.chisquare(_NU, len(member.means)) / _NU)
    errors = random.standard_normal(member.means.shape) * (member.noise / spread)[:, None]
    probabilities = np.exp(member.means)
    change = (probabilities * np.expm1(errors)).sum(axis=1, keepdims=True)  # of the sum of all
    values = member.means + errors - np.log1p(change)
    choices = values if member.choices is None else member.choices
    if member.temperature:
        choices = choices / member.temperature + random.gumbel(size=choices.shape)
    chosen = choices.argmax(axis=1)
    is_listed = np.argsort(np.argsort(-values, axis=1), axis=1) < np.asarray(listed)[..., None]
    return Answers(np.where(is_listed & np.isfinite(values), values, np.nan), chosen)


def resampled(
    members: Sequence[Member], likelihoods: np.ndarray, requests: int, draws: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the likelihoods of hypotheses at each look, [draws, looks], some of `draws` resamplings at a time.

    likelihoods: of `log_likelihoods`, [members, answers]. Each resampling draws `requests` answers, with replacement.
    """
    random = np.random.default_rng(0)
    num_answers = likelihoods.shape[1]
    looks = max(1, requests // LOOK_INTERVAL)
    for begin in range(0, draws, _BATCH):
        size = min(_BATCH, draws - begin)
        counts = np.zeros((size * looks, num_answers))  # of each answer between two looks
        rows = np.arange(size * looks)[:, None]
        np.add.at(counts, (rows, random.integers(num_answers, size=(size * looks, LOOK_INTERVAL))), 1)
        yield by_hypothesis(members, (likelihoods @ counts.T).reshape(-1, size, looks).cumsum(axis=2))


def power(
    members: Sequence[Member], true: Member, listed: int | np.ndarray, requests: int, names: Collection[str]
) -> dict[str, float]:
    """Return for the hypotheses `names` the chance that `requests` requests show that an endpoint is not as published.

    true: the member of "as published" that fits best, whose noise the endpoint has. listed: see `simulated`. That of
    the way of each hypothesis that shows least.
    """
    random = np.random.default_rng(0)
    first_members = {member.way: member for member in reversed(members)}
    chances: dict[str, float] = {}
    for member in first_members.values():
        if member.hypothesis == PUBLISHED or member.hypothesis not in names:
            continue
        noise = member.noise if member.hypothesis == OTHER else true.noise
        answers = simulated(replace(member, noise=noise), listed, random)
        if member.share:
            other = next(member for member in members if member.hypothesis == OTHER)
            faulty = simulated(other, listed, random)
            count = len(answers.chosen)
            is_faulty = random.permutation(count) < round(member.share * count)
            values = np.where(is_faulty[:, None], faulty.values, answers.values)
            answers = Answers(values, np.where(is_faulty, faulty.chosen, answers.chosen))
        batches = resampled(members, log_likelihoods(members, answers), requests, _DRAWS)
        alarms = [(log_evidence(batch) >= LIMIT).any(axis=1) for batch in batches]
        chances[member.hypothesis] = min(float(np.mean(alarms)), chances.get(member.hypothesis, 1.0))
    return chances
