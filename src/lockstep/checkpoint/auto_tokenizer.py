"""A checkpoint's tokenizer as transformers loads it.

In: the checkpoint's folder. Out: a tokenizer.json that splits texts as `AutoTokenizer` does, and in what it differs
from the checkpoint's own: tokens that other files name, prefixes, what the tokenizer's class knows.

`python auto_tokenizer.py FOLDER` answers in JSON, in a process without torch that can be ended. Needs transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

_MEMORY_BYTES = 8 << 30  # of address space: the largest tokenizer takes 1 GB, and is loaded three times
_TEXTS = (
    *(
        "Hello world",
        " Hello",
        "  two  spaces ",
        "\n",
        "a\n\n b\t",
        "It's 1234567 a.b_c, isn't it?",
        "ß é 日本語 \U0001f600",
    ),
    *("</s", "<|x|>", "x" * 40),
)
_SHOWN = 5  # tokens or ids in a line


class TokenizerError(Exception):
    """The error of a tokenizer that cannot be taken: one line, what was found and what to do."""


@dataclass(frozen=True)
class AutoTokenized:
    """A tokenizer.json whose ids are those of `AutoTokenizer`.

    data: None where the checkpoint's own file is one. eos_token_id: the tokenizer's. note: one line of what differs, or
    "".
    """

    data: bytes | None
    eos_token_id: int | None
    note: str = ""


def load_auto(folder: Path) -> AutoTokenized:
    """Load the tokenizer of a checkpoint, and hold its tokenizer.json to it.

    Raises TokenizerError for a tokenizer that transformers cannot load, that loses texts which tokenizer.json keeps, or
    that no tokenizer.json can hold.
    """
    from transformers import AutoConfig, AutoTokenizer

    plain = _bare(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    try:
        auto: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged settings of a tokenizer fail anywhere in its class
        said = " ".join(str(error).split())[:300]
        try:
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception:  # then it is the model's settings, which tell which tokenizer is meant
            raise TokenizerError(f"found a config.json that it refuses: {said}; correct config.json") from None
        raise TokenizerError(f"found none that it loads: {said}; correct tokenizer_config.json") from None
    eos = auto.eos_token_id if isinstance(auto.eos_token_id, int) else None
    special = set(map(str, auto.all_special_tokens)) | set(auto.get_added_vocab())
    # Where CodeLlama's class cuts a text in two, by code that also changes how it splits the next one.
    gap = getattr(auto, "fill_token", None)
    special.discard(gap)
    own = {token.content for token in plain.get_added_tokens_decoder().values()}
    texts = list(_texts(sorted(special | own)))
    different = _difference(auto, plain, texts)
    if different is None:
        return AutoTokenized(None, eos)
    name = type(auto).__name__
    for text in _TEXTS:
        kept = plain.decode(plain.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if _letters(kept) == _letters(text) != _letters(_decoded(auto, _ids(auto, text, False), skips=False)):
            raise TokenizerError(
                f"found one that transformers loads as {name}, which loses {text!r}; name the right tokenizer_class in "
                "tokenizer_config.json (PreTrainedTokenizerFast takes tokenizer.json as it is)"
            )
    if getattr(auto, "backend_tokenizer", None) is None:
        raise TokenizerError(f"found one that {different} ({name}); save it as one of the tokenizers package")
    made = _bare(tokenizers.Tokenizer.from_str(auto.backend_tokenizer.to_str()))
    if still := _difference(auto, made, texts):
        raise TokenizerError(f"found none that splits as {name}: it {still}; use the one that came with the model")
    lacking = sorted(special - own)
    shown = ", ".join(lacking[:_SHOWN]) + (f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else "")
    lacks = f"lacks tokens of {name} ({shown}) and " if lacking else ""
    note = f"tokenizer.json {lacks}{different}; texts are split as by transformers"
    note += f", but not at {gap}: write the tokens of an infilling prompt themselves" if gap else ""
    return AutoTokenized(made.to_str(pretty=True).encode(), eos, note)


def _bare(tokenizer: Any) -> Any:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _texts(tokens: Sequence[str]) -> Iterator[str]:
    """Yield texts whose ids tell tokenizers apart: each token alone, within a word, between spaces and lines."""
    yield from _TEXTS
    for token in tokens:
        yield from (token, f"a{token}b", f"a {token} b {token}{token}\n{token}")


def _ids(auto: Any, text: str, special: bool) -> list[int]:
    try:
        return auto(text, add_special_tokens=special)["input_ids"]
    except Exception as error:  # of its native code, such as for an unknown token that its class names
        said = " ".join(str(error).split())[:300]
        raise TokenizerError(
            f"found one that transformers loads as {type(auto).__name__}, which fails on {text!r}: {said}; name the "
            "right tokenizer_class in tokenizer_config.json (PreTrainedTokenizerFast takes tokenizer.json as it is)"
        ) from None


def _decoded(auto: Any, ids: Sequence[int], skips: bool = True) -> str:
    return auto.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)


def _letters(text: str) -> str:
    """Return a text without white space: a class may well put some before a text, or take it away."""
    return "".join(text.split())


def _difference(auto: Any, tokenizer: Any, texts: Sequence[str]) -> str | None:
    """Return in words of which text the two make other ids, or of these another text; None where there is none."""
    for text in texts:
        for special in (True, False):
            wanted = _ids(auto, text, special)
            found = tokenizer.encode(text, add_special_tokens=special).ids
            if wanted != found:
                at = next((at for at, pair in enumerate(zip(wanted, found)) if pair[0] != pair[1]), 0)
                shown = " ".join(map(str, found[at : at + _SHOWN])), " ".join(map(str, wanted[at : at + _SHOWN]))
                return f"makes {shown[0] or 'nothing'} of {text[:40]!r}, transformers {shown[1] or 'nothing'}"
    for text in texts:
        ids = _ids(auto, text, False)
        wanted_text = _decoded(auto, ids)
        found_text = tokenizer.decode(ids, skip_special_tokens=True)
        if wanted_text != found_text:
            return f"reads the ids of {text[:40]!r} as {found_text[:40]!r}, transformers as {wanted_text[:40]!r}"
    return None


def main(folder: str) -> int:
    """Answer for `folder` on stdout; return the exit code."""
    import resource

    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this package's folder, whose modules have names of their own
    sys.modules["torch"] = None  # type: ignore[assignment]  # seconds to load, and no tokenizer needs it
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        found = load_auto(Path(folder))
    except TokenizerError as error:
        print(error)
        return 1
    print(json.dumps({"eos_token_id": found.eos_token_id, "note": found.note}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
