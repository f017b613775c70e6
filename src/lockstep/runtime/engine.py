"""The engine: requests of token ids in, tokens out.

Generation, the golden check, the benchmarks and the server all run this one loop over a model's steps. `Scheduler`
decides the contents of a step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import CheckError, InputError
from lockstep.runtime.active_choice import ActiveChoice
from lockstep.runtime.bad_words import BadWordFilter
from lockstep.runtime.checks import check_request
from lockstep.runtime.completion import Collector, Completion
from lockstep.runtime.drafts import Speculation
from lockstep.runtime.grammar.matcher import ForcedTokens, GrammarCompiler
from lockstep.runtime.model import Model, fitting_chunk_size
from lockstep.runtime.prefix import chunk_keys, root_key
from lockstep.runtime.request import NOT_FINITE, PreparedRequest, Request, Speed, Token
from lockstep.runtime.scheduler import Admission, Scheduled, Scheduler, SchedulerOptions, SchedulerOutput, Status
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.advance import PREVIOUS_TOKEN, Advance
from lockstep.step.logits_pipeline import Sampler, choose, log_probabilities
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Logprobs, Sampled, Sampling
from lockstep.targets import Limits

# Prefill tokens of a step in which other requests decode, on a GPU. Its GEMMs are compute-bound from about here on, so
# a larger step finishes the prompts hardly sooner: records/cuda.md, "The server".
_MAX_PREFILL_TOKENS = 512
# The cache of root keys is bounded, since a client may send another salt with each request.
MAX_ROOT_KEYS = 1024
# How long a step waits for grammars to compile when it has nothing to compute.
_GRAMMAR_POLL_S = 0.005
_LOAD_POLL_S = 0.001  # the same for weights


class Engine:
    """Run requests: call `add` at any time, and `step` while `has_work`. Not thread-safe.

    The model chooses the tokens, greedy or sampled (`Model.step_tokens`). On a GPU no logits are copied back, and the
    next step is scheduled and launched before the tokens of this one are known (async scheduling). A request whose
    token the host chooses (`choose`; on a CPU whatever is more than a draw) gets its own logits copied back; a step
    with such a request is not launched ahead, nor one with masks that need this step's tokens (grammars, bad words).

    A request with a grammar waits, without a slot, until the grammar is compiled; other requests go on. `refused` lists
    the requests whose grammar failed to compile in the last step, each with one line that says why; they have ended.
    """

    def __init__(
        self,
        model: Model,
        max_input_len: int | None = None,
        max_num_tokens: int | None = None,
        prefix_caching: bool = True,
        admission: Admission = "guaranteed",
        long_prefill_token_threshold: int | None = None,
        grammars: Mapping[str, GrammarCompiler] | None = None,
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
        if speculation is not None:
            model.check_verifies_drafts()
            speculation.on_host = model.engines.backend.on_host
        self.speed = Speed()
        self.speculation = speculation
        self._model = model
        self._device_processes = model.processes_logits and not samples_on_host and speculation is None
        budget = max_num_tokens or model.max_num_tokens or Limits().max_num_tokens
        chunk_size = fitting_chunk_size(model.chunk_size, model.max_batch_size, budget)
        if admission == "optimistic" and model.tables.shares is None:
            raise InputError(
                f"admission: expected guaranteed, for the attention of {model.engines.path} cannot be swapped out, "
                "found optimistic"
            )
        if long_prefill_token_threshold is None and model.engines.backend.on_host:
            # On a CPU a step's time grows with its tokens, so single chunks delay other requests least. On a GPU a
            # step has a fixed cost, and a few long steps delay fewer tokens of other requests than many short ones.
            long_prefill_token_threshold = chunk_size
        options = SchedulerOptions(
            model.max_batch_size,
            budget,
            chunk_size,
            admission,
            long_prefill_token_threshold,
            None if model.engines.backend.on_host else _MAX_PREFILL_TOKENS,
            compacts=bool(model.tables.shares) and not model.has_state,
            lookahead=lookahead,
        )
        residency = model.adapters.residency if model.adapters is not None else None
        self._scheduler = Scheduler(
            model.tables, options, residency, model.checkpoints.residency, model.checkpoints.is_bound
        )
        self._max_prompt_len = model.max_seq_len
        if max_input_len is not None:
            self._max_prompt_len = min(max_input_len, model.max_seq_len)
        # A cached prefix must have been computed in the chunks that it would be computed in now (for the same bits),
        # and be in pages that slots can share or copy.
        self.prefix_caching = (
            prefix_caching
            and model.tables.shares is not None
            and (not model.has_state or model.tables.state_pages > 0)
            and chunk_size == model.chunk_size
            and chunk_size % PAGE_SIZE == 0
        )
        # Keyed by the client's salt and the adapter's digest: another adapter may be loaded under the same name.
        self.root_key = functools.lru_cache(MAX_ROOT_KEYS)(functools.partial(root_key, model))
        self.choices: dict[Scheduled, ActiveChoice] = {}
        self.swapped: dict[Scheduled, Any] = {}
        self._grammars = grammars or {}
        # Choices of requests whose grammar is being compiled, by request number.
        self._compiling: dict[int, list[ActiveChoice]] = {}
        self._next_index = 0
        self.refused: list[tuple[int, str]] = []
        # The same of requests whose weights cannot be loaded.
        self.failed: list[tuple[int, str]] = []
        # Of the last step: (request, position of the first token, log-probabilities of it and the tokens after it).
        self.prompt_logprobs: list[tuple[int, int, list[Logprobs]]] = []
        # Of the last step: (request, tokens of its prompt that came from the prefix cache).
        self.admitted: list[tuple[int, int]] = []
        # Prompt tokens looked up in the prefix cache, and prompt tokens found there.
        self.prefix_queries = 0
        self.prefix_hits = 0
        # When the previous step ended, if this one was already launched then.
        self._step_start: float | None = None
        # (request, choice) aborted since the last step; choice None: all of the request.
        self._aborted: set[tuple[int, int | None]] = set()
        # The next step, if it was scheduled before the tokens of this one are known.
        self._scheduled_ahead: SchedulerOutput | None = None

    @property
    def has_work(self) -> bool:
        """Return whether there are requests that have not ended."""
        return bool(self.choices)

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler, for counters: requests running and waiting, pages."""
        return self._scheduler

    def prepare(self, request: Request, is_checked: bool = False) -> PreparedRequest:
        """Check a request, and make what `add` would compute of its prompt. In any thread.

        is_checked: its values are in range, and prompt_ids int32.

        Raises InputError for a prompt that is empty or too long, for values out of range, and for an adapter or bad
        words that the model does not have.
        """
        model = self._model
        if not is_checked:
            request = check_request(request, model, self._max_prompt_len, bool(self._grammars))
        model.checkpoints[request.checkpoint]  # raises InputError for an unknown one
        model.check_adapter(request.adapter)
        prompt = np.asarray(request.prompt_ids)
        prefix: list[bytes] = []
        if self.prefix_caching and request.prompt_logprobs is None and len(prompt) > self._scheduler.options.chunk_size:
            adapter = model.adapters.digest(request.adapter) if model.adapters is not None else None
            root = self.root_key(request.cache_salt, adapter, request.checkpoint)
            prefix = chunk_keys(root, prompt, self._scheduler.options.chunk_size)
        samplers = self._samplers(request, prompt)
        return PreparedRequest(request, prompt, prefix, samplers, self._bad_words(request, prompt))

    def _samplers(self, request: Request, prompt: np.ndarray) -> list[Sampler]:
        tokens: np.ndarray | tuple[()] = ()
        if request.sampling.changes_logits:
            tokens = np.concatenate([prompt, np.array(request.answer_ids, np.int32)])
        numbers = range(request.choice, request.choice + request.n)
        return [Sampler(request.sampling, tokens, request.stop_ids, number, len(prompt)) for number in numbers]

    def _bad_words(self, request: Request, prompt: np.ndarray) -> list[BadWordFilter | None]:
        """Return the bad-word filter of each choice. Raises InputError without a vocabulary."""
        texts = request.sampling.bad_texts
        if not texts:
            return [None] * request.n
        filters: list[BadWordFilter | None] = []
        for _ in range(request.n):
            word_filter = BadWordFilter(self._model.checkpoints[request.checkpoint].vocabulary, texts, prompt)
            for token in request.answer_ids:
                word_filter.push(token)
            filters.append(word_filter)
        return filters

    def update_weights(self, weights_json: Path, waiting: Callable[[], None] = lambda: None) -> str:
        """Replace the weights of the first checkpoint, and return the model's new identity.

        Cached prefixes of the old weights are not reused. waiting: called again and again until the new ones are there.
        Raises InputError while there are requests.
        """
        if self.has_work:
            raise InputError("update_weights: expected an engine without requests, found some; step until they ended")
        self._model.checkpoints.update("", weights_json, waiting)
        self.root_key.cache_clear()
        return root_key(self._model).hex()

    def describe(self) -> Iterator[str]:
        """Yield a line about the engine, and one about each choice that has not ended."""
        scheduler = self._scheduler
        tables = scheduler.tables
        pool = tables.pool
        yield (
            f"engine: {scheduler.num_running} running, {scheduler.num_waiting} waiting, {len(self._compiling)} with "
            f"grammars that compile; {pool.num_available} of {pool.num_pages} pages free, {pool.num_cached} cached"
        )
        for scheduled, choice in self.choices.items():
            num_pages = len(tables[scheduled.slot]) if scheduled.slot >= 0 else 0
            yield (
                f"request {choice.index} ({choice.request.id}): choice {choice.number} {scheduled.status.name.lower()} "
                f"in slot {scheduled.slot}, {num_pages} pages, {scheduled.num_computed} tokens computed of "
                f"{scheduled.num_prompt_tokens} of its prompt and {len(choice.answer)} of its answer"
            )

    def add(self, request: Request | PreparedRequest, index: int | None = None) -> int:
        """Queue a request and return its number.

        index: the number to give it, unused so far; by default the next one.

        Raises what `prepare` does, and InputError for a request whose KV cache could never fit.
        """
        index = self._next_index if index is None else index
        if not self.choices:
            # A step launched ahead for requests that have all ended must not count as this request's time.
            self._step_start = None
        prepared = request if isinstance(request, PreparedRequest) else self.prepare(request)
        request = prepared.request
        prompt = prepared.prompt
        # The last new token is returned but never computed, so it needs no cache row.
        max_tokens = min(len(prompt) + max(1, request.max_new_tokens) - 1, self._model.max_seq_len)
        choices = [
            Scheduled(len(prompt), max_tokens, request.priority, adapter=request.adapter, checkpoint=request.checkpoint)
            for _ in range(request.n)
        ]
        choices[0].prefix = prepared.prefix
        # Choices fork from the first one's computed prompt; without shared or copied pages each computes it itself.
        if self._model.tables.shares is not None:
            choices[0].siblings = choices[1:]
        queued = choices[:1] if choices[0].siblings else choices
        for scheduled in queued:
            self._scheduler.add(scheduled, is_held=request.grammar is not None)
        self._next_index = max(self._next_index, index + 1)
        end_ids = self._model.checkpoints[request.checkpoint].eos_token_ids
        for scheduled, sampler, word_filter in zip(choices, prepared.samplers, prepared.bad_words):
            replayed = deque(request.answer_ids)
            self.choices[scheduled] = ActiveChoice(
                index,
                sampler.choice,
                request,
                prompt,
                sampler,
                scheduled,
                end_ids,
                replayed=replayed,
                bad_words=word_filter,
            )
            if request.forced_ids:
                rest = request.forced_ids[len(request.answer_ids) :]
                self.choices[scheduled].matcher = ForcedTokens(rest, self._model.vocab_size)
        self.choices[choices[0]].prompt_logprobs = request.prompt_logprobs
        if request.grammar is not None:
            self._compiling[index] = [self.choices[scheduled] for scheduled in choices]
            self._grammars[request.checkpoint].submit(index, request.grammar, request.answer_ids)
        return index

    def add_all(self, requests: Iterable[Request]) -> list[int]:
        """Queue all of the requests, or none, and return their numbers.

        Raises InputError, which names the prompt by its position, where `add` rejects one.
        """
        added: list[int] = []
        try:
            for request in requests:
                added.append(self.add(request))
        except InputError as error:
            for index in added:
                self.abort(index)
            raise InputError(f"prompt {len(added) + 1}: {str(error).removeprefix('prompt_ids: ')}") from None
        return added

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
        is_needed = any(choice.scheduled in self.choices for choice in compiling)
        if compiling and not is_needed:
            self._grammars[compiling[0].request.checkpoint].forget(index)
            del self._compiling[index]
        return bool(aborted)

    def close(self) -> None:
        for index in [*self._compiling]:
            self.abort(index)
        self._end_all([*self.choices.values()])

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Token]:
        """Add requests and yield their tokens until all have ended. Closing the iterator early aborts all requests."""
        self.add_all(requests)
        with contextlib.closing(self.steps()) as steps:
            for tokens in steps:
                yield from tokens

    def steps(self, feed: Callable[[], bool] = lambda: False) -> Generator[Iterator[Token]]:
        """Step until no request is left, and yield the tokens of each step.

        A choice that the caller aborts at one of its tokens yields no more. Closing the generator early aborts all
        requests.

        feed: called before each step; adds requests, and returns whether it may add more later.

        Raises InputError for a request whose grammar does not compile.
        """
        try:
            while feed() or self.has_work:
                tokens = self.step()
                for _, message in (*self.refused, *self.failed):
                    raise InputError(message)
                yield (token for token in tokens if not self._was_aborted(token))
        finally:
            self.close()

    def _was_aborted(self, token: Token) -> bool:
        return not self._aborted.isdisjoint({(token.request, None), (token.request, token.choice)})

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | np.ndarray],
        tokenizer: Tokenizer,
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        max_new_tokens: int = 16,
        stop: Sequence[str] = (),
        n: int = 1,
    ) -> list[Completion]:
        """Complete all prompts (text or token ids), and return the completions in their order.

        sampling: one for all prompts, or one for each.

        Raises InputError, before any step, for an invalid prompt, and while other requests run: their tokens would be
        lost.
        """
        if isinstance(prompts, str):
            raise InputError(f"prompts: expected a list, found one text; give [{prompts[:20]!r}]")
        if self.has_work:
            raise InputError("generate: expected an engine without requests, found some; step until they have ended")
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(prompts):
            raise InputError(
                f"sampling: expected one, or one for each of {len(prompts)} prompts, found {len(samplings)}"
            )
        stop_ids = frozenset(self._model.eos_token_ids)
        requests = []
        collectors = []
        for prompt, prompt_sampling in zip(prompts, samplings):
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            requests.append(Request(ids, max_new_tokens, stop_ids=stop_ids, sampling=prompt_sampling, n=n))
            collectors.append(Collector(tokenizer, ids, n, stop, prompt_sampling.min_tokens))
        collector_of = dict(zip(self.add_all(requests), collectors))
        try:
            for token in self.run():
                collector = collector_of[token.request]
                collector.push(token)
                if collector.stopped(token):
                    self.abort(token.request, token.choice)
        finally:
            self.close()
        return [collector.completion for collector in collectors]

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], logprobs: int = 0
    ) -> list[list[Logprobs]]:
        """Return the log-probability of each token of given answers, with the bits that decoding it gives.

        logprobs: how many of the likeliest tokens to list besides.

        Raises InputError as `generate` does, and CheckError for logits that are not finite.
        """
        if self.has_work:
            raise InputError("score: expected an engine without requests, found some; step until they have ended")
        sampling = Sampling(logprobs=logprobs)
        requests = []
        for prompt, answer in zip(prompts, answers, strict=True):
            requests.append(Request(prompt, len(answer), sampling=sampling, forced_ids=answer))
        scores: dict[int, list[Logprobs]] = {number: [] for number in self.add_all(requests)}
        for token in self.run():
            if token.logprobs is None:
                raise CheckError(NOT_FINITE)
            scores[token.request].append(token.logprobs)
        return list(scores.values())

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

    def _choose_all(self, step: SchedulerOutput, rows: Sequence[np.ndarray | Sampled]) -> list[Token]:
        """Choose the next tokens of each request of a step.

        rows: what `_run_model` returned.
        """
        first_rows: list[tuple[ActiveChoice, np.ndarray | Sampled]] = []
        drafted: list[tuple[ActiveChoice, Sequence[int], Sequence[np.ndarray | Sampled]]] = []
        remaining_rows = iter(rows)
        for scheduled, _ in step.shares:
            row = next(remaining_rows)
            if not scheduled.in_prompt:
                first_rows += [(self.choices[choice], row) for choice in (scheduled, *self._fork(scheduled))]
            if draft := step.drafts.get(scheduled):
                drafted.append((self.choices[scheduled], draft, [next(remaining_rows) for _ in draft]))
        tokens = self._choose(first_rows)
        if drafted:
            tokens += self._verify(drafted)
        return tokens

    def _verify(
        self, drafted: Sequence[tuple[ActiveChoice, Sequence[int], Sequence[np.ndarray | Sampled]]]
    ) -> list[Token]:
        """Choose the token after each draft token, for as long as the draft equals the chosen tokens.

        drafted: choice, draft, logits or token after each token of it; none for a choice that ended with the token
        before. Afterwards the cache holds what plain decoding would have put there.
        """
        assert self.speculation is not None
        tokens: list[Token] = []
        accepted = Counter[ActiveChoice]()
        drafted = [entry for entry in drafted if entry[0].scheduled in self.choices]
        # One round for each position of the drafts, over all choices whose drafts were right so far: choosing many
        # tokens at once is much faster than one at a time.
        continued = drafted
        for number in itertools.count():
            continued = [
                (choice, draft, rows)
                for choice, draft, rows in continued
                if number < len(draft) and choice.scheduled in self.choices and choice.answer[-1] == draft[number]
            ]
            if not continued:
                break
            for choice, _, _ in continued:
                choice.scheduled.num_computed += 1
                accepted[choice] += 1
            tokens += self._choose([(choice, rows[number]) for choice, _, rows in continued])
        for choice, draft, _ in drafted:
            self.speed.decode_tokens += accepted[choice]
            self.speculation.verified(choice, len(draft), accepted[choice])
            if choice.scheduled in self.choices:
                self._model.keep(choice.scheduled.slot, choice.scheduled.num_computed)
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
                    self._scheduler.unhold(choice.scheduled)

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
        scheduler = self._scheduler
        while (victim := scheduler.victim()) is not None:
            self.swapped[victim] = model.swap_out(victim.slot)
            self.choices[victim].forget_slot()
            self._forget_drafts(self.choices[victim])
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
        self._draft(step)
        return step

    def _draft(self, step: SchedulerOutput) -> None:
        if self.speculation is None or any(scheduled.in_prompt for scheduled, _ in step.shares):
            return
        choices = {self.choices[scheduled]: scheduled for scheduled, _ in step.shares}
        room = {
            choice: min(scheduled.max_tokens - scheduled.num_computed - 1, self._model.room(scheduled.num_computed + 1))
            for choice, scheduled in choices.items()
            if not choice.replayed
        }
        if room:
            drafts = self.speculation.propose(room, self._max_verified - len(choices) + len(room))
            step.drafts = {choices[choice]: draft for choice, draft in drafts.items()}

    def _drafts_follow(self, step: SchedulerOutput) -> bool:
        """Return whether the next step may have drafts, which are made of this step's tokens."""
        if self.speculation is None:
            return False
        if step.drafts:
            return True
        choices = [self.choices[scheduled] for scheduled, _ in step.shares if not scheduled.in_prompt]
        return len(choices) == len(step.shares) and self.speculation.is_due(choices, self._max_verified)

    @property
    def _max_verified(self) -> int:
        return min(self._model.max_verify_tokens, self._scheduler.options.max_num_tokens)

    def _forget_drafts(self, choice: ActiveChoice) -> None:
        if self.speculation is not None:
            self.speculation.forget(choice)

    def _run_model(self, step: SchedulerOutput) -> Sequence[np.ndarray | Sampled]:
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
        rows: list[np.ndarray | Sampled] = [
            Sampled(token, logprobs.get(slot)) for token, slot in zip(tokens.tolist(), slots)
        ]
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
                # Parameters are needed at the end of the prompt, but changing them would disturb a step launched ahead.
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
        sampling = choice.request.sampling
        if choice.sampling_slot != slot and (sampling.temperature or sampling.needs_logits):
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
        copies = self._scheduler.computed(step)
        try:
            for request, start, pages in copies:
                self._model.store(request.slot, start, pages)
        finally:
            for *_, pages in copies:
                self._scheduler.stored(pages)

    def _may_schedule_ahead(self, step: SchedulerOutput) -> bool:
        """Return whether the next step can be scheduled before this one's tokens are known.

        It can if the tokens decide only which requests end: no choice forks after the step, none replays tokens of an
        interrupted answer, none is masked by them, no draft continues it, and no request is to be swapped out or moved.
        """
        if self._scheduler.is_spread or self._drafts_follow(step):
            return False
        for scheduled, _ in step.shares:
            choice = self.choices[scheduled]
            if not scheduled.in_prompt and (scheduled.siblings or choice.replayed or choice.mask_needs_answer):
                return False
        return self._scheduler.victim() is None

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
        siblings = self._scheduler.forked(scheduled)
        for sibling in siblings:
            self._model.fork(scheduled.slot, sibling.slot)
        return siblings

    def _choose(self, rows: Sequence[tuple[ActiveChoice, np.ndarray | Sampled]]) -> list[Token]:
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
            if ended in self.choices:
                self._forget_drafts(self.choices.pop(ended))
            self.swapped.pop(ended, None)
            if ended.slot >= 0:
                self._model.release(ended.slot)
        self._scheduler.finish(scheduled)
