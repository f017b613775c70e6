"""Faults of the runtime: the KV cache, the packing of a step, page tables of fused attention, sums over ranks.

A wrap takes the right function and gives the faulty one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from faults.fault import HOST, RUNTIME, Fault
from faults.harm import Requests
from lockstep import Engine, Request, Sampling
from lockstep.runtime.drafts import Speculation
from lockstep.step import ranks
from lockstep.step.host import HostExecutor
from lockstep.step.host_step import HostStep, RowAttention
from lockstep.step.kv_cache import KVCache
from lockstep.step.pages import PagePool
from lockstep.verify.golden.drafted import RecordedDrafter

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Change = Callable[[], AbstractContextManager[Any]]


def instead(owner: Any, name: str, wrap: Wrap) -> Change:
    """Have `wrap(right)` in place of a function of `owner`."""
    return lambda: mock.patch.object(owner, name, wrap(getattr(owner, name)))


def all_changes(*changes: Change) -> Change:
    @contextmanager
    def opened() -> Iterator[None]:
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change())
            yield

    return opened


# The cache on the host


def late(right):
    def write(self, layer, cache_row, start, key, value):
        right(self, layer, cache_row, start + 1 if start + 1 + len(key) <= cache_row.capacity else start, key, value)

    return write


def to_the_row_before(right):
    return lambda self, layer, cache_row, start, key, value: right(
        self, layer, replace(cache_row, index=max(cache_row.index - 1, 0)), start, key, value
    )


def second_chunk_lost(right):
    def write(self, layer, cache_row, start, key, value):
        if not start:
            right(self, layer, cache_row, start, key, value)

    return write


def past_one_short(right):
    def past(self, index, chunk, kind):
        pair = right(self, index, chunk, kind)
        if chunk.start > 1:
            self.calls += [partial(array[:, :, -1].fill, 0) for array in pair]
        return pair

    return past


def growth_loses(rows: Callable[[int], slice]) -> Wrap:
    """Lose the cache rows `rows(length)` of a request that outgrows its row."""

    def wrap(right):
        def reserve(self, slot, length):
            before = self._cache_rows.get(slot)
            moved = right(self, slot, length)
            if before not in (None, self._cache_rows[slot]):
                for keys, values in self._row(self._cache_rows[slot]):
                    for array in (keys, values):
                        array[:, :, rows(int(self.lengths[slot]))] = 0
            return moved

        return reserve

    return wrap


def others_lost(right):
    def grow(self, rows, capacity, count):
        is_grown = right(self, rows, capacity, count)
        for array in (*rows.keys, *rows.values):
            array[:] = 0
        return is_grown

    return grow


def plans_outlive_growth(right):
    def reserve(self, slot, length):
        right(self, slot, length)
        return False  # nothing has moved

    return reserve


def stale_after_reset(right):
    def drop(self, cache_row):
        self.rows[cache_row.capacity].slots[cache_row.index] = None

    return drop


def row_before_where_alone(right):
    def view(self, layer, capacity, low, high):
        back = 1 if high - low == 1 and low else 0
        return right(self, layer, capacity, low - back, high - back)

    return view


def row_3_not_written(right):
    def write_each(self, group, capacity, rows, starts, key, value):
        is_written = rows != 3
        right(self, group, capacity, rows[is_written], starts[is_written], key[:, is_written], value[:, is_written])

    return write_each


def rows_swapped(right):
    def write_each(self, group, capacity, rows, starts, key, value):
        step = -1 if len(rows) > 2 else 1
        right(self, group, capacity, rows, starts, key[:, ::step], value[:, ::step])

    return write_each


def last_layer_not_written(right):
    def write_each(self, group, capacity, *what):
        arrays = self.rows[capacity]
        saved = arrays.keys[group][-1].copy(), arrays.values[group][-1].copy()
        right(self, group, capacity, *what)
        arrays.keys[group][-1], arrays.values[group][-1] = saved

    return write_each


# Drafts that are verified


def first_wrong_draft_accepted(right):
    def verify(self, drafts, choices, choose):
        tokens = []
        for choice, draft, rows in drafts:
            is_right = True
            for token, row in zip(draft, rows):
                if choice.scheduled not in choices or not is_right:
                    break
                is_right = choice.answer[-1] == token
                choice.scheduled.num_computed += 1
                tokens += choose([(choice, row)])
            if choice.scheduled in choices:
                self._model.keep(choice.scheduled.slot, choice.scheduled.num_computed)
        return tokens

    return verify


def rejected_tokens_stay(right):
    def call(self, rows, attention):
        position = rows["position_ids"][0]
        before = [cached[position].copy() for cached in self._cached]
        right(self, rows, attention)
        for cached, stale in zip(self._cached, before):
            if stale.any():
                cached[position] = stale

    return call


def not_cleared(right):
    def keep(self, slot, length):
        self.lengths[slot] = length

    return keep


def noise_of_the_last(right):
    def choose(self, advances, logits):
        rows = [replace(a, start=a.start + len(a.tokens) - 1) if a.verifies else a for a in advances]
        return right(self, rows, logits)

    return choose


def drafted(requests: Requests) -> Iterator[np.ndarray]:
    """Answers with drafts, of which each third token is wrong: logits along given tokens, and tokens that are drawn."""
    model = requests.model
    following = iter(requests.sequences[1].tolist())
    forced = Request(requests.sequences[0][:20], 60, lambda logits: next(following))
    drawn = Request(requests.sequences[2][:20], 60, sampling=Sampling(4.0, seed=1))
    answers = {(0, 0): requests.sequences[1][:60].tolist()}
    answers[1, 0] = [output.token for output in Engine(model, prefix_caching=False).run([drawn])]
    speculation = Speculation(RecordedDrafter(answers, 3), 4)
    logits = []
    tokens = []
    for output in Engine(model, prefix_caching=False, speculation=speculation).run([forced, drawn]):
        (tokens.append(output.token) if output.request else logits.append(output.logits))
    yield np.stack(logits)
    yield np.eye(model.vocab_size, dtype=np.float32)[tokens]


# The packing of a step


def gaps_closed(right):
    def write_decoded(self, decoded):
        for part, tokens, new in zip(self.layout.decoding, self.slices, self._new):
            rows = decoded[part.capacity]
            starts = self.tokens.position_ids[tokens][rows - part.low]
            count = len(rows)
            for group, (keys, values) in enumerate(new):
                self._cache.write_each(group, part.capacity, rows, starts, keys[:, :count], values[:, :count])

    return write_decoded


def packed(spoil: Callable[[Any, Any], None]) -> Wrap:
    """Apply `spoil(step, advances)` to each step that was packed."""

    def wrap(right):
        def pack(self, step, advances):
            rows = right(self, step, advances)
            spoil(step, advances)
            return rows

        return pack

    return wrap


def chunks_from_zero(step, advances) -> None:
    for chunk, tokens in zip(step.layout.chunks, step.slices[len(step.layout.decoding) :]):
        step.tokens.position_ids[tokens] = np.arange(chunk.count)


def last_but_one_of_chunks(step, advances) -> None:
    for i, advance in enumerate(advances):
        step.logit_rows[i] -= len(advance.tokens) > 1


def in_order_of_slots(step, advances) -> None:
    if len(step.logit_rows) > len(advances):  # of a step that verifies drafts: several of a request
        return
    step.logit_rows[:] = step.logit_rows[np.argsort([advance.slot for advance in advances], kind="stable")]


# Fused attention on a GPU


def fused(name: str, wrap: Wrap) -> Change:
    def opened() -> AbstractContextManager[Any]:
        from lockstep_gpu.attention.fused import FusedAttention  # loads cuDNN

        return instead(FusedAttention, name, wrap)()

    return opened


def table(spoil: Callable[[np.ndarray], None]) -> Change:
    """Apply `spoil` to the page table [rows, pages of a row] whenever a row has grown, before it goes to the device."""

    def wrap(right):
        def reserve(self, ends, lengths):
            sent = list(self._sent)
            moved = right(self, ends, lengths)
            if self._sent != sent:
                spoil(self._host_table)
                self._table_staging.send(self._stream, [(self.table, self._host_table)])
            return moved

        return reserve

    return fused("reserve", wrap)


def second_page_is_first(pages: np.ndarray) -> None:
    pages[:, 1] = pages[:, 0]


def row_1_has_row_0s(pages: np.ndarray) -> None:
    pages[1] = pages[0]


def row_3_has_row_2s_first(pages: np.ndarray) -> None:
    pages[3, 0] = pages[2, 0]


def third_page_missing(pages: np.ndarray) -> None:
    pages[:, 2] = 0


def last_pages_swapped(pages: np.ndarray) -> None:
    """Swap the third and fourth page of rows that have four: earlier writes to the third are then at the fourth."""
    grown = pages[:, 3] != 0
    pages[grown, 2], pages[grown, 3] = pages[grown, 3], pages[grown, 2]


def given_twice(right):
    def release(self, pages):
        right(self, pages)
        self._free += [page for page in pages if page in self._free]

    return release


def past_short(right):
    return lambda self, chunks: right(
        self, [(row, start - 1 if start else start, low, high) for row, start, low, high in chunks]
    )


# Sums over ranks


def sums(combine: Callable[[list[np.ndarray]], np.ndarray]) -> Change:
    def all_reduce(partials: list[np.ndarray], total: np.ndarray) -> None:
        np.copyto(total, combine(partials), casting="same_kind")

    return instead(ranks, "_all_reduce", lambda right: all_reduce)


INVARIANT = ("onnxruntime",)  # a backend whose rows have the same bits in any number, which drafts need
on_host, on_gpu = (functools.partial(Fault, where=RUNTIME, backends=names) for names in (HOST, ("tensorrt",)))
# fmt: off
FAULTS = (
    on_host("cache-late", "a prompt's keys and values one row too far", change=instead(KVCache, "write", late)),
    on_host("cache-row-before", "a prompt's keys and values in the row of the request before",
            change=instead(KVCache, "write", to_the_row_before)),
    on_host("cache-second-chunk", "only a prompt's first chunk is written",
            change=instead(KVCache, "write", second_chunk_lost)),
    on_host("cache-growth", "what a request held is lost when it outgrows its row",
            change=instead(KVCache, "reserve", growth_loses(lambda length: slice(None)))),
    on_host("cache-growth-last", "the last token is lost when a request outgrows its row",
            change=instead(KVCache, "reserve", growth_loses(lambda length: slice(max(length - 1, 0), length)))),
    on_host("cache-rows", "what other requests hold is lost when a row is added beside theirs",
            change=instead(KVCache, "_grow", others_lost)),
    on_host("cache-past", "the last token before a chunk is hidden from it",
            change=instead(HostStep, "_past", past_one_short)),
    on_host("cache-growth-plans", "bound calls still read the cache as it was before it grew",
            change=instead(KVCache, "reserve", plans_outlive_growth)),
    on_host("cache-stale", "a row is not cleared for the next request, which masks what it holds",
            change=instead(KVCache, "_drop_row", stale_after_reset)),
    on_host("cache-view", "a request that is alone reads the cache of the one before",
            change=instead(KVCache, "view", row_before_where_alone)),
    on_host("cache-row-3", "decoded tokens of the fourth request are not written",
            change=instead(KVCache, "write_each", row_3_not_written)),
    on_host("cache-swapped", "decoded tokens of more than two requests in reverse order",
            change=instead(KVCache, "write_each", rows_swapped)),
    on_host("cache-last-layer", "decoded tokens are not written in the last layer",
            change=instead(KVCache, "write_each", last_layer_not_written)),
    on_host("draft-accepted", "the first wrong token of a draft is accepted",
            change=instead(Speculation, "verify", first_wrong_draft_accepted), shown_by=drafted, backends=INVARIANT),
    on_host("draft-stale", "what a rejected token of a draft left in the cache is not overwritten",
            change=all_changes(instead(HostExecutor, "keep", not_cleared),
                               instead(RowAttention, "__call__", rejected_tokens_stay)),
            shown_by=drafted, backends=INVARIANT),
    on_host("draft-noise", "tokens of a draft are drawn with the noise of its last position",
            change=instead(HostExecutor, "_choose", noise_of_the_last), shown_by=drafted, backends=INVARIANT),
    on_host("step-gaps", "decoding rows with a gap between them are written as if there were none",
            change=instead(HostStep, "write_decoded", gaps_closed)),
    on_host("step-chunk-positions", "positions of each chunk begin at 0",
            change=instead(HostExecutor, "pack", packed(chunks_from_zero))),
    on_host("step-chunk-row", "logits of a prompt's last token but one",
            change=instead(HostExecutor, "pack", packed(last_but_one_of_chunks))),
    on_host("step-order", "logits in the order of the slots, not of the list",
            change=instead(HostExecutor, "pack", packed(in_order_of_slots))),
    on_gpu("pages-second", "a row's second page is its first", change=table(second_page_is_first)),
    on_gpu("pages-row-1", "the second request has the first's pages", change=table(row_1_has_row_0s)),
    on_gpu("pages-row-3", "the fourth request's first page is the third's", change=table(row_3_has_row_2s_first)),
    on_gpu("pages-third", "a row's third page is page 0", change=table(third_page_missing)),
    on_gpu("pages-swapped", "a row's third and fourth page swapped when it has four", change=table(last_pages_swapped)),
    on_gpu("pages-twice", "pages of a request that ended are given out twice",
           change=instead(PagePool, "release", given_twice)),
    on_gpu("pages-length", "a chunk's past one token short", change=fused("begin", past_short)),
)
RANKS = (
    on_host("sum-left-out", "the first rank's partial sums stand for all", change=sums(lambda parts: parts[0]),
            model="ranks"),
    on_host("sum-mean", "the mean of the partial sums", change=sums(lambda parts: np.mean(parts, axis=0)),
            model="ranks"),
    on_host("sum-twice", "the first rank's partial sum twice", change=sums(lambda parts: parts[0] + parts[0]),
            model="ranks"),
)
# fmt: on
