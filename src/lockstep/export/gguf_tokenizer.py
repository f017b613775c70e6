"""The tokenizer of a model in a GGUF file.

In: the file's metadata. Out: a tokenizer with llama.cpp's ids, and the content of tokenizer_config.json. A GGUF file
names its pre-tokenizer; how that splits a text is in llama.cpp's code. The supported ones are tested against
llama.cpp's ids (tests/data/gguf.json); others are rejected with their name.
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
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# {tokenizer.ggml.pre: regular expressions that split a text, applied one after the other}
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (rf"{_WORDS}|\p{{N}}{{1,3}}{_OTHERS}",),
    "qwen2": (rf"{_WORDS}|\p{{N}}{_OTHERS}",),
}
# llama.cpp's other names of the same.
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
# With these a piece that is a token is not merged further, and a prompt starts with BOS unless the file says otherwise.
_IGNORE_MERGES = ("llama-bpe",)
# llama.cpp's types of tokens
_CONTROL = 3
_USER_DEFINED = 4
_SPACE = "\u2581"


def tokenizer_of(file: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and tokenizer_config.json. Raises InputError where llama.cpp's ids are not sure."""
    metadata = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    model = metadata.get("model")
    tokens = metadata.get("tokens")
    if not model or not tokens:
        raise InputError(f"{file.path}: expected a tokenizer in the file; found no tokenizer.ggml.model and tokens")
    if len(set(tokens)) < len(tokens):
        raise InputError(f"{file.path}: expected tokens that differ; found {len(tokens) - len(set(tokens))} twice")
    for flag in ("add_eos_token", "add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(flag):
            raise InputError(f"{file.path}: expected a decoder's tokenizer; found tokenizer.ggml.{flag}")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(file, metadata)
    elif model == "llama":
        tokenizer = sentencepiece_bpe(tokens, metadata["scores"], metadata.get("add_space_prefix", True))
        adds_bos = True
    else:
        raise InputError(f"{file.path}: expected a tokenizer.ggml.model of gpt2 or llama; found {model!r}")
    # Not normalized: these tokens match the text literally.
    typed_tokens = [(token, type) for token, type in zip(tokens, metadata.get("token_type") or ()) if token]
    control = [AddedToken(token, normalized=False) for token, type in typed_tokens if type == _CONTROL]
    user_defined = [AddedToken(token, normalized=False) for token, type in typed_tokens if type == _USER_DEFINED]
    tokenizer.add_special_tokens(control)  # a decoder leaves these out, and keeps those that follow
    tokenizer.add_tokens(user_defined)
    names = {name: _token_of_id(file, metadata, key) for name, key in _ID_KEYS.items()}
    return tokenizer, with_special_tokens(tokenizer, names, metadata.get("add_bos_token", adds_bos))


def with_special_tokens(tokenizer: Tokenizer, names: Mapping[str, str | None], adds_bos: bool) -> dict[str, Any]:
    """Let a prompt start with BOS if `adds_bos`; return the tokenizer_config.json with these special tokens."""
    bos = names["bos_token"]
    if adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    settings = {name: token for name, token in names.items() if token is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}


_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def chat_template(file: GgufFile) -> str | None:
    return file.metadata.get("tokenizer.chat_template")


def _token_of_id(file: GgufFile, metadata: Mapping[str, Any], key: str) -> str | None:
    number = metadata.get(key)
    if number is None:
        return None
    if not 0 <= number < len(metadata["tokens"]):
        raise InputError(f"{file.path}: expected tokenizer.ggml.{key} below {len(metadata['tokens'])}; found {number}")
    return metadata["tokens"][number]


def _byte_level(file: GgufFile, metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a BPE over bytes, and whether a prompt opens with BOS."""
    name = metadata.get("pre", "none")
    pre = _ALIASES.get(name, name)
    if pre not in SPLITS:
        supported = ", ".join(sorted([*SPLITS, *_ALIASES]))
        raise InputError(f"{file.path}: expected a tokenizer.ggml.pre of {supported}; found {name!r}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("merges") or ()]
    vocabulary = {token: index for index, token in enumerate(metadata["tokens"])}
    tokenizer = Tokenizer(_bpe(file, vocabulary, merges, ignore_merges=pre in _IGNORE_MERGES))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in _IGNORE_MERGES


def _bpe(file: GgufFile, vocabulary: dict[str, int], merges: list, **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # tokenizers raises Exception itself
        raise InputError(f"{file.path}: expected merges of tokens of the vocabulary; found {error}") from None


def sentencepiece_bpe(tokens: Sequence[str], scores: Sequence[float], add_space_prefix: bool) -> Tokenizer:
    """Return a BPE over characters whose merges are ranked by the scores of their results."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores)))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    normalizing: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        normalizing.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizing)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer
