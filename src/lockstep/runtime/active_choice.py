"""The choices of a request: their preparation, their state while they run, and how their tokens are chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.runtime.bad_words import BadWordFilter
from lockstep.runtime.checkpoints import Checkpoint
from lockstep.runtime.grammar.matcher import ForcedTokens, Matcher
from lockstep.runtime.request import Request, Token
from lockstep.runtime.scheduler import Scheduled
from lockstep.step.logits_pipeline import Masks, Row, Sampler
from lockstep.step.sampling import Sampled

ModelRow = np.ndarray | Sampled  # what a step gives for a row: logits [vocab_size] float32, or the model's choice


@dataclass(frozen=True)
class PreparedRequest:
    """A request that can be queued at once.

    prompt: int32 [num_tokens]. prefix: the keys of its whole chunks. samplers, bad_words: of each choice.
    """

    request: Request
    prompt: np.ndarray
    prefix: Sequence[bytes]
    samplers: Sequence[Sampler]
    bad_words: Sequence[BadWordFilter | None]

    @classmethod
    def of(
        cls, request: Request, prompt: np.ndarray, prefix: Sequence[bytes], checkpoint: Checkpoint
    ) -> PreparedRequest:
        """Prepare the choices. Raises InputError for bad words without a tokenizer."""
        tokens: np.ndarray | tuple[()] = ()
        if request.sampling.changes_logits:
            tokens = np.concatenate([prompt, np.array(request.answer_ids, np.int32)])
        samplers = []
        word_filters: list[BadWordFilter | None] = []
        for number in range(request.choice, request.choice + request.n):
            samplers.append(Sampler(request.sampling, tokens, request.stop_ids, number, len(prompt)))
            word_filter = None
            if texts := request.sampling.bad_texts:
                word_filter = BadWordFilter(checkpoint.vocabulary, texts, prompt)
                for token in request.answer_ids:
                    word_filter.push(token)
            word_filters.append(word_filter)
        return cls(request, prompt, prefix, samplers, word_filters)


@dataclass(eq=False, slots=True)
class ActiveChoice:
    """Choice `number` of a request, which the scheduler knows as `scheduled`.

    index: of the request. answer: its tokens; the next step computes the last one. replayed: tokens that were returned
    before an interruption and are still to be recomputed. sampling_slot: the slot whose sampling parameters the model
    has, or -1. bad_words: has seen all tokens of `replayed`. masked_ends: whether the masks that the model has exclude
    end tokens; None: it has no masks. grammar_failed: the grammar allows no token. eos_token_ids: of its checkpoint.
    is_constrained: a grammar, which may still be compiled, or a given answer says which tokens may come.
    sampling_needs_logits: see `Sampling.needs_logits`.
    """

    index: int
    number: int
    request: Request
    prompt: np.ndarray
    sampler: Sampler
    scheduled: Scheduled
    eos_token_ids: Collection[int]
    answer: list[int] = field(default_factory=list)
    sampling_slot: int = -1
    replayed: deque[int] = field(default_factory=deque)
    matcher: Matcher | ForcedTokens | None = None
    bad_words: BadWordFilter | None = None
    prompt_logprobs: int | None = None
    masked_ends: bool | None = None
    grammar_failed: bool = False
    is_constrained: bool = field(init=False)
    sampling_needs_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute once what each step asks."""
        self.is_constrained = bool(self.request.grammar or self.request.forced_ids)
        self.sampling_needs_logits = self.request.sampling.needs_logits

    def needs_logits(self, device_processes: bool) -> bool:
        """Return whether the host chooses the next token.

        Also where choices that are still to fork draw from the same logits. device_processes: the model does more than
        draw: penalties, masks, log-probabilities.
        """
        request = self.request
        if request.choose or (self.scheduled.siblings and request.sampling.temperature):
            return True
        return not device_processes and (self.is_constrained or self.sampling_needs_logits)

    @property
    def mask_needs_answer(self) -> bool:
        """Return whether the tokens that may come next depend on those before, besides their number."""
        sequences = self.request.sampling.bad_sequences
        return self.is_constrained or bool(self.bad_words or any(len(sequence) > 1 for sequence in sequences))

    def forget_slot(self) -> None:
        """Note that the device has no parameters and masks of this choice: they were of another slot, or are old."""
        self.sampling_slot = -1
        self.masked_ends = None

    def masks(self, vocab_size: int, num_unknown: int) -> Masks | None:
        """Return the tokens that the model may choose next; None if it knows them, or if all are allowed.

        num_unknown: tokens of the answer that the host does not have yet.
        """
        sampling = self.request.sampling
        masks_ends = len(self.sampler.answer) + num_unknown < sampling.min_tokens
        # Masks that only `min_tokens` and single bad tokens make are sent once, and again when end tokens get allowed.
        if not self.mask_needs_answer:
            needs_none = not masks_ends and not sampling.bad_sequences and self.masked_ends is None
            if needs_none or masks_ends == self.masked_ends:
                return None
        allowed = self._allowed()
        if self.grammar_failed:
            return None
        self.masked_ends = masks_ends
        return self.sampler.masks(vocab_size, allowed, self._forbidden, num_unknown)

    def _allowed(self) -> np.ndarray | None:
        """Return what the grammar allows; None for all. Sets `grammar_failed` if it allows none."""
        if self.matcher is None:
            return None
        allowed = self.matcher.allowed(self.request.stop_ids.intersection(self.eos_token_ids))
        self.grammar_failed = allowed is None
        return allowed

    @property
    def _forbidden(self) -> np.ndarray:
        return np.zeros(0, np.int64) if self.bad_words is None else self.bad_words.tokens()

    def pipeline_row(self, row: np.ndarray | Sampled) -> Row | None:
        """Return what the logits pipeline chooses the next token from.

        None if the model or `Request.choose` chooses it, if it was given out before, or if the grammar allows none.
        row: the choice's logits, or what the model chose.
        """
        if isinstance(row, Sampled) or self.request.choose or self.replayed or not self.request.max_new_tokens:
            return None
        allowed = self._allowed()
        if self.grammar_failed:
            return None
        return Row(self.sampler, row, self.scheduled.num_computed, allowed, self._forbidden)

    def next_token(self, row: np.ndarray | Sampled, sampled: Sampled | None, max_seq_len: int) -> Token | None:
        """Append the next token; return None for one that was given out before.

        With its `finish` the choice has ended. row: as for `pipeline_row`. sampled: what the pipeline chose.
        """
        request = self.request
        if not request.max_new_tokens:
            return Token(self.index, -1, None, "max_new_tokens", self.number)
        if self.replayed:
            # It was chosen from the same logits before, and the sampler has it since the request was prepared.
            self.answer.append(self.replayed.popleft())
            return None
        if isinstance(row, Sampled):
            sampled = row
            if row.token >= 0:
                self.sampler.push(row.token)
        elif request.choose is not None:
            sampled = Sampled(int(request.choose(row)))
        sampled, finish = self._consume(sampled)
        token = sampled.token
        self.answer.append(token)
        # In this order: an end token is one whatever else ends the answer with it.
        if token in request.stop_ids or (finish == "grammar_end" and token in self.eos_token_ids):
            finish = "stop_id"
        elif finish is None and len(self.answer) == request.max_new_tokens:
            finish = "max_new_tokens"
        elif finish is None and self.scheduled.num_computed == max_seq_len:
            finish = "max_seq_len"
        logits = None if isinstance(row, Sampled) else row
        return Token(self.index, token, logits, finish, self.number, sampled.logprobs)

    def _consume(self, sampled: Sampled | None) -> tuple[Sampled, str | None]:
        """Return the token and, if logits or grammar allow none after it, why; sampled: None if none was allowed."""
        if sampled is None or self.grammar_failed:
            return Sampled(-1), "grammar_error"
        if sampled.token < 0:
            return sampled, "error"
        if self.bad_words is not None:
            self.bad_words.push(sampled.token)
        if self.matcher is None:
            return sampled, None
        end = self.matcher.consume(sampled.token)
        if end == "grammar_error":
            sampled = Sampled(-1)
        return sampled, end
