"""Certify an endpoint: ask until the answers tell the hypothesis.

In: an endpoint, and hypotheses (`certify.tables`). Out: a certificate. Questions are asked one by one, with as many
log-probabilities as the endpoint gives, until every hypothesis that the requests can tell from the published model
is excluded, or "as published" is, or the requests are used up. The remaining ones ask the same questions at once.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.certificate import EVERY, Certificate, Hypotheses, Question
from lockstep.artifacts.dtypes import numpy_dtype
from lockstep.artifacts.files import sha256_file
from lockstep.certify.client import Endpoint, NoLogprobs, NotServed, Reply, TooLong
from lockstep.certify.likelihood import (
    LIMIT,
    PUBLISHED,
    STRANGE,
    UNKNOWN,
    Answers,
    Tables,
    by_hypothesis,
    log_evidence,
    log_likelihoods,
    members,
    power,
)  # fmt: skip
from lockstep.checkpoint.safetensors_header import read_header
from lockstep.errors import InputError
from lockstep.progress import steps

AS_PUBLISHED = "as published"
DIFFERS = "differs"
UNDECIDED = "undecided"
COMPANY = "answers that depend on company"
_LISTED = (20, 5, 1, 0)  # log-probabilities to ask for, until the endpoint gives them
_BURSTS = (1, 2, 5, 17, 65)  # requests at once; the first repeats answers alone
_TELLING = 0.99  # power from which a hypothesis must be excluded
_FIRST = 16  # answers after which the power of further ones is computed


def read_tables(path: Path, hypotheses: Hypotheses) -> Tables:
    """Read the tables of hypotheses. Raises InputError for another file."""
    file = path.parent / hypotheses.tables.file
    if not file.is_file() or sha256_file(file) != hypotheses.tables.sha256:
        raise InputError(f"{file}: expected the tables of {path.name}, found another file or none; make them again")
    data = np.fromfile(file, np.uint8)
    arrays: dict[str, dict[str, np.ndarray]] = {"values": {}, "noise": {}}
    for name, record in read_header(file).items():
        kind, _, table = name.partition(".")
        numbers = data[record.offset : record.offset + record.length].view(numpy_dtype(record.dtype))
        arrays[kind][table] = numbers.reshape(record.shape).astype(np.float64)
    values = arrays["values"]
    return Tables({PUBLISHED: values.pop(PUBLISHED), **values}, arrays["noise"])


@dataclass
class _Answered:
    """Replies to questions: their numbers, and what the endpoint said. members: of all questions."""

    questions: Sequence[Question]
    tables: Tables
    numbers: list[int] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    weighed: int = 0
    sums: Any = 0.0
    evidence: float = -np.inf
    likelihoods: Mapping[str, float] = field(default_factory=dict)
    trace: list[dict[str, float]] = field(default_factory=list)

    def add(self, number: int, reply: Reply) -> None:
        self.numbers.append(number)
        self.replies.append(reply)
        if len(self.numbers) % EVERY == 0:
            self.weigh()

    def weigh(self) -> None:
        """Weigh the replies since the last look."""
        if self.weighed == len(self.numbers):
            return
        new = slice(self.weighed, None)
        self.weighed = len(self.numbers)
        numbers = self.numbers[new]
        all_members = members(self.tables.at(numbers))
        answers = as_answers([self.questions[number] for number in numbers], self.replies[new], self.tables)
        self.sums = self.sums + log_likelihoods(all_members, answers).sum(axis=1)
        self.likelihoods = by_hypothesis(all_members, self.sums)
        self.trace.append(self.relative())
        self.evidence = max(self.evidence, log_evidence(self.likelihoods))

    def relative(self) -> dict[str, float]:
        """Return the log-likelihoods relative to the likeliest."""
        largest = max(self.likelihoods.values())
        return {name: value - largest for name, value in self.likelihoods.items()}

    def trace_of(self, name: str) -> tuple[float, ...]:
        """Return a hypothesis' relative log-likelihood after each round."""
        return tuple(entry[name] for entry in self.trace)

    def excluded(self, than: str = PUBLISHED) -> list[str]:
        return [name for name, value in self.likelihoods.items() if self.likelihoods[than] - value >= LIMIT]

    @property
    def best(self) -> str:
        return max(self.likelihoods, key=lambda name: self.likelihoods[name])


def as_answers(questions: Sequence[Question], replies: Sequence[Reply], tables: Tables) -> Answers:
    """Return replies by candidate. A text that several candidates have, or a part of a character, tells nothing."""
    width = tables.values[PUBLISHED].shape[1]
    values = np.full((len(replies), width), np.nan)
    chosen = np.full(len(replies), UNKNOWN)
    for row, (question, reply) in enumerate(zip(questions, replies)):
        place_of: dict[str, int] = {}
        for place, text in enumerate(question.texts):
            place_of[text] = UNKNOWN if text in place_of else place
        for text, value in reply.logprobs.items():
            if (place := _place(place_of, text)) >= 0:
                values[row, place] = value
        chosen[row] = _place(place_of, reply.text)
    return Answers(values, chosen)


def _place(place_of: Mapping[str, int], text: str) -> int:
    text = text.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
    if not text or "\ufffd" in text or text.startswith(("bytes:", "token_id:", "<")):
        return UNKNOWN
    return place_of.get(text, STRANGE)


class _Session:
    """The requests of one certificate. remaining: how many may still be sent."""

    def __init__(self, endpoint: Endpoint, questions: Sequence[Question], tables: Tables, requests: int) -> None:
        self.endpoint = endpoint
        self.questions = questions
        self.tables = tables
        self.remaining = requests
        self.listed: dict[str, int] = {}
        self.skipped: set[str] = set()  # kinds that the endpoint does not serve
        self.notes: dict[str, str] = {}

    def ask(self, number: int) -> Reply | None:
        """Return the reply to a question; None where the endpoint does not serve its kind."""
        question = self.questions[number]
        kind = question.kind
        while kind not in self.skipped and self.remaining > 0:
            listed = self.listed.setdefault(kind, _LISTED[0])
            self.remaining -= 1
            try:
                reply = self.endpoint.ask(question, listed)
            except NoLogprobs:
                self.listed[kind] = _LISTED[_LISTED.index(listed) + 1]
                continue
            except TooLong as error:
                self.notes.setdefault("too long", str(error))
                return None
            except NotServed as error:
                self.notes[kind] = str(error)
                self.skipped.add(kind)
                if len(self.skipped) == len({question.kind for question in self.questions}):
                    raise
                return None
            return reply
        return None

    def alone(self, reserve: int) -> tuple[_Answered, dict[str, float]]:
        """Ask question by question; return the answers, and the power of that number."""
        answered = _Answered(self.questions, self.tables)
        powers: dict[str, float] = {}
        total = min(self.remaining - reserve, len(self.questions))
        for number in steps(range(len(self.questions)), "certify: endpoint", "questions"):
            if self.remaining <= reserve:
                break
            if (reply := self.ask(number)) is None:
                continue
            answered.add(number, reply)
            if len(answered.numbers) == _FIRST:
                powers = self.power(answered, total)
            if answered.weighed == len(answered.numbers) and self._is_decided(answered, powers):
                break
        if not answered.numbers:
            raise InputError(f"{self.endpoint.url}: expected answers, found none; raise --requests")
        answered.weigh()
        return answered, powers or self.power(answered, total)

    def _is_decided(self, answered: _Answered, powers: Mapping[str, float]) -> bool:
        if answered.evidence >= LIMIT:
            alternatives = answered.likelihoods.keys() - {answered.best}
            return alternatives <= set(answered.excluded(answered.best))
        telling = {name for name, chance in powers.items() if chance >= _TELLING}
        return bool(powers) and telling <= set(answered.excluded())

    def power(self, answered: _Answered, total: int) -> dict[str, float]:
        kinds = [number for number, question in enumerate(self.questions) if question.kind not in self.skipped]
        served = members(self.tables.at(kinds))
        listed = round(float(np.median([len(reply.logprobs) for reply in answered.replies])))
        count = sum(member.hypothesis == PUBLISHED for member in served)
        best = served[int(np.argmax(answered.sums[:count]))]
        return power(served, best, listed, total)

    def company(self, answered: _Answered) -> tuple[_Answered, dict[str, tuple[int, ...]]]:
        """Ask once more, many at once; return the first answers, and {at once: [answers, equal bits, equal tokens]}."""
        first = dict(zip(answered.numbers, answered.replies))
        crowded = _Answered(self.questions, self.tables)
        equal: dict[str, tuple[int, ...]] = {}
        for burst in _BURSTS:
            if self.remaining < burst or not first:
                break
            numbers = [answered.numbers[place % len(answered.numbers)] for place in range(burst)]
            try:
                with ThreadPoolExecutor(burst) as pool:
                    replies = list(pool.map(self.ask, numbers))
            except InputError as error:  # it takes fewer at once
                self.notes["at once"] = f"{burst} at once: {error}"
                break
            pairs = [(first[number], reply) for number, reply in zip(numbers, replies) if reply is not None]
            bits = sum(alone == reply for alone, reply in pairs)
            tokens = sum(alone.text == reply.text for alone, reply in pairs)
            equal[str(burst)] = len(pairs), bits, tokens
            for number, reply in zip(numbers, replies):
                if burst == _BURSTS[-1] and reply is not None and number not in crowded.numbers:
                    crowded.add(number, reply)
        if crowded.numbers:
            crowded.weigh()
        return crowded, equal


def certify(endpoint: Endpoint, model: str, hypotheses_json: Path, requests: int, company: bool = True) -> Certificate:
    """Return the certificate of an endpoint. Raises InputError where it does not answer."""
    hypotheses = Hypotheses.load(hypotheses_json)
    tables = read_tables(hypotheses_json, hypotheses)
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    session = _Session(endpoint, hypotheses.questions, tables, requests)
    answered, powers = session.alone(min(sum(_BURSTS), requests // 3) if company else 0)
    crowded, equal = session.company(answered) if company else (_Answered((), tables), {})
    best = answered.best
    evidence = answered.evidence
    excluded = answered.excluded(best)
    telling = {name for name, chance in powers.items() if chance >= _TELLING}
    if evidence >= LIMIT:
        verdict = DIFFERS
    elif crowded.evidence >= LIMIT:
        verdict = DIFFERS
        best = COMPANY
        evidence = crowded.evidence
    elif best == PUBLISHED and telling <= set(excluded):
        verdict = AS_PUBLISHED
    else:
        verdict = UNDECIDED
    answers = [
        {"question": number, "text": reply.text, "logprobs": dict(reply.logprobs)}
        for number, reply in zip(answered.numbers, answered.replies)
    ]
    return Certificate(
        url=endpoint.url,
        model=model,
        began=began,
        hypotheses=sha256_file(hypotheses_json),
        reference=hypotheses.reference,
        evidence=_evidence(session, answered),
        requests=requests - session.remaining,
        verdict=verdict,
        best=best,
        log_likelihoods=answered.relative(),
        trace={name: answered.trace_of(name) for name in answered.likelihoods},
        excluded=tuple(excluded),
        log_evidence=evidence,
        power=powers,
        company=equal,
        skipped=tuple(session.notes.values()),
        answers=tuple(answers),
    )


def _evidence(session: _Session, answered: _Answered) -> str:
    count = max(len(reply.logprobs) for reply in answered.replies)
    if count == 0:
        return "tokens alone"
    return f"log-probabilities of up to {count} tokens"


def holds(equal: Mapping[str, Sequence[int]]) -> str:
    """Return what company leaves as it is, in words. equal: {requests at once: [answers, equal bits, equal tokens]}."""
    if not equal:
        return "not tried"
    if all(bits == count for count, bits, _ in equal.values()):
        return "bits hold"
    if all(tokens == count for count, _, tokens in equal.values()):
        return "tokens hold, bits do not"
    return "neither bits nor tokens hold"


def line(certificate: Certificate) -> str:
    """Return the verdict as a line."""
    if certificate.verdict == DIFFERS:
        words = f"differs: {certificate.best}"
    else:
        words = certificate.verdict
        open_ones = [name for name in certificate.log_likelihoods if name not in (*certificate.excluded, PUBLISHED)]
        if open_ones:
            words += f", {', '.join(open_ones)} not excluded"
    return (
        f"{certificate.url} {certificate.model}: {words} ({certificate.requests} requests, {certificate.evidence}; "
        f"at once: {holds(certificate.company)})"
    )
