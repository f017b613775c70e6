"""The tokenizer of a model in a GGUF file.

In: the file's metadata. Out: a tokenizer with llama.cpp's ids, and the settings that go into tokenizer_config.json. A
GGUF file names its pre-tokenizer; how that splits a text stands in llama.cpp's code. Those here are held to llama.cpp
by a table of strings and ids (tests/data/gguf.json); others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.tokenization_utils_base import generate_merges

from lockstep.config.gguf_file import GgufFile
from lockstep.errors import InputError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# By `tokenizer.ggml.pre`: the expressions that split a text, one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}",),
    "qwen2": (rf"{_WORDS}|\p{{N}}{_REST}",),
}
# Other names of these, all as llama.cpp has them.
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
# Of these a piece that is a token is taken as it is, and a prompt opens with BOS unless the file says otherwise.
_WHOLE_PIECES = ("llama-bpe",)
# llama.cpp's types of tokens
_CONTROL = 3
_USER_DEFINED = 4
_SPACE = "\u2581"


def tokenizer_of(file: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and tokenizer_config.json. Raises InputError where llama.cpp's ids are not sure."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    kind = own.get("model")
    tokens = own.get("tokens")
    if not kind or not tokens:
        raise InputError(f"{file.path}: expected a tokenizer in the file; found no tokenizer.ggml.model and tokens")
    if len(set(tokens)) < len(tokens):
        raise InputError(f"{file.path}: expected tokens that differ; found {len(tokens) - len(set(tokens))} twice")
    for flag in ("add_eos_token", "add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap"):
        if own.get(flag):
            raise InputError(f"{file.path}: expected a decoder's tokenizer; found tokenizer.ggml.{flag}")
    if kind == "gpt2":
        tokenizer, opens = _byte_level(file, own)
    elif kind == "llama":
        tokenizer = sentencepiece_bpe(tokens, own["scores"], own.get("add_space_prefix", True))
        opens = True
    else:
        raise InputError(f"{file.path}: expected a tokenizer.ggml.model of gpt2 or llama; found {kind!r}")
    # In the text, whatever stands around them.
    marked = [(token, kind) for token, kind in zip(tokens, own.get("token_type") or ()) if token]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text, kind in marked if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in marked if kind == _USER_DEFINED])
    names = {name: _named(file, own, key) for name, key in _NAMES.items()}
    return tokenizer, with_special_tokens(tokenizer, names, own.get("add_bos_token", opens))


def with_special_tokens(tokenizer: Tokenizer, names: Mapping[str, str | None], adds_bos: bool) -> dict[str, Any]:
    """Let a prompt open with BOS, if asked; return the tokenizer_config.json with these names of special tokens."""
    bos = names["bos_token"]
    if adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    settings = {name: token for name, token in names.items() if token is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}


_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def chat_template(file: GgufFile) -> str | None:
    return file.metadata.get("tokenizer.chat_template")


def _named(file: GgufFile, own: Mapping[str, Any], key: str) -> str | None:
    number = own.get(key)
    if number is None:
        return None
    if not 0 <= number < len(own["tokens"]):
        raise InputError(f"{file.path}: expected tokenizer.ggml.{key} below {len(own['tokens'])}; found {number}")
    return own["tokens"][number]


def _byte_level(file: GgufFile, own: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a BPE over bytes, and whether a prompt opens with BOS."""
    name = own.get("pre", "none")
    pre = _SAME.get(name, name)
    if pre not in _SPLITS:
        known = ", ".join(sorted([*_SPLITS, *_SAME]))
        raise InputError(f"{file.path}: expected a tokenizer.ggml.pre of {known}; found {name!r}")
    merges = [tuple(merge.split(" ")) for merge in own.get("merges") or ()]
    vocabulary = {token: index for index, token in enumerate(own["tokens"])}
    tokenizer = Tokenizer(_bpe(file, vocabulary, merges, ignore_merges=pre in _WHOLE_PIECES))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in _WHOLE_PIECES


def _bpe(file: GgufFile, vocabulary: dict[str, int], merges: list, **more: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **more)
    except Exception as error:  # tokenizers raises its own, of this very class
        raise InputError(f"{file.path}: expected merges of tokens of the vocabulary; found {error}") from None


def sentencepiece_bpe(tokens: Sequence[str], scores: Sequence[float], add_space_prefix: bool) -> Tokenizer:
    """Return a BPE over characters whose merges are ranked by the scores of what they give."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores)))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    stripped: list[Any] = []
    if add_space_prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        stripped = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return tokenizer
