"""A checkpoint with tokenizer.model or tekken.json and no tokenizer.json: the command of the error makes one whose ids
are those of the model's own tokenizer, and all that reads a tokenizer takes it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from checkpoints import error_of, write
from real_tokenizers import SENTENCEPIECE, TEKKEN, model_file, sentencepiece, tekken
from tokenizers import Tokenizer

from lockstep.checkpoint import resolve, resolve_architecture
from lockstep.checkpoint.auto_tokenizer import SAMPLE_TEXTS
from lockstep.export.slow_tokenizer import main
from lockstep.verify.golden.reference import load_tokenizer

TEXTS = (*SAMPLE_TEXTS, Path(__file__).read_text(encoding="utf-8"), " \n \n", "naïve ﬁ Ω≈ç√", "a</s>b")


def small_tekken(path: Path) -> None:
    """A tekken.json with the first of its tokens, which is made in less than a second."""
    value = json.loads(path.read_text())
    value["vocab"] = value["vocab"][:3000]
    value["special_tokens"] = [{"rank": at, "token_str": name} for at, name in enumerate(("<unk>", "<s>", "</s>"))]
    value["config"]["default_vocab_size"] = value["config"]["default_num_special_tokens"] + 2500
    path.write_text(json.dumps(value))


def run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["slow_tokenizer", str(folder)])
    main()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name", "make"), [(SENTENCEPIECE, "tokenizer.model", sentencepiece), (TEKKEN, "tekken.json", tekken)]
)
def test_the_ids_of_a_made_tokenizer_are_the_models(tmp_path, monkeypatch, capfd, kind, name, make):
    """make: gives the model's tokenizer, made from the same file by the tests' own code."""
    folder = write(tmp_path / "checkpoint")
    (folder / "tokenizer.json").unlink()
    shutil.copyfile(model_file(kind), folder / name)
    if name == "tekken.json":
        small_tekken(folder / name)
    line = error_of(resolve, str(folder), folder, tmp_path / "checkpoint.json")
    assert line.endswith(f"make it from the tokenizer's other files: python -m lockstep.export.slow_tokenizer {folder}")
    run(monkeypatch, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = make(folder / name)
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert tokenizer.encode(text).ids == ids and tokenizer.decode(ids) == expected.decode(ids), text
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    resolve_architecture(str(folder), folder, tmp_path / "architecture.json")
    (folder / "tokenizer_config.json").unlink()  # a tokenizer.json alone goes through too
    resolve_architecture(str(folder), folder, tmp_path / "architecture.json")
    assert "splits" not in capfd.readouterr().err
    assert load_tokenizer(folder)("Hello world").input_ids == expected.encode("Hello world").ids


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tokenizer.model: expected a SentencePiece BPE model with tokens"),
        ("tokenizer.model", b"\x0a\x07\x0a\x01a", "tokenizer.model: expected a SentencePiece model, found another"),
        ("tokenizer.model", b"", "expected a SentencePiece BPE model with tokens for bytes"),
        ("tekken.json", b'{"config": {}, "vocab": []}', "tekken.json: expected config, and vocab with rank"),
        ("vocab.json", b"[]", "expected tokenizer.model, tekken.json or files that transformers makes a tokenizer of"),
    ],
)  # fmt: skip
def test_what_no_tokenizer_can_be_made_of_is_said_in_a_line(tmp_path, monkeypatch, capfd, name, data, line):
    folder = write(tmp_path / "checkpoint")
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(data)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, folder)
    output = capfd.readouterr().err
    assert ended.value.code == 2 and line in output and output.count("\n") == 1
    assert not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists()
