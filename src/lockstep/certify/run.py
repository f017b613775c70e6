"""Certify an endpoint: ask until the answers tell the hypothesis.

In: an endpoint, and hypotheses (`certify.tables`). Out: a certificate. Questions are asked one by one, for as much as
the endpoint gives, until every hypothesis that the requests can tell from the published model is excluded, or "as
published" is, or the requests are used up. The remaining ones ask the same questions at once.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lockstep.artifacts.certificate import (
    AS_PUBLISHED,
    CHAT,
    COMPLETION,
    DIFFERS,
    UNDECIDED,
    Certificate,
    Hypotheses,
    Question,
)
from lockstep.artifacts.files import sha256_file
from lockstep.certify.answers import Answered, beginnings, read_tables
from lockstep.certify.client import Endpoint, Form, FormRefused, NotServed, Reply, Spent, TooLong
from lockstep.certify.likelihood import EXCLUDED, LIMIT, OTHER, PUBLISHED, RARE, SOME, Tables, members_at, power
from lockstep.errors import InputError
from lockstep.progress import steps

COMPANY = "answers that depend on company"
_BURSTS = (1, 2, 5, 17, 65)  # requests at once; the first repeats answers alone
MIN_POWER = 0.99  # power from which a hypothesis must be excluded
# At 1 in 1,000: log(1,000) / -log(1 - share) is 66 and 342 where no answer speaks for the fault.
_REQUESTS_TO_EXCLUDE = {SOME: 80, RARE: 400}
_ANSWERS_BEFORE_POWER = 16  # answers after which the power of further ones is computed


class _Session:
    """The requests of one certificate."""

    def __init__(self, endpoint: Endpoint, questions: Sequence[Question], tables: Tables) -> None:
        self.endpoint = endpoint
        self.questions = questions
        self.tables = tables
        self.forms: dict[str, Form] = {}
        self.skipped: set[str] = set()  # kinds that the endpoint does not serve
        self.notes: dict[str, str] = {}
        self.power: dict[str, float] = {}
        self.most_requests = 0  # of which each tells something new

    @property
    def testable(self) -> set[str]:
        """Return the hypotheses that must be excluded: those that the requests can tell."""
        beyond = {name for name, count in _REQUESTS_TO_EXCLUDE.items() if self.most_requests < count}
        return {name for name, chance in self.power.items() if chance >= MIN_POWER} - beyond

    def ask(self, number: int) -> Reply | None:
        """Return the reply to a question; None where the endpoint does not serve its kind, or not so long a one."""
        question = self.questions[number]
        kind = question.kind
        while kind not in self.skipped:
            form = self.forms.setdefault(kind, Form(echoes=kind != CHAT))
            try:
                return self.endpoint.ask(question, form)
            except FormRefused as error:
                self.forms[kind] = error.weaker
            except TooLong as error:
                self.notes.setdefault("too long", str(error))
                return None
            except NotServed as error:
                self.notes[kind] = str(error)
                self.skipped.add(kind)
                if len(self.skipped) == len({question.kind for question in self.questions}):
                    raise
        return None

    def alone(self, reserve: int) -> Answered:
        """Ask question by question, until `reserve` requests remain."""
        answered = Answered(self.questions, self.tables)
        total = min(self.endpoint.remaining - reserve, len(self.questions))
        self.most_requests = total
        parts: set[int] | None = None
        pending = list(range(len(self.questions)))
        for _ in steps(range(len(pending)), "certify: endpoint", "questions"):
            number = pending.pop(0)
            if self.endpoint.remaining <= reserve:
                break
            try:
                reply = self.ask(number)
            except Spent:
                break
            if reply is None:
                continue
            if reply.prompt and parts is None:  # an answer to a long prompt tells those to its beginnings
                parts = self._parts(pending)
                self.most_requests = min(total, len(self.questions) - len(parts))
                total = len(self.questions)
                pending.sort(key=parts.__contains__)
            answered.add(number, reply)
            if len(answered.replies) == _ANSWERS_BEFORE_POWER:
                answered.weigh()
                self.power = self._power(answered, total, answered.likelihoods)
            if answered.is_weighed and self._is_decided(answered):
                break
        if not answered.replies:
            raise InputError(f"{self.endpoint.url}: expected answers, found none; raise --requests")
        answered.weigh()
        if not self.power:
            self.power = self._power(answered, total, answered.likelihoods)
        # The others are excluded by now, or all requests are sent.
        self.power.update(self._power(answered, len(answered.replies), [RARE]))
        return answered

    def _parts(self, numbers: Sequence[int]) -> set[int]:
        """Return the questions that the answers to others tell."""
        parts: set[int] = set()
        for number in numbers:
            parts.update(beginnings(self.questions, number, len(self.questions[number].prompt_ids)))
        return parts

    def _is_decided(self, answered: Answered) -> bool:
        if answered.evidence >= LIMIT:
            others = answered.likelihoods.keys() - {answered.best, OTHER, SOME, RARE}
            return others <= answered.excluded(answered.best)
        return self.is_as_published(answered)

    def is_as_published(self, answered: Answered) -> bool:
        """Return whether "as published" excludes what it must, too many unknown texts too."""
        limit = 0.0 if self.most_requests < _REQUESTS_TO_EXCLUDE[SOME] else EXCLUDED
        return bool(self.testable) and self.testable <= answered.excluded() and answered.log_known >= limit

    def _power(self, answered: Answered, total: int, names: Collection[str]) -> dict[str, float]:
        """Return the power of `total` answers like those so far against the hypotheses `names`."""
        kinds = [number for number, question in enumerate(self.questions) if question.kind not in self.skipped]
        served = members_at(answered.members, kinds)
        counts: dict[str, list[int]] = {CHAT: [], COMPLETION: []}
        for number, reply in answered.replies.items():
            counts[self.questions[number].kind].append(len(reply.token.logprobs))
        # Questions that are left get as many as those of their kind that were answered, in turn.
        turns = {kind: itertools.cycle(numbers or [0]) for kind, numbers in counts.items()}
        listed = np.array([next(turns[self.questions[number].kind]) for number in kinds])
        count = sum(member.hypothesis == PUBLISHED for member in served)
        best = served[int(np.argmax(answered.sums[:count]))]
        return power(served, best, listed, total, names)

    def company(self, answered: Answered) -> tuple[Answered, dict[str, tuple[int, ...]]]:
        """Ask once more, many at once; return the first answers, and {at once: [answers, equal bits, equal tokens]}."""
        alone = list(answered.replies)
        crowded = Answered(self.questions, self.tables)
        equal: dict[str, tuple[int, ...]] = {}
        for burst in _BURSTS:
            if self.endpoint.remaining < burst:
                break
            numbers = [alone[place % len(alone)] for place in range(burst)]
            try:
                with ThreadPoolExecutor(burst) as pool:
                    replies = list(pool.map(self.ask, numbers))
            except (InputError, Spent) as error:  # it takes fewer at once
                self.notes["at once"] = f"{burst} at once: {error}"
                break
            pairs = [(answered.replies[number], reply) for number, reply in zip(numbers, replies) if reply is not None]
            bits = sum(first == reply for first, reply in pairs)
            tokens = sum(first.token.text == reply.token.text for first, reply in pairs)
            equal[str(burst)] = len(pairs), bits, tokens
            for number, reply in zip(numbers, replies):
                if burst == _BURSTS[-1] and reply is not None and number not in crowded.replies:
                    crowded.add(number, reply)
        crowded.weigh()
        return crowded, equal


def certify(endpoint: Endpoint, hypotheses_json: Path, company: bool = True) -> Certificate:
    """Return the certificate of an endpoint. Raises InputError where it does not answer."""
    hypotheses = Hypotheses.load(hypotheses_json)
    tables = read_tables(hypotheses_json, hypotheses)
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    requests = endpoint.remaining
    session = _Session(endpoint, hypotheses.questions, tables)
    answered = session.alone(min(sum(_BURSTS[:-1]), requests // 3) if company else 0)
    crowded = Answered((), tables)
    equal: dict[str, tuple[int, ...]] = {}
    if company:
        crowded, equal = session.company(answered)
    best = answered.best
    excluded = answered.excluded(best)
    evidence = max(answered.evidence, crowded.evidence)
    verdict = UNDECIDED
    if evidence >= LIMIT:
        verdict = DIFFERS
        if answered.evidence < LIMIT:
            best = COMPANY
    elif best == PUBLISHED and session.is_as_published(answered) and crowded.log_known >= 0:
        verdict = AS_PUBLISHED
    answers = [
        {"question": number, "text": reply.token.text, "logprobs": dict(reply.token.logprobs)}
        for number, reply in answered.replies.items()
    ]
    trace = {}
    for name in answered.likelihoods:
        trace[name] = tuple(look[name] for look in answered.trace)
    return Certificate(
        url=endpoint.url,
        model=endpoint.model,
        began=began,
        hypotheses=sha256_file(hypotheses_json),
        reference=hypotheses.reference,
        evidence=_evidence(answered, answered.num_unknown + crowded.num_unknown),
        requests=requests - endpoint.remaining,
        verdict=verdict,
        best=best,
        log_likelihoods=answered.relative(),
        trace=trace,
        excluded=tuple(sorted(excluded)),
        log_evidence=evidence,
        power=session.power,
        company=equal,
        skipped=tuple(session.notes.values()),
        answers=tuple(answers),
    )


def _evidence(answered: Answered, num_unknown: int) -> str:
    replies = answered.replies.values()
    counts = [len(reply.token.logprobs) for reply in replies]
    words = "tokens alone"
    if any(counts):
        words = f"log-probabilities of up to {max(counts)} tokens"
    if 0 in counts and any(counts):
        words += f" in {sum(count > 0 for count in counts)} of {len(counts)} answers"
    if any(reply.prompt for reply in replies):
        words += ", of prompts too"
    if num_unknown:
        words += f", {num_unknown} unknown texts"
    return words
