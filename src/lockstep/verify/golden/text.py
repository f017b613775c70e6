"""The text that tokens add to a prompt. One rule for the reference and for the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def new_text(decode: Callable[[list[int]], str], prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that `tokens` add to the prompt's. decode: ids to text, without special tokens.

    Decoded after the prompt, since tokenizers drop a space at the start of a text. Where the new tokens change the
    prompt's text (they complete a character that it begins), they are decoded alone.
    """
    before = decode(list(prompt_ids))
    text = decode([*prompt_ids, *tokens])
    if text.startswith(before):
        return text[len(before) :]
    return decode(list(tokens))
