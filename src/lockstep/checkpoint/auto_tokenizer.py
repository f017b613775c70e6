"""Load a checkpoint's tokenizer as transformers does.

In: the checkpoint's folder. Out: a tokenizer.json that splits texts as `AutoTokenizer` does, and how it differs from
the checkpoint's own: tokens from other files, prefixes, rules in the tokenizer's class.

`python auto_tokenizer.py FOLDER` prints JSON. It runs without torch, in a process that can be killed. Needs
transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

_MEMORY_BYTES = 8 << 30  # of address space: the largest tokenizer takes 1 GB, and is loaded three times
SAMPLE_TEXTS = (
    "Hello world",
    " Hello",
    "  two  spaces ",
    "\n",
    "a\n\n b\t",
    "It's 1234567 a.b_c, isn't it?",
    "ß é 日本語 \U0001f600",
    "</s",
    "<|x|>",
    "x" * 40,
)
_MAX_SHOWN = 5  # tokens or ids in a message


class TokenizerError(Exception):
    """Raised for a tokenizer that cannot be used: one line with the cause and a remedy."""


@dataclass(frozen=True)
class AutoTokenized:
    """A tokenizer.json whose ids are those of `AutoTokenizer`.

    data: None if the checkpoint's own file has these ids. eos_token_id: the tokenizer's. note: one line of differences,
    or "".
    """

    data: bytes | None
    eos_token_id: int | None
    note: str = ""


def load_auto(folder: Path) -> AutoTokenized:
    """Load the tokenizer of a checkpoint and compare its tokenizer.json with it.

    Raises TokenizerError for a tokenizer that transformers cannot load, that loses texts which tokenizer.json keeps, or
    that no tokenizer.json can represent.
    """
    from transformers import AutoConfig, AutoTokenizer

    plain = _without_limits(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    try:
        auto: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer's class may raise anything for damaged settings
        reason = " ".join(str(error).split())[:300]
        try:
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception:  # config.json names the tokenizer's class: blame the file that is damaged
            raise TokenizerError(f"found a config.json that it refuses: {reason}; correct config.json") from None
        raise TokenizerError(f"found none that it loads: {reason}; correct tokenizer_config.json") from None
    eos = None
    if isinstance(auto.eos_token_id, int):  # a list of several is no setting of a tokenizer
        eos = auto.eos_token_id
    special = set(map(str, auto.all_special_tokens)) | set(auto.get_added_vocab())
    # CodeLlama's class cuts a text in two at this token, by code that also changes how it splits the next text.
    fill_token = getattr(auto, "fill_token", None)
    special.discard(fill_token)
    plain_tokens = {token.content for token in plain.get_added_tokens_decoder().values()}
    texts = list(_test_texts(sorted(special | plain_tokens)))
    difference = _difference(auto, plain, texts)
    if difference is None:
        return AutoTokenized(None, eos)
    name = type(auto).__name__
    # A class that does not belong to the file loses text: that is a mistake in the checkpoint, not a rule to follow.
    for text in SAMPLE_TEXTS:
        decoded = plain.decode(plain.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        auto_decoded = _decode(auto, _encode(auto, text, False), skips=False)
        if _letters(decoded) == _letters(text) != _letters(auto_decoded):
            raise TokenizerError(
                f"found one that transformers loads as {name}, which loses {text!r}; name the right tokenizer_class in "
                "tokenizer_config.json (PreTrainedTokenizerFast takes tokenizer.json as it is)"
            )
    if getattr(auto, "backend_tokenizer", None) is None:
        raise TokenizerError(f"found one that {difference} ({name}); save it as one of the tokenizers package")
    converted = _without_limits(tokenizers.Tokenizer.from_str(auto.backend_tokenizer.to_str()))
    converted_difference = _difference(auto, converted, texts)
    if converted_difference:
        raise TokenizerError(
            f"found none that splits as {name}: it {converted_difference}; use the one that came with the model"
        )
    missing = _missing_tokens(special - plain_tokens, name)
    note = f"tokenizer.json {missing}{difference}; texts are split as by transformers"
    if fill_token:
        note += f", but not at {fill_token}: write the tokens of an infilling prompt themselves"
    return AutoTokenized(converted.to_str(pretty=True).encode(), eos, note)


def _missing_tokens(missing: Collection[str], name: str) -> str:
    """Return the part of a note that lists tokens of the class `name`; "" for none."""
    if not missing:
        return ""
    shown = ", ".join(sorted(missing)[:_MAX_SHOWN])
    if len(missing) > _MAX_SHOWN:
        shown += f" and {len(missing) - _MAX_SHOWN} more"
    return f"lacks tokens of {name} ({shown}) and "


def _without_limits(tokenizer: Any) -> Any:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _test_texts(tokens: Sequence[str]) -> Iterator[str]:
    """Yield texts whose ids distinguish tokenizers: each token alone, within a word, between spaces and lines."""
    yield from SAMPLE_TEXTS
    for token in tokens:
        yield from (token, f"a{token}b", f"a {token} b {token}{token}\n{token}")


def _encode(auto: Any, text: str, special: bool) -> list[int]:
    try:
        return auto(text, add_special_tokens=special)["input_ids"]
    except Exception as error:  # of its native code, such as for an unknown token that its class names
        reason = " ".join(str(error).split())[:300]
        raise TokenizerError(
            f"found one that transformers loads as {type(auto).__name__}, which fails on {text!r}: {reason}; name the "
            "right tokenizer_class in tokenizer_config.json (PreTrainedTokenizerFast takes tokenizer.json as it is)"
        ) from None


def _decode(auto: Any, ids: Sequence[int], skips: bool = True) -> str:
    return auto.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)


def _letters(text: str) -> str:
    """Return a text without white space, which a class may add or remove."""
    return "".join(text.split())


def _difference(auto: Any, tokenizer: Any, texts: Sequence[str]) -> str | None:
    """Return a sentence about the first text with other ids, or ids with another text; None if there is none."""
    for text in texts:
        for special in (True, False):
            auto_ids = _encode(auto, text, special)
            ids = tokenizer.encode(text, add_special_tokens=special).ids
            if auto_ids != ids:
                pairs = enumerate(zip(auto_ids, ids))
                start = next((index for index, (auto_id, id) in pairs if auto_id != id), 0)
                shown = " ".join(map(str, ids[start : start + _MAX_SHOWN])) or "nothing"
                auto_shown = " ".join(map(str, auto_ids[start : start + _MAX_SHOWN])) or "nothing"
                return f"makes {shown} of {text[:40]!r}, transformers {auto_shown}"
    for text in texts:
        ids = _encode(auto, text, False)
        auto_text = _decode(auto, ids)
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        if auto_text != decoded:
            return f"reads the ids of {text[:40]!r} as {decoded[:40]!r}, transformers as {auto_text[:40]!r}"
    return None


def main(folder: str) -> int:
    import resource

    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the script's folder, whose modules would shadow others
    sys.modules["torch"] = None  # type: ignore[assignment]  # seconds to load, and no tokenizer needs it
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        tokenized = load_auto(Path(folder))
    except TokenizerError as error:
        print(error)
        return 1
    print(json.dumps({"eos_token_id": tokenized.eos_token_id, "note": tokenized.note}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
