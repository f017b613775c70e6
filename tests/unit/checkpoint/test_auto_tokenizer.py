"""Texts are split as transformers' AutoTokenizer splits them, whatever of the tokenizer other files hold, and an answer
ends at the end tokens of all files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import real_tokenizers
from checkpoints import error_of
from demo_model import DEMO
from real_tokenizers import NAMES, SENTENCEPIECE, TEKKEN
from transformers import AutoTokenizer

from answers import compute
from lockstep import Assembly, Tokenizer, export_graphs, resolve_architecture
from lockstep.checkpoint import tokenizer_file
from lockstep.checkpoint.auto_tokenizer import TokenizerError, load_auto
from lockstep.export.quiet import quiet
from shared import Shared

TEXTS = ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", " Hello", "a<|im_end|>b", "<tool_call> {}")
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
TOKEN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
ADDED = {
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            **FAST,
            "added_tokens_decoder": {
                "768": {**TOKEN, "content": "<|im_start|>"},
                "769": {**TOKEN, "content": "<|im_end|>"},
                "770": {**TOKEN, "content": "<tool_call>", "special": False},
            },
        }
    },
    "additional_special_tokens": {
        "tokenizer_config.json": {**FAST, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    },
    "extra_special_tokens": {"tokenizer_config.json": {**FAST, "extra_special_tokens": {"end": "<|im_end|>"}}},
    "added_tokens.json": {"tokenizer_config.json": FAST, "added_tokens.json": {"<|im_start|>": 768, "<|im_end|>": 769}},
    "special_tokens_map.json": {"tokenizer_config.json": FAST, "special_tokens_map.json": {"eos_token": "<|im_end|>"}},
    "add_prefix_space": {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
}


def checkpoint(folder: Path, files: dict[str, dict], tokenizer: Path = DEMO / "tokenizer.json") -> Path:
    """The demo's checkpoint with other files of its tokenizer."""
    shutil.copytree(DEMO, folder)
    (folder / "tokenizer_config.json").unlink()
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def check_same(folder: Path, data: bytes | None, tmp_path: Path) -> None:
    """Hold the tokenizer that is served to AutoTokenizer."""
    served = tmp_path / "served.json"
    served.write_bytes(data or (folder / "tokenizer.json").read_bytes())
    with quiet():
        auto = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(served)
    for text in (*TEXTS, "".join(auto.get_added_vocab()), *auto.all_special_tokens):
        ids = auto(text)["input_ids"]
        assert tokenizer.encode(text).tolist() == ids, text
        assert tokenizer.decode(ids) == auto.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("case", ADDED)
def test_tokens_of_other_files_are_tokens(tmp_path: Path, case: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint", ADDED[case])
    with quiet():
        actual = load_auto(folder)
        assert load_auto(folder) == actual  # the same bytes
    assert actual.data is not None and actual.note.startswith("tokenizer.json ")
    check_same(folder, actual.data, tmp_path)


def test_a_tokenizer_json_that_says_all_is_taken_as_it_is(tmp_path: Path) -> None:
    with quiet():
        assert load_auto(DEMO).data is None and load_auto(DEMO).note == ""


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.long)])
def test_real_tokenizers_are_split_as_their_class_does(tmp_path: Path, shared: Shared, name: str) -> None:
    """Llama's class takes a space before a text for the one that it puts there; tokenizer.json keeps both."""
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    path = real_tokenizers.tokenizer_json(shared, name)
    folder = checkpoint(tmp_path / "checkpoint", {"tokenizer_config.json": config}, path)
    with quiet():
        actual = load_auto(folder)
    assert {SENTENCEPIECE: "of ' Hello'", TEKKEN: "lacks tokens of"}[name] in actual.note
    check_same(folder, actual.data, tmp_path)


def test_a_class_that_fills_gaps_is_taken_for_other_texts(tmp_path: Path, shared: Shared) -> None:
    """CodeLlama's cuts a text at <FILL_ME>, which no tokenizer.json can say."""
    files = {"tokenizer_config.json": {"tokenizer_class": "CodeLlamaTokenizer"}}
    folder = checkpoint(tmp_path / "checkpoint", files, real_tokenizers.tokenizer_json(shared, SENTENCEPIECE))
    with quiet():
        actual = load_auto(folder)
        auto = AutoTokenizer.from_pretrained(folder)
    assert actual.data is not None and "but not at <FILL_ME>" in actual.note
    (tmp_path / "served.json").write_bytes(actual.data)
    for text in ("def f(x):\n    return x", " a", "▁<PRE> a ▁<SUF>b ▁<MID>"):
        assert Tokenizer(tmp_path / "served.json").encode(text).tolist() == auto(text)["input_ids"]


def test_a_class_that_loses_text_is_refused(tmp_path: Path, shared: Shared) -> None:
    """Without a tokenizer_config.json the model type says the class, which may be another's."""
    folder = checkpoint(tmp_path / "checkpoint", {}, real_tokenizers.tokenizer_json(shared, SENTENCEPIECE))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(TokenizerError, match="loads as GPT2Tokenizer, which loses .* name the right tokenizer_class"):
        with quiet():
            load_auto(folder)


def test_a_tokenizer_that_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {**FAST, "added_tokens_decoder": {"x": 1}}}
    folder = checkpoint(tmp_path / "checkpoint", files)
    line = error_of(resolve_architecture, str(folder), folder, tmp_path / "architecture.json")
    assert line.startswith(f"{folder}: expected a tokenizer that transformers splits texts with, found none")
    assert not (tmp_path / "architecture.json").exists()


@pytest.mark.exports
def test_a_class_whose_unknown_token_the_file_lacks_is_one_line(tmp_path: Path) -> None:
    """Its native code fails on the first text, not when it is loaded."""
    folder = checkpoint(tmp_path / "model", {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]})
    )
    with (
        pytest.raises(TokenizerError, match=r"loads as \w+, which fails on .*; name the right tokenizer_class"),
        quiet(),
    ):
        load_auto(folder)


@pytest.mark.long
@pytest.mark.exports
def test_chat_tokens_and_all_ends_reach_graphs_and_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat model ends a turn at another token than its base ends a text, and each file may name one of them."""
    added = ADDED["added_tokens_decoder"]["tokenizer_config.json"]
    files = {"tokenizer_config.json": {**added, "eos_token": "<"}, "generation_config.json": {"eos_token_id": [0, 7]}}
    folder = checkpoint(tmp_path / "checkpoint", files)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    (end,) = Tokenizer(DEMO / "tokenizer.json").encode("<")
    architecture = resolve_architecture(str(folder), folder, tmp_path / "architecture.json")
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"lockstep: note: {folder}: ") for line in lines] == [True, True]
    assert "<tool_call>, <|im_end|>, <|im_start|>) and makes" in lines[0]
    assert lines[1].endswith(
        f"0 (generation_config.json); 7 (generation_config.json); 9 (config.json); {end} (the tokenizer)"
    )
    assembly = Assembly.load(export_graphs(architecture, "fp32", tmp_path / "graphs" / "assembly.json"))
    tokenizer = Tokenizer.open(tmp_path / "graphs" / "assembly.json")
    assert np.intersect1d(tokenizer.encode(TEXTS[0]), [768, 769]).tolist() == [768, 769]
    assert assembly.eos_token_ids == (0, 7, 9, end)
    assert compute(folder, json.loads((folder / "config.json").read_text()), 1, ["Light"], 1).eos_token_ids == (
        *(0, 7, 9, end),
    )


def test_what_a_library_prints_before_the_answer_is_no_part_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('print(\'Ignored unknown kwarg option a\')\nprint(\'{"eos_token_id": 2, "note": ""}\')\n')
    assert tokenizer_file.run_script(str(script), tmp_path, tmp_path) == '{"eos_token_id": 2, "note": ""}'


def test_transformers_is_found_where_packages_come_by_pythonpath_alone() -> None:
    """As behind `pip install --target`, also where Python leaves out a script's folder."""
    code = f"from lockstep.checkpoint.tokenizer_file import *; load_as_transformers(Path({str(DEMO)!r}))"
    packages = sorted(filter(None, sys.path), key=lambda path: not path.endswith("site-packages"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages), "PYTHONSAFEPATH": "1"}
    python = sys._base_executable  # type: ignore[attr-defined]
    subprocess.run([python, "-c", code], env=environment, check=True)
