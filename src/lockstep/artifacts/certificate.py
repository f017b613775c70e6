"""The documents of `lockstep certify`: the expectations of hypotheses, and the answers of an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document
from lockstep.artifacts.places import FileEntry
from lockstep.errors import CheckError

COMPLETION = "completion"
CHAT = "chat"
LOOK_INTERVAL = 8  # answers between two looks at the evidence, at least
AS_PUBLISHED = "as published"  # a verdict, and a hypothesis
DIFFERS = "differs"
UNDECIDED = "undecided"


@dataclass(frozen=True)
class Question:
    """One request for one token.

    kind: COMPLETION or CHAT. text: the prompt, or the user's message. prompt_ids: what the model reads. tokens: the
    candidates for the next one, the likeliest first; texts: of each.
    """

    kind: str
    text: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Hypotheses(Document):
    """What each hypothesis expects of the answers to the same questions.

    reference: the sha256 of golden's reference, whose prompts these are. tables: a safetensors file with
    `values.<name>` [questions, candidates] float32, log-probabilities under a hypothesis, -inf where a question has
    fewer candidates, and `noise.<precision>` [questions] float32, the rms error of log-probabilities in that precision.
    """

    FORMAT: ClassVar[str] = formats.HYPOTHESES
    layers: int | str
    reference: str
    questions: tuple[Question, ...]
    tables: FileEntry


@dataclass(frozen=True)
class Certificate(Document):
    """The verdict on an endpoint, and its grounds.

    verdict: AS_PUBLISHED, DIFFERS or UNDECIDED. best: the likeliest hypothesis. log_likelihoods: natural
    logarithms, relative to the likeliest; trace: these after each `LOOK_INTERVAL` answers. excluded: hypotheses that
    are far less likely than the best (`certify.answers`). log_evidence: against "as published", the largest at any
    look. power: {hypothesis: the stated chance that as many requests tell it from the published model}. company:
    {requests at once: [answers, equal log-probabilities, equal tokens]}. answers: the number of each question, and the
    answer.
    """

    FORMAT: ClassVar[str] = formats.CERTIFICATE
    url: str
    model: str
    began: str
    hypotheses: str
    reference: str
    evidence: str
    requests: int
    verdict: str
    best: str
    log_likelihoods: Mapping[str, float]
    trace: Mapping[str, tuple[float, ...]]
    excluded: tuple[str, ...]
    log_evidence: float
    power: Mapping[str, float]
    company: Mapping[str, tuple[int, ...]]
    skipped: tuple[str, ...]
    answers: tuple[Mapping[str, Any], ...]

    @property
    def holds(self) -> str:
        """Return in words what stays the same where requests run at once."""
        if not self.company:
            return "not tried"
        # Equal log-probabilities are as near to equal bits as an endpoint shows.
        if all(bits == count for count, bits, _ in self.company.values()):
            return "bits hold"
        if all(tokens == count for count, _, tokens in self.company.values()):
            return "tokens hold, bits do not"
        return "neither bits nor tokens hold"

    @property
    def line(self) -> str:
        """Return the verdict as a line."""
        words = self.verdict
        not_excluded = [name for name in self.log_likelihoods if name not in (*self.excluded, AS_PUBLISHED)]
        if self.verdict == DIFFERS:
            words = f"differs: {self.best}"
        elif not_excluded:
            words += f", not excluded: {', '.join(not_excluded)}"
        return f"{self.url} {self.model}: {words} ({self.requests} requests, {self.evidence}; at once: {self.holds})"

    def check(self) -> None:
        """Raise CheckError unless the verdict is "as published"."""
        if self.verdict != AS_PUBLISHED:
            raise CheckError(self.line)
