"""The text that tokens add to a prompt. One rule for the reference and for what is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def new_text(decode: Callable[[list[int]], str], prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
    """Return what `tokens` add to the prompt's text.

    decode: gives the text of ids, without special tokens.

    Decoded after the prompt, since tokenizers drop a space at the start of a text. Where the new tokens change the
    prompt's own text (a character begun there ends here), they are decoded alone.
    """
    before = decode(list(prompt_ids))
    text = decode([*prompt_ids, *tokens])
    return text[len(before) :] if text.startswith(before) else decode(list(tokens))
