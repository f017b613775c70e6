"""Long texts of requests: bounded by the model's limits before they are encoded, few at a time, in little memory."""

from __future__ import annotations

import asyncio
import threading

import pytest
from demo_model import DEMO

from lockstep.runtime.tokenizer import Tokenizer
from lockstep_serve import prompts
from lockstep_serve.bodies import BadRequest
from lockstep_serve.prompts import LONG, Turns, encode_texts
from lockstep_serve.stream import StreamError

MOST = 1000  # tokens of a prompt
BODY = 4 << 20  # characters: what a body may have


class Counted(Tokenizer):
    """The demo's tokenizer; `sizes`: of the texts that it encoded. Nothing is known of its longest token."""

    def __init__(self) -> None:
        super().__init__(DEMO / "tokenizer.json")
        self.sizes: list[int] = []

    def min_tokens(self, num_characters: int) -> int:
        return 0

    def encode(self, text: str, special: bool = True):  # type: ignore[no-untyped-def]
        self.sizes.append(len(text))
        return super().encode(text, special)


@pytest.mark.parametrize("word", ["~|", "Once upon a time ", "a"])
def test_a_text_that_is_far_too_long_is_never_encoded_whole(word: str) -> None:
    """Where no bound is known beforehand, it is counted in pieces, and these end when it is clear."""
    tokenizer = Counted()
    text = word * (BODY // len(word))
    with pytest.raises(BadRequest, match=f"^prompt: expected 1 to {MOST} tokens, found more than {2 * MOST}; shorten"):
        asyncio.run(encode_texts([text], tokenizer, "prompt", MOST))
    assert max(tokenizer.sizes) <= 4 * MOST + LONG and sum(tokenizer.sizes) < BODY / 16


def test_a_text_that_fits_is_encoded_whole_however_many_characters_it_has() -> None:
    """Its pieces may have some more tokens than it has: no text that fits is refused for that."""
    tokenizer = Counted()
    longest = "<eos>"  # one token of five characters: more than a prompt's usual four
    text = longest * 9_000
    (actual,) = asyncio.run(encode_texts([text], tokenizer, "prompt", 9_000))
    assert len(actual) == 9_000 and tokenizer.sizes[-1] == len(text) > 4 * 9_000
    text = longest * (9_000 + 3 * LONG)
    with pytest.raises(BadRequest, match="found more than 18000"):
        asyncio.run(encode_texts([text], tokenizer, "prompt", 9_000))


def test_few_are_encoded_at_a_time_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_WAITING", 5)
    threads = Turns(2, "test")
    lock = threading.Lock()
    go = threading.Event()
    running = 0
    max_running = 0

    def make() -> int:
        nonlocal running, max_running
        with lock:
            running += 1
            max_running = max(max_running, running)
        go.wait(60)
        with lock:
            running -= 1
        return max_running

    async def run() -> list[int]:
        tasks = [asyncio.create_task(threads.run(make, LONG + 1)) for _ in range(5)]
        await asyncio.sleep(0.1)  # the loop runs on meanwhile
        with pytest.raises(StreamError, match="5 long texts wait") as refused:
            await threads.run(make, LONG + 1)
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        go.set()
        await asyncio.gather(*tasks)
        return [await threads.run(make, LONG + 1)]

    assert asyncio.run(run()) == [2]
