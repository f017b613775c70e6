"""The core of the engine: requests of token ids are added at any time, and each step gives tokens.

Generation, the checks, the benchmarks and the server all run this one loop over a model's steps. `Scheduler` decides
the contents of a step.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.active_choice import ActiveChoice, ModelRow, PreparedRequest
from lockstep.runtime.checks import check_request
from lockstep.runtime.drafts import Speculation, VerifiedDraft
from lockstep.runtime.grammar.matcher import ForcedTokens
from lockstep.runtime.model import Model, fitting_chunk_size
from lockstep.runtime.prefix import chunk_keys, root_key
from lockstep.runtime.request import Request, Speed, Token
from lockstep.runtime.scheduler import Admission, Scheduled, Scheduler, SchedulerOptions, SchedulerOutput, Status
from lockstep.step.advance import PREVIOUS_TOKEN, Advance
from lockstep.step.logits_pipeline import choose, log_probabilities
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Logprobs, Sampled
from lockstep.targets import Limits

if TYPE_CHECKING:
    from lockstep.runtime.grammar.compiler import Compiler

# Prefill tokens of a step in which other requests decode, on a GPU. Its GEMMs are compute-bound from about here on, so
# a larger step finishes the prompts hardly sooner: records/cuda.md, "The server".
_MAX_PREFILL_TOKENS = 512
# The cache of root keys is bounded, since a client may send another salt with each request.
MAX_ROOT_KEYS = 1024
# How long a step that has nothing to compute waits for grammars to compile, or for weights.
_GRAMMAR_POLL_S = 0.005
_LOAD_POLL_S = 0.001


class EngineCore:
    """The requests of an engine: call `add` at any time, and `step` while `has_work`. Not thread-safe.

    The model chooses the tokens, greedy or sampled (`Model.step_tokens`). On a GPU no logits are copied back, and the
    next step is scheduled and launched before the tokens of this one are known (async scheduling). A request whose
    token the host chooses (`choose`; on a CPU whatever is more than a draw) gets its own logits copied back; a step
    with such a request is not launched speculatively, nor one with masks that need this step's tokens (grammars, bad
    words).

    A request with a grammar waits, without a slot, until the grammar is compiled; other requests go on.

    Attributes:
        choices: The choices that have not ended, as the scheduler knows them.
        root_key: `prefix.root_key` of a salt, an adapter's digest and a checkpoint, cached.
        prefix_queries, prefix_hits: Prompt tokens looked up in the prefix cache, and found there.
        refused, failed: (request, line that says why) of those that the last step ended, because their grammar does
            not compile, or their weights cannot be loaded.
        admitted: (request, tokens of its prompt from the prefix cache) of those that the last step admitted.
        prompt_logprobs: (request, position of the first token, log-probabilities of it and those after it) of the last
            step.
    """

    def __init__(
        self,
        model: Model,
        max_input_len: int | None = None,
        max_num_tokens: int | None = None,
        prefix_caching: bool = True,
        admission: Admission = "guaranteed",
        long_prefill_token_threshold: int | None = None,
        grammars: Mapping[str, Compiler] | None = None,
        speculation: Speculation | None = None,
        lookahead: int | None = None,
        samples_on_host: bool = False,
    ):
        """Make an engine without requests.

        Args:
            max_num_tokens: limit of tokens in one step, at most the model's.
            long_prefill_token_threshold: limit of tokens of one prompt in a step in which other requests decode, in
                whole chunks; by default one chunk on a CPU, no limit on a GPU.
            grammars: compile the grammars of requests, one for each checkpoint; None: no request may have one.
            speculation: proposes draft tokens. Answers are bit-identical with and without it.
            lookahead: see `SchedulerOptions`.
            samples_on_host: on a GPU too, choose from logits whatever is more than a draw, so that tokens have them. It
                is implied by speculation, where each token must be that of a step without drafts.

        Raises:
            InputError: a step has no room for a token of each request, or the model cannot verify drafts.
        """
        on_host = model.engines.backend.on_host
        budget = max_num_tokens or model.max_num_tokens or Limits().max_num_tokens
        chunk_size = fitting_chunk_size(model.chunk_size, model.max_batch_size, budget)
        if admission == "optimistic" and model.tables.shares is None:
            raise InputError(
                f"admission: expected guaranteed, for the attention of {model.engines.path} cannot be swapped out, "
                "found optimistic"
            )
        if long_prefill_token_threshold is None and on_host:
            # On a CPU a step's time grows with its tokens, so single chunks delay other requests least. On a GPU a
            # step has a fixed cost, and a few long steps delay fewer tokens of other requests than many short ones.
            long_prefill_token_threshold = chunk_size
        options = SchedulerOptions(
            model.max_batch_size,
            budget,
            chunk_size,
            admission,
            long_prefill_token_threshold,
            None if on_host else _MAX_PREFILL_TOKENS,
            compacts=bool(model.tables.shares) and not model.has_state,
            lookahead=lookahead,
        )
        adapters = model.adapters.residency if model.adapters is not None else None
        checkpoints = model.checkpoints
        self.scheduler = Scheduler(model.tables, options, adapters, checkpoints.residency, checkpoints.is_bound)
        if speculation is not None:
            speculation.attach(model, budget)
        self.speculation = speculation
        self.speed = Speed()
        self._model = model
        self._device_processes = model.processes_logits and not samples_on_host and speculation is None
        self._max_prompt_len = min(max_input_len or model.max_seq_len, model.max_seq_len)
        # A cached prefix must have been computed in the chunks that it would be computed in now (for the same bits),
        # and be in pages that slots can share or copy.
        self.prefix_caching = (
            prefix_caching
            and model.tables.shares is not None
            and (not model.has_state or model.tables.state_pages > 0)
            and chunk_size == model.chunk_size
            and chunk_size % PAGE_SIZE == 0
        )
        self.root_key = functools.lru_cache(MAX_ROOT_KEYS)(functools.partial(root_key, model))
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.choices: dict[Scheduled, ActiveChoice] = {}
        self.swapped: dict[Scheduled, Any] = {}  # what `Model.swap_in` takes
        self._grammars = grammars or {}
        # Choices of requests whose grammar is being compiled, by request number.
        self._compiling: dict[int, list[ActiveChoice]] = {}
        self._next_index = 0
        # (request, choice) aborted since the last step; choice None: all of the request.
        self._aborted: set[tuple[int, int | None]] = set()
        self.refused: list[tuple[int, str]] = []
        self.failed: list[tuple[int, str]] = []
        self.admitted: list[tuple[int, int]] = []
        self.prompt_logprobs: list[tuple[int, int, list[Logprobs]]] = []
        # The next step, if it was scheduled before the tokens of this one are known.
        self._scheduled_ahead: SchedulerOutput | None = None
        # When the previous step ended, if this one was already launched then.
        self._step_start: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.choices)

    def prepare(self, request: Request, is_checked: bool = False) -> PreparedRequest:
        """Check a request, and make what `add` would compute of its prompt. In any thread.

        is_checked: its values are in range, and prompt_ids int32.

        Raises InputError for a prompt that is empty or too long, for values out of range, and for an adapter or bad
        words that the model does not have.
        """
        model = self._model
        if not is_checked:
            request = check_request(request, model, self._max_prompt_len, bool(self._grammars))
        checkpoint = model.checkpoints[request.checkpoint]
        model.check_adapter(request.adapter)
        prompt = np.asarray(request.prompt_ids)
        prefix: list[bytes] = []
        chunk_size = self.scheduler.options.chunk_size
        # A prompt whose log-probabilities were requested is computed whole: cached chunks have no logits.
        if self.prefix_caching and request.prompt_logprobs is None and len(prompt) > chunk_size:
            # By the adapter's digest: another one may be loaded under the same name later.
            adapter = model.adapters.digest(request.adapter) if model.adapters is not None else None
            prefix = chunk_keys(self.root_key(request.cache_salt, adapter, request.checkpoint), prompt, chunk_size)
        return PreparedRequest.of(request, prompt, prefix, checkpoint)

    def add(self, request: Request | PreparedRequest, index: int | None = None) -> int:
        """Queue a request and return its number.

        index: the number to give it, unused so far; by default the next one.

        Raises what `prepare` does, and InputError for a request whose KV cache could never fit.
        """
        index = self._next_index if index is None else index
        if not self.choices:
            # A step launched speculatively for requests that have all ended must not count as this request's time.
            self._step_start = None
        prepared = request if isinstance(request, PreparedRequest) else self.prepare(request)
        request = prepared.request
        prompt = prepared.prompt
        model = self._model
        # The last new token is returned but never computed, so it needs no cache row.
        max_tokens = min(len(prompt) + max(1, request.max_new_tokens) - 1, model.max_seq_len)
        choices = [
            Scheduled(len(prompt), max_tokens, request.priority, adapter=request.adapter, checkpoint=request.checkpoint)
            for _ in range(request.n)
        ]
        choices[0].prefix = prepared.prefix
        queued = choices
        # Choices fork from the first one's computed prompt; without shared or copied pages each computes it itself.
        if model.tables.shares is not None:
            choices[0].siblings = choices[1:]
            queued = choices[:1]
        for scheduled in queued:
            self.scheduler.add(scheduled, is_held=request.grammar is not None)
        # `Scheduler.add` refuses a request before anything here knows it.
        self._next_index = max(self._next_index, index + 1)
        end_ids = model.checkpoints[request.checkpoint].eos_token_ids
        active = []
        for scheduled, sampler, word_filter in zip(choices, prepared.samplers, prepared.bad_words):
            choice = ActiveChoice(
                index,
                sampler.choice,
                request,
                prompt,
                sampler,
                scheduled,
                end_ids,
                replayed=deque(request.answer_ids),
                bad_words=word_filter,
            )
            if request.forced_ids:
                rest = request.forced_ids[len(request.answer_ids) :]
                choice.matcher = ForcedTokens(rest, model.vocab_size)
            self.choices[scheduled] = choice
            active.append(choice)
        active[0].prompt_logprobs = request.prompt_logprobs
        if request.grammar is not None:
            self._compiling[index] = active
            self._grammars[request.checkpoint].submit(index, request.grammar, request.answer_ids)
        return index

    def abort(self, index: int, number: int | None = None) -> bool:
        """End all choices of a request, or its choice `number`, and free its slots and pages.

        The request may be queued, running or swapped out. Returns False if it has ended already.
        """
        aborted = [
            choice for choice in self.choices.values() if choice.index == index and number in (None, choice.number)
        ]
        self._aborted.add((index, number))
        if number is not None:
            for choice in aborted:
                self._hand_over_prompt(choice)
        self._end_all(aborted)
        compiling = self._compiling.get(index, ())
        if compiling and not any(choice.scheduled in self.choices for choice in compiling):
            self._grammars[compiling[0].request.checkpoint].forget(index)
            del self._compiling[index]
        return bool(aborted)

    def close(self) -> None:
        for index in [*self._compiling]:
            self.abort(index)
        self._end_all([*self.choices.values()])

    def step(self) -> list[Token]:
        """Run one step and return its new tokens.

        Raises CheckError when the device fails. This error, and any that `Request.choose` raises, ends all requests.
        """
        self._admit_compiled()
        if self._model.checkpoints.residency is not None:
            self._finish_loads()
        self.prompt_logprobs = []
        self.admitted = []
        self._aborted.clear()
        try:
            step = self._next_step()
            if not step.shares:
                if self._compiling:
                    (first, *_) = self._compiling.values()
                    self._grammars[first[0].request.checkpoint].wait(_GRAMMAR_POLL_S)
                else:
                    self._model.checkpoints.wait(_LOAD_POLL_S)
                return []
            return self._choose_all(step, self._run_model(step))
        except BaseException:
            self.close()
            # The failed step may not have computed the prefixes that were published for it.
            self._model.tables.pool.forget()
            raise

    def _choose_all(self, step: SchedulerOutput, rows: Sequence[ModelRow]) -> list[Token]:
        """Choose the next tokens of each request of a step; rows: what `_run_model` returned."""
        first_rows: list[tuple[ActiveChoice, ModelRow]] = []
        drafts: list[VerifiedDraft] = []
        remaining_rows = iter(rows)
        for scheduled, _ in step.shares:
            row = next(remaining_rows)
            # The row after a chunk that does not end its prompt is computed, but nothing is chosen from it.
            if not scheduled.in_prompt:
                first_rows += [(self.choices[choice], row) for choice in (scheduled, *self._fork(scheduled))]
            if draft := step.drafts.get(scheduled):
                draft_rows = [next(remaining_rows) for _ in draft]
                drafts.append(VerifiedDraft(self.choices[scheduled], draft, draft_rows))
        tokens = self._choose(first_rows)
        if drafts and self.speculation is not None:
            accepted = self.speculation.verify(drafts, self.choices, self._choose)
            self.speed.decode_tokens += len(accepted)
            tokens += accepted
        return tokens

    def _admit_compiled(self) -> None:
        """Let the scheduler admit requests whose grammar is compiled; end those whose grammar failed to compile."""
        self.refused = []
        self.failed = []
        if not self._compiling:
            return
        for index, outcome in itertools.chain.from_iterable(compiler.poll() for compiler in self._grammars.values()):
            choices = self._compiling.pop(index)
            if isinstance(outcome, str):
                self.refused.append((index, outcome))
                self._end_all(choices)
                continue
            for number, choice in enumerate(choices):
                choice.matcher = outcome.fork() if number else outcome
                if choice.scheduled.status is Status.HELD:
                    self.scheduler.unhold(choice.scheduled)

    def _finish_loads(self) -> None:
        """Let steps use weights that are there; end the requests of those that cannot be loaded."""
        checkpoints = self._model.checkpoints
        for name, error in checkpoints.finish_loads():
            choices = [choice for choice in self.choices.values() if choice.request.checkpoint == name]
            self.failed += [(index, str(error)) for index in dict.fromkeys(choice.index for choice in choices)]
            self._end_all(choices)
            checkpoints.forget(name)

    def _next_step(self) -> SchedulerOutput:
        """Return the step scheduled ahead, without requests that have ended since, or schedule one now."""
        step = self._scheduled_ahead
        self._scheduled_ahead = None
        if step is not None:
            step.shares = [(request, count) for request, count in step.shares if request.status is Status.RUNNING]
            if step.shares:
                return step
        return self._schedule()

    def _schedule(self) -> SchedulerOutput:
        model = self._model
        scheduler = self.scheduler
        while (victim := scheduler.victim()) is not None:
            self.swapped[victim] = model.swap_out(victim.slot)
            self.choices[victim].forget_slot()
            if self.speculation is not None:
                self.speculation.forget(self.choices[victim])
            scheduler.swapped_out(victim)
        if scheduler.is_spread:
            for request, slot in scheduler.compact():
                model.move(slot, request.slot)
                self.choices[request].forget_slot()
        step = scheduler.schedule()
        if model.checkpoints.residency is not None:
            model.checkpoints.start_loads()
        for request in step.swapped_in:
            model.swap_in(request.slot, self.swapped.pop(request))
        self.admitted += [(self.choices[request].index, request.num_computed) for request, _ in step.admitted]
        try:
            for request, pages in step.admitted:
                if self.prefix_caching:
                    self.prefix_queries += request.num_prompt_tokens
                    self.prefix_hits += request.num_computed
                if pages:
                    model.share(request.slot, pages, request.num_computed)
        finally:
            # Pages that are shared stay in the slots' page tables; pages that were copied from are no longer needed.
            if not model.tables.shares:
                for _, pages in step.admitted:
                    scheduler.stored(pages)
        if self.speculation is not None:
            self.speculation.add_drafts(step, self.choices)
        return step

    def _run_model(self, step: SchedulerOutput) -> Sequence[ModelRow]:
        """Run the step; return logits, or what the model chose, for each share and each draft token."""
        model = self._model
        advances = self._advances(step)
        prompt_tokens = sum(count for request, count in step.shares if request.in_prompt)
        needing_logits = self._needing_logits(step)
        next_advances: list[Advance] = []
        if model.async_scheduling:
            # Before the tokens are known: the next step may be planned and launched while this one runs.
            self._computed(step)
            if not needing_logits and self._may_schedule_ahead(step):
                self._scheduled_ahead = self._schedule()
                next_advances = self._advances_after(self._scheduled_ahead, step)
        start = self._step_start or time.perf_counter()
        row_indices: list[int] = []
        logits: Sequence[np.ndarray] | np.ndarray = ()
        if needing_logits:
            # The rows of a step are packed in the order of its shares: a share has one, and one for each draft token.
            ends = np.cumsum([advance.num_rows for advance in advances]).tolist()
            for share in needing_logits:
                row_indices += range(ends[share] - advances[share].num_rows, ends[share])
            tokens, logits = model.step_with_logits(advances, row_indices)
        else:
            tokens = model.step_tokens(advances, next_advances)
        logprobs = model.logprobs
        slots = [advance.slot for advance in advances for _ in range(advance.num_rows)]
        rows: list[ModelRow] = [Sampled(token, logprobs.get(slot)) for token, slot in zip(tokens.tolist(), slots)]
        for row_index, row_logits in zip(row_indices, logits):  # in place of the device's choice
            rows[row_index] = row_logits
        end = time.perf_counter()
        if not model.async_scheduling:
            self._collect_prompt_logprobs(step)
            self._computed(step)
        seconds = end - start
        self._step_start = None
        if model.in_flight:  # the next step was launched during this one, so its time begins now
            self._step_start = end
        if prompt_tokens:
            self.speed.prefill_tokens += prompt_tokens
            self.speed.prefill_seconds += seconds
        else:
            self.speed.decode_tokens += len(advances)
            self.speed.decode_seconds += seconds
        return rows

    def _advances(self, step: SchedulerOutput, unknown: Container[Scheduled] = ()) -> list[Advance]:
        """Return the model's input for a step, and set the sampling parameters of slots that are new.

        unknown: requests whose last token the previous step is still computing.
        """
        advances: list[Advance] = []
        if not step.shares:
            return advances
        takes_samplings_early = self._model.async_scheduling
        network = self._model.checkpoints.network(step.shares[0][0].slot)  # a step is of one checkpoint
        for scheduled, count in step.shares:
            choice = self.choices[scheduled]
            start = scheduled.num_computed
            if scheduled.in_prompt:
                tokens = choice.prompt[start : start + count]
            elif scheduled in unknown:
                tokens = PREVIOUS_TOKEN
            else:
                tokens = np.array([choice.answer[-1], *step.drafts.get(scheduled, ())], np.int64)
            keeps_states = scheduled.in_prompt and scheduled.published < len(scheduled.prefix)
            chooses = start + count >= scheduled.num_prompt_tokens
            masks = None
            if not choice.needs_logits(self._device_processes):
                # Parameters are needed at the end of the prompt, but changing them then would disturb a step launched
                # speculatively.
                if takes_samplings_early or chooses:
                    self._set_sampling(choice)
                if chooses and self._device_processes and not choice.replayed:
                    num_unknown = int(tokens is PREVIOUS_TOKEN)
                    masks = choice.masks(self._model.vocab_size, num_unknown)
            verifies = scheduled in step.drafts
            advances.append(Advance(scheduled.slot, tokens, start, verifies, keeps_states, masks, network))
        return advances

    def _set_sampling(self, choice: ActiveChoice) -> None:
        slot = choice.scheduled.slot
        if choice.sampling_slot != slot:
            # Without either the request is greedy, as a slot is that was released.
            if choice.request.sampling.temperature or choice.sampling_needs_logits:
                self._model.set_sampling(slot, choice.sampler)
            choice.sampling_slot = slot

    def _needing_logits(self, step: SchedulerOutput) -> list[int]:
        """Return the indices of the shares whose next token the host chooses."""
        return [
            number
            for number, (scheduled, count) in enumerate(step.shares)
            if scheduled.num_computed + count >= scheduled.num_prompt_tokens
            and self.choices[scheduled].needs_logits(self._device_processes)
        ]

    def _computed(self, step: SchedulerOutput) -> None:
        copies = self.scheduler.computed(step)
        try:
            for request, start, pages in copies:
                self._model.store(request.slot, start, pages)
        finally:
            for *_, pages in copies:
                self.scheduler.stored(pages)

    def _may_schedule_ahead(self, step: SchedulerOutput) -> bool:
        """Return whether the next step can be scheduled before this one's tokens are known.

        It can if the tokens decide only which requests end: no choice forks after the step, none replays tokens of an
        interrupted answer, none is masked by them, no draft continues it, and no request is to be swapped out or moved.
        """
        if self.scheduler.is_spread:
            return False
        if self.speculation is not None and self.speculation.may_follow(step, self.choices):
            return False
        for scheduled, _ in step.shares:
            choice = self.choices[scheduled]
            if not scheduled.in_prompt and (scheduled.siblings or choice.replayed or choice.mask_needs_answer):
                return False
        return self.scheduler.victim() is None

    def _advances_after(self, ahead: SchedulerOutput, step: SchedulerOutput) -> list[Advance]:
        """Return the input of the step after `step`, for the model to launch early; empty if it needs the host."""
        if self._needing_logits(ahead):
            return []
        return self._advances(ahead, {scheduled for scheduled, _ in step.shares})

    def _collect_prompt_logprobs(self, step: SchedulerOutput) -> None:
        for number, (scheduled, _) in enumerate(step.shares):
            choice = self.choices[scheduled]
            if choice.prompt_logprobs is None or not scheduled.in_prompt:
                continue
            logprobs = []
            count = choice.prompt_logprobs
            for start, logits in self._model.logits_after(number):
                # One shorter than `logits` at the end of the prompt: no prompt token follows the last one.
                next_tokens = choice.prompt[start + 1 : start + 1 + len(logits)]
                logprobs += [log_probabilities(row, int(token), count) for row, token in zip(logits, next_tokens)]
            self.prompt_logprobs.append((choice.index, scheduled.num_computed + 1, logprobs))

    def _fork(self, scheduled: Scheduled) -> Sequence[Scheduled]:
        if not scheduled.siblings:
            return ()
        siblings = self.scheduler.forked(scheduled)
        for sibling in siblings:
            self._model.fork(scheduled.slot, sibling.slot)
        return siblings

    def _choose(self, rows: Sequence[tuple[ActiveChoice, ModelRow]]) -> list[Token]:
        """Choose the next token of each choice from its logits, or take the one that the model chose."""
        model = self._model
        pipeline_rows = [choice.pipeline_row(row) for choice, row in rows]
        sampled = iter(choose([row for row in pipeline_rows if row is not None]))
        tokens = []
        for (choice, row), pipeline_row in zip(rows, pipeline_rows):
            from_logits = next(sampled) if pipeline_row is not None else None
            token = choice.next_token(row, from_logits, model.max_seq_len)
            if token is None:
                continue
            tokens.append(token)
            if token.finish:
                self._end(choice)
        return tokens

    def _hand_over_prompt(self, choice: ActiveChoice) -> None:
        """Let the next sibling compute the prompt, which would otherwise end with this choice."""
        sibling = next((sibling for sibling in choice.scheduled.siblings if sibling in self.choices), None)
        if sibling is None:
            return
        heir = self.choices[sibling]
        heir.scheduled = choice.scheduled
        choice.scheduled = sibling
        self.choices[heir.scheduled] = heir
        self.choices[choice.scheduled] = choice
        heir.prompt_logprobs = choice.prompt_logprobs
        heir.forget_slot()

    def _end_all(self, choices: Iterable[ActiveChoice]) -> None:
        for choice in choices:
            # A sibling may have ended with the choice that computed its prompt.
            if choice.scheduled in self.choices:
                self._end(choice)

    def _end(self, choice: ActiveChoice) -> None:
        """Free the slots of a choice, and of the siblings that wait for its prompt."""
        scheduled = choice.scheduled
        waiting_siblings = [sibling for sibling in scheduled.siblings if sibling.status is not Status.RUNNING]
        for ended in (scheduled, *waiting_siblings):
            ended_choice = self.choices.pop(ended, None)
            if ended_choice is not None and self.speculation is not None:
                self.speculation.forget(ended_choice)
            self.swapped.pop(ended, None)
            if ended.slot >= 0:
                self._model.release(ended.slot)
        self.scheduler.finish(scheduled)
