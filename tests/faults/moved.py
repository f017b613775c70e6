"""Faults in what moves state: copies for n choices, requests swapped out, prefixes that are reused, slots used again.

Each with requests that reach it, for users' harm is judged without the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from faults.fault import HOST, RUNTIME, Fault
from faults.harm import Requests
from faults.runtime import fused, instead
from lockstep import Engine, Model, Request, Sampling
from lockstep.step.host import HostExecutor
from lockstep.step.kv_cache import KVCache
from lockstep.step.residency import Residency

_DRAWN = Sampling(4.0, seed=1, logprobs=0)


def of_rows(spoil: Callable[[list[np.ndarray]], None]) -> Callable:
    """Apply `spoil` to keys and values [layers, heads, tokens, dim] of each group that a copy brings."""

    def wrap(right):
        def put(self, slot, content):
            rows = [array.copy() for array in content.arrays]
            spoil(rows)
            right(self, slot, content._replace(arrays=rows))

        return put

    return wrap


def only_in(name: str, wrap: Callable) -> Callable:
    """Have the faulty `_put` inside one of the functions that call it."""

    def wrapped(right):
        def called(self, *arguments):
            with instead(HostExecutor, "_put", wrap)():
                right(self, *arguments)

        return called

    return instead(HostExecutor, name, wrapped)


def last_key_lost(rows: list[np.ndarray]) -> None:
    rows[0][:, :, -1] = 0


def last_layer_lost(rows: list[np.ndarray]) -> None:
    for array in rows:
        array[-1] = 0


def values_smaller(rows: list[np.ndarray]) -> None:
    rows[1] *= rows[1].dtype.type(0.97)


def one_late(rows: list[np.ndarray]) -> None:
    for array in rows:
        array[:, :, 1:] = array[:, :, :-1].copy()


def prefix_of(spoil: Callable[[list[np.ndarray]], None]) -> Callable:
    """Apply `spoil` to keys and values of each page of a prefix that a slot begins with."""

    def wrap(right):
        def share(self, slot, pages):
            def copied(right):
                def copy_in(self, slot, start, arrays):
                    rows = [array.copy() for array in arrays]
                    spoil(rows)
                    right(self, slot, start, rows)

                return copy_in

            with instead(KVCache, "copy_in", copied)():
                right(self, slot, pages)

        return share

    return wrap


def sampling_stays(right):
    def release(self, slot):
        samplers = dict(self.executor.samplers)
        right(self, slot)
        self.executor.samplers.update(samplers)

    return release


def name_stays_resident(right):
    return lambda self, adapter: None


# Fused attention on a GPU


def not_copied(right):
    return lambda self, slot, other, length: None


def last_page_not_back(right):
    def restore(self, slot, saved):
        right(self, slot, saved[:-1] if len(saved) > 1 else saved)

    return restore


def last_page_is_the_one_before(right):
    def reserve(self, ends, lengths):
        sent = list(self._sent)
        moved = right(self, ends, lengths)
        if self._sent != sent:
            last = self._tables.pool.num_pages - 1
            self._host_table[self._host_table == last] = last - 1
            self._table_staging.send(self._stream, [(self.table, self._host_table)])
        return moved

    return reserve


# Requests


def teacher_forced(tokens: Iterable[int], new: int, **options) -> Request:
    """A request of a prompt and `new` tokens after it, which are given."""
    tokens = np.asarray(tokens)
    following = iter(tokens[len(tokens) - new :].tolist())
    return Request(tokens[: len(tokens) - new], new, lambda logits: next(following), **options)


def answers(engine: Engine, requests: Iterable[Request]) -> Iterator[np.ndarray]:
    """The logits of all requests, one after another."""
    rows: dict[tuple[int, int], list[np.ndarray]] = {}
    for token in engine.run(requests):
        rows.setdefault((token.request, token.choice), []).append(token.logits)
    for key in sorted(rows):
        yield np.stack(rows[key])


def copies(requests: Requests) -> Iterator[np.ndarray]:
    """Three choices of a prompt, drawn."""
    engine = Engine(requests.model, prefix_caching=False, samples_on_host=True)
    yield from answers(engine, [Request(requests.sequences[0][:20], 20, sampling=_DRAWN, n=3)])


def swapped(requests: Requests) -> Iterator[np.ndarray]:
    """Three requests grow beyond a page while a pool has room for two that do."""
    pool = requests.model.tables.pool
    pages = pool.allocate(pool.num_available - 4)
    engine = Engine(requests.model, prefix_caching=False, admission="optimistic", lookahead=1)
    yield from answers(engine, [teacher_forced(sequence[:80], 30) for sequence in requests.sequences[:3]])
    assert engine.scheduler.num_swaps
    pool.release(pages)


def reused(requests: Requests) -> Iterator[np.ndarray]:
    """A prompt twice: the second time its first chunk is there."""
    for _ in range(2):
        yield from answers(Engine(requests.model), [teacher_forced(requests.sequences[0][:320], 20)])


def last_page(requests: Requests) -> Iterator[np.ndarray]:
    """A request takes the last pages of the cache."""
    pool = requests.model.tables.pool
    pages = sorted(pool.allocate(pool.num_available))
    pool.release(pages[-3:])
    yield from answers(Engine(requests.model, prefix_caching=False), [teacher_forced(requests.sequences[0][:170], 50)])
    pool.release(pages[:-3])


def cancelled(requests: Requests) -> Iterator[np.ndarray]:
    """Requests that draw are cancelled; others, greedy, take their slots."""
    engine = Engine(requests.model, prefix_caching=False)
    for sequence in requests.sequences[:3]:
        engine.add(Request(sequence[:100], 20, sampling=Sampling(4.0, seed=1)))
    for _ in range(4):
        engine.step()
    for number in range(3):
        engine.abort(number)
    following = [Request(sequence[:9], 9) for sequence in requests.sequences[3:6]]
    tokens = [token.token for token in engine.run(following)]
    yield np.eye(requests.model.vocab_size, dtype=np.float32)[tokens]


def renamed(requests: Requests) -> Iterator[np.ndarray]:
    """An adapter is removed, and another comes under its name."""
    adapters = requests.model.adapters
    first, second = (adapters.loaded[name] for name in sorted(adapters.loaded)[:2])
    for adapter in (first, second):
        adapters.add(replace(adapter, name="renamed"))
        yield from answers(
            Engine(requests.model, prefix_caching=False),
            [teacher_forced(requests.sequences[0][:20], 9, adapter="renamed")],
        )
        adapters.remove("renamed")


on_host, on_gpu = (partial(Fault, where=RUNTIME, backends=names) for names in (HOST, ("tensorrt",)))
# fmt: off
FAULTS = (
    on_host("copy-key", "copies for further choices lack the last key",
            change=only_in("fork", of_rows(last_key_lost)), shown_by=copies),
    on_host("copy-layer", "copies for further choices lack the last layer",
            change=only_in("fork", of_rows(last_layer_lost)), shown_by=copies),
    on_host("swap-values", "values of a request that comes back are 0.97 times what they were",
            change=only_in("swap_in", of_rows(values_smaller)), shown_by=swapped),
    on_host("swap-late", "keys and values of a request that comes back are one row too far",
            change=only_in("swap_in", of_rows(one_late)), shown_by=swapped),
    on_host("prefix-values", "values of a prefix are 0.97 times what they were",
            change=instead(HostExecutor, "share", prefix_of(values_smaller)), shown_by=reused, model="window"),
    on_host("prefix-late", "keys and values of each page of a prefix are one row too far",
            change=instead(HostExecutor, "share", prefix_of(one_late)), shown_by=reused, model="window"),
    on_host("slot-sampling", "a slot goes on to draw as the request did that was cancelled there",
            change=instead(Model, "release", sampling_stays), shown_by=cancelled),
    on_host("adapter-name", "an adapter that is removed stays resident under its name",
            change=instead(Residency, "drop", name_stays_resident), shown_by=renamed, model="adapters", gate="adapted"),
    on_gpu("pages-copy", "copies for further choices lack the page that is not full",
           change=fused("fork", not_copied), shown_by=copies),
    on_gpu("pages-swap", "the last page of a request does not come back",
           change=fused("restore", last_page_not_back), shown_by=swapped),
    on_gpu("pages-last", "the last page of the cache is the one before",
           change=fused("reserve", last_page_is_the_one_before), shown_by=last_page),
)
# fmt: on
