"""What an endpoint has answered so far, and how likely that is under each hypothesis.

In: hypotheses (`certify.tables`), and replies to their questions. Out: sums of log-likelihoods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.certificate import COMPLETION, LOOK_INTERVAL, Hypotheses, Question
from lockstep.artifacts.dtypes import numpy_dtype
from lockstep.artifacts.files import sha256_file
from lockstep.certify.client import Reply, Token, token_id
from lockstep.certify.likelihood import (
    EXCLUDED,
    LIMIT,
    OTHER,
    PUBLISHED,
    RARE,
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
)
from lockstep.checkpoint.safetensors_header import read_header
from lockstep.errors import InputError

# Shares of answers with an unknown text: of endpoints as published, which write a token in another way at times, at
# most (records/certify.md has 0 of 318 for each); and of one that passes with a probability of at most 1/1,000.
_UNKNOWN_SHARE = 0.005
_TOO_MANY_UNKNOWN = 0.1
_LIKELY = math.log(20)  # a candidate is likely within as many nats of the likeliest


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
class Answered:
    """Replies to questions, by number, and their likelihoods."""

    questions: Sequence[Question]
    tables: Tables
    replies: dict[int, Reply] = field(default_factory=dict)
    sums: Any = 0.0  # log-likelihoods, [members]
    evidence: float = -np.inf  # the most at any look
    likelihoods: Mapping[str, float] = field(default_factory=dict)
    trace: list[Mapping[str, float]] = field(default_factory=list)
    num_unknown: int = 0  # replies of `has_unknown_text`
    _new: list[tuple[int, Token, bool, bool]] = field(default_factory=list)
    _valued: set[int] = field(default_factory=set)

    @cached_property
    def members(self) -> list[Member]:
        """The members of all hypotheses, on all questions."""
        return members(self.tables)

    def add(self, number: int, reply: Reply) -> None:
        """Take a reply, and its answers to questions that its prompt begins with."""
        self.replies[number] = reply
        self.num_unknown += has_unknown_text(self.questions[number], reply.token, self.tables.values[PUBLISHED][number])
        self._new.append((number, reply.token, True, number not in self._valued))
        self._valued.add(number)
        for other in beginnings(self.questions, number, len(reply.prompt)):
            if other not in self._valued:
                self._valued.add(other)
                self._new.append((other, reply.prompt[len(self.questions[other].prompt_ids)], False, True))
        if len(self._new) >= LOOK_INTERVAL:
            self.weigh()

    @property
    def is_weighed(self) -> bool:
        return not self._new

    def weigh(self) -> None:
        """Weigh the replies since the last look."""
        if self.is_weighed:
            return
        numbers, tokens, is_chosen, is_new = zip(*self._new)
        self._new.clear()
        answers = as_answers([self.questions[number] for number in numbers], tokens, self.tables)
        chosen = np.where(is_chosen, answers.chosen, UNKNOWN)
        all_members = members_at(self.members, numbers)
        answers = Answers(answers.values, chosen, np.array(is_new), is_first=np.array(is_chosen))
        likelihoods = log_likelihoods(all_members, answers)
        self.sums = self.sums + likelihoods.sum(axis=1)
        sums = by_hypothesis(all_members, self.sums)
        self.likelihoods = {name: float(value) for name, value in sums.items()}
        self.evidence = max(self.evidence, float(log_evidence(sums)))
        self.trace.append(self.relative())

    def relative(self) -> dict[str, float]:
        """Return the log-likelihoods relative to the likeliest."""
        largest = max(self.likelihoods.values())
        return {name: value - largest for name, value in self.likelihoods.items()}

    def excluded(self, than: str = PUBLISHED) -> set[str]:
        """Return the hypotheses that another one excludes: a fault needs more than "as published" does."""
        limit = EXCLUDED if than == PUBLISHED else LIMIT
        return {name for name, value in self.likelihoods.items() if self.likelihoods[than] - value >= limit}

    @property
    def log_known(self) -> float:
        """The log-likelihood ratio of few replies with unknown texts to too many."""
        num_readable = len(self.replies) - self.num_unknown
        ratio = num_readable * math.log((1 - _UNKNOWN_SHARE) / (1 - _TOO_MANY_UNKNOWN))
        return ratio + self.num_unknown * math.log(_UNKNOWN_SHARE / _TOO_MANY_UNKNOWN)

    @property
    def best(self) -> str:
        """The likeliest hypothesis. What any error fits gives way to the next one, unless that is excluded."""
        likeliest, second = sorted(self.likelihoods, key=lambda name: -self.likelihoods[name])[:2]
        if likeliest in (OTHER, SOME, RARE) and second != PUBLISHED and second not in self.excluded(likeliest):
            return second
        return likeliest


def beginnings(questions: Sequence[Question], number: int, count: int) -> list[int]:
    """Return the odd ones of the completions whose tokens a question begins with; none unless it has `count` tokens.

    The even ones are asked: a fault in some requests is found by as many requests, whatever each of them answers.
    """
    ids = questions[number].prompt_ids
    if len(ids) != count:
        return []
    shorter = []
    for other, question in enumerate(questions):
        length = len(question.prompt_ids)
        if other % 2 and question.kind == COMPLETION and length < count and question.prompt_ids == ids[:length]:
            shorter.append(other)
    return shorter


def as_answers(questions: Sequence[Question], tokens: Sequence[Token], tables: Tables) -> Answers:
    """Return tokens by candidate. A text that none has, or several have, or a part of a character, tells nothing."""
    values = np.full((len(tokens), tables.values[PUBLISHED].shape[1]), np.nan)
    chosen = np.full(len(tokens), UNKNOWN)
    for row, (question, token) in enumerate(zip(questions, tokens)):
        places = _places(question, token)
        for name, value in token.logprobs.items():
            if (place := _place(places, name)) >= 0:
                values[row, place] = value
        chosen[row] = _place(places, token.text)
    return Answers(values, chosen)


def has_unknown_text(question: Question, token: Token, published: np.ndarray) -> bool:
    """Return whether a token's text tells nothing, though the texts of the likely candidates would.

    published: log-probabilities of the candidates.
    """
    places = _places(question, token)
    if _place(places, token.text) != UNKNOWN:
        return False
    likely = [question.texts[number] for number in np.flatnonzero(published >= published.max() - _LIKELY)]
    return all(_place(places, text) != UNKNOWN and _plain(token.text) != text.strip() for text in likely)


def _places(question: Question, token: Token) -> dict[str | int, int]:
    """Return the candidates' numbers by id and by text, UNKNOWN for a text of several."""
    places: dict[str | int, int] = {candidate: place for place, candidate in enumerate(question.tokens)}
    for place, text in enumerate(question.texts):
        spellings = {text}
        if not token.logprobs:
            spellings.add(text.strip())  # as some endpoints write a whole answer
        for spelling in spellings:
            places[spelling] = UNKNOWN if spelling in places else place
    return places


def _plain(name: str) -> str:
    return name.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")


def _place(places: Mapping[str | int, int], name: str) -> int:
    if (number := token_id(name)) is not None:
        return places.get(number, STRANGE)
    text = _plain(name)
    if not text or "\ufffd" in text or text.startswith(("bytes:", "<")):
        return UNKNOWN
    return places.get(text, UNKNOWN)  # endpoints write tokens in many ways
