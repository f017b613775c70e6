"""Ask llama.cpp for token ids of strings and logits of small models, which GGUF sources must give. Writes gguf.json.

    python -m venv .llama && .llama/bin/pip install -r envs/llama-cpp.txt
    PYTHONPATH=tests .llama/bin/python tests/data/make_gguf.py [SMOLLM2.gguf]

A vocabulary of bytes and a few hundred merges, learnt from the strings without any pre-tokenizer: pieces that a
pre-tokenizer cuts are seen in the ids. With SmolLM2's file its ids of the same strings are written too.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import llama_cpp

import gguf_models

MERGES = 300
STRINGS = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\n\n  x", "a\n\n\nb", "  two  spaces   three",
    "end ", "end  ", "Hello world", " Hello world", "Hello, World!",
    "HELLO'S it's IT'S don't DON'T we'll WE'LL I'm I'M they've you'd're", "1", "12", "123", "1234", "12345",
    "1234567890", "3.14159", "1,000,000", "x1y22z333", "-17°C", "½ ² Ⅳ ٣٤٥ 一二三", "San Francisco is a city",
    "Zürich, Äpfel, naïve café", "e\u0301 combining", "Łódź żółć", "Ελληνικά και πάλι", "Привет, как дела?",
    "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "こんにちは世界。今日は", "你好,世界!",
    "안녕하세요 세계", "កាន់តែពិសេស", "🦙.cpp 🚀 (normal) 😶\u200d🌫\ufe0f",
    "\u00a0nbsp\u3000ideographic\u2003em", "zero\u200bwidth", "tab\tand\r\nCRLF\rCR",
    "def f(x: int) -> str:\n    return f\"{x!r}\"  # comment\n", "if (a[i] != b->c) { i++; }\n\n\treturn;",
    "https://example.org/a?b=c&d=%20#e", "snake_case camelCase PascalCase kebab-case", "a.b..c...d", "!!!???",
    "$100 €50 50%", "<|endoftext|>", "<s>text</s>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<think>\nwell\n</think> so", "a<|im_end|> b", "   <think>   ", "'", "''s", "\u2581", "a\u2581b",
    "\u0001\u007f", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "ﬁ ligature", "ß ẞ İ ı",
]  # fmt: skip
ALPHABET = [
    "a", "B", "ß", "é", "e\u0301", "1", "23", "½", " ", " ", "  ", "\n", "\r\n", "\t", ".", ",", "'s", "'LL",
    "'", "-", "_", "(", "世", "Я", "ع", "\u00a0", "🦙", "$", "<", "<think>", "<|im_end|>", "the", "The", "ing",
    "{", "\\", "%",
]  # fmt: skip


def main(arguments: list[str]) -> None:
    seeded = random.Random(0)
    strings = STRINGS + ["".join(seeded.choices(ALPHABET, k=seeded.randint(2, 14))) for _ in range(80)]
    vocabularies = {"gpt2": byte_level(strings), "llama": sentencepiece(strings)}
    result: dict[str, Any] = {
        "made by": "tests/data/make_gguf.py",
        "llama-cpp-python": importlib.metadata.version("llama-cpp-python"),
        "strings": strings, "vocabularies": vocabularies, "ids": {}, "logits": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for kind in gguf_models.KINDS:
            path = gguf_models.write_model(Path(folder, "v.gguf"), "llama", vocabularies, kind)
            result["ids"][kind] = ids_of(path, strings)
        prompt = list(range(40, 76))  # longer than the windows
        for name in gguf_models.MODELS:
            path = gguf_models.write_model(Path(folder, "m.gguf"), name, vocabularies)
            result["logits"][name] = logits_of(path, prompt)
        result["prompt"] = prompt
    if arguments:
        result["ids"]["SmolLM2"] = ids_of(Path(arguments[0]), strings)
    gguf_models.TABLE.write_text(json.dumps(result, ensure_ascii=False, indent=0).replace(",\n", ", ") + "\n")


def ids_of(path: Path, strings: list[str]) -> list[list[int]]:
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    # As a prompt is tokenized: with what opens it, and with the names of special tokens read.
    return [model.tokenize(text.encode(), add_bos=True, special=True) if text else [] for text in strings]


def logits_of(path: Path, prompt: list[int]) -> list[float]:
    """Return the logits after the last token, of a cache in fp32."""
    model = llama_cpp.Llama(
        str(path), n_ctx=64, n_batch=64, logits_all=True, type_k=0, type_v=0, n_threads=1, n_threads_batch=1,
        verbose=False,
    )  # fmt: skip
    model.eval(prompt)
    return [round(float(logit), 5) for logit in model.scores[len(prompt) - 1]]


def learn(sequences: list[list[str]], count: int) -> list[tuple[str, str]]:
    """Return merges by the commonest pairs, ties by their text."""
    merges = []
    for _ in range(count):
        pairs = Counter(itertools.chain(*map(itertools.pairwise, sequences)))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        sequences = [merged(sequence, best) for sequence in sequences]
    return merges


def merged(sequence: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for symbol in sequence:
        if result and (result[-1], symbol) == pair:
            result[-1] += symbol
        else:
            result.append(symbol)
    return result


def byte_level(strings: list[str]) -> dict[str, Any]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(unprintable)
    }
    sequences = []
    for text in strings:
        sequences.append([spelled[byte] for byte in text.encode()])
    merges = learn(sequences, MERGES)
    special = {
        "<|endoftext|>": gguf_models.CONTROL,
        "<|im_start|>": gguf_models.CONTROL,
        "<|im_end|>": gguf_models.CONTROL,
    }
    special |= {"<think>": gguf_models.USER_DEFINED, "</think>": gguf_models.USER_DEFINED}
    pieces = [piece for piece in dict.fromkeys(map("".join, merges)) if piece not in special]
    tokens = [spelled[byte] for byte in range(256)] + pieces
    tokens.append("ĠFrancisco")  # which no merges give
    assert len(set(tokens)) == len(tokens)
    return {
        "tokens": tokens + list(special), "types": [gguf_models.NORMAL] * len(tokens) + list(special.values()),
        "merges": list(map(" ".join, merges)), "bos": len(tokens) + 1, "eos": len(tokens) + 2,
    }  # fmt: skip


def sentencepiece(strings: list[str]) -> dict[str, Any]:
    texts = [text.replace(" ", "\u2581") for text in strings]
    common = sorted(
        {symbol for symbol, count in Counter("".join(texts)).items() if count > 1 and symbol not in "\n\r\t"}
    )
    sequences = []
    for text in texts:
        sequences.append([symbol for symbol in "\u2581" + text if symbol in common])
    merges = learn(sequences, MERGES)
    vocabulary = ("<think>", "<|im_end|>", "\n\n", "  ")
    pieces = [piece for piece in dict.fromkeys(map("".join, merges)) if piece not in vocabulary]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf_models.UNKNOWN, gguf_models.CONTROL, gguf_models.CONTROL, *[gguf_models.BYTE] * 256]
    scores = (
        [0.0] * len(tokens)
        + [-float(rank) for rank in range(len(pieces))]
        + [-1000.0 - place for place in range(len(common))]
    )
    tokens += pieces + common
    types += [gguf_models.NORMAL] * (len(pieces) + len(common))
    for text in vocabulary:
        tokens.append(text)
        types.append(gguf_models.USER_DEFINED)
        scores.append(0.0)
    return {"tokens": tokens, "types": types, "scores": scores, "bos": 1, "eos": 2}


if __name__ == "__main__":
    main(sys.argv[1:])
