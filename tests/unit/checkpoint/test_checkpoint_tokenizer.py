"""A tokenizer.json that is JSON and no tokenizer, or one that never ends: one line from the stage that first needs
it."""

from __future__ import annotations

import json

import pytest
from checkpoints import error_of, write
from demo_model import DEMO

from lockstep.checkpoint import resolve_architecture
from lockstep.checkpoint.tokenizer_file import check_loads
from lockstep.export.random_model import byte_tokenizer

MODEL = {"type": "BPE", "vocab": {"a": 0}, "merges": []}


def split_by(expression: str) -> dict:
    return {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    }


@pytest.mark.parametrize(("change", "expected"), [
    ({"model": {}}, "no tokenizer: data did not match any variant"),
    ({"model": {"type": "BPE", "vocab": [], "merges": []}}, "no tokenizer: invalid type: sequence, expected a map"),
    ({"model": {**MODEL, "merges": ["a b"]}}, "no tokenizer: Token `b` out of vocabulary"),
    ({"model": {**MODEL, "vocab": {"a": -1}}}, "no tokenizer: invalid value: integer `-1`, expected u32"),
    ({"version": "9.0"}, "no tokenizer: Unknown tokenizer version '9.0'"),
    ({"added_tokens": [{"id": 1}]}, "no tokenizer: missing field `content`"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "X"}]}}, "no tokenizer: data did not match any variant"),
    (split_by("("), "no tokenizer: Oniguruma error: end pattern with unmatched parenthesis"),
    (split_by("(a+)+$"), "a tokenizer that fails on 'aaaaaaaa...': Onig: Regex search error: "
"retry-limit-in-match over"),
    (split_by(r"(\s|\s\s)+x"), "a tokenizer that fails on '        ...': Onig: "),
    ({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "Q", "type_id": 0}}], "pair": [], "special_tokens": {}}}, "a tokenizer that fails on "),  # noqa: E501
])  # fmt: skip
def test_what_is_json_and_no_tokenizer(tmp_path, change, expected):
    folder = write(tmp_path / "checkpoint")
    (folder / "tokenizer.json").write_text(json.dumps({"model": MODEL, **change}))
    line = error_of(resolve_architecture, str(folder), folder, tmp_path / "architecture.json")
    assert line.startswith(f"{folder}/tokenizer.json: expected a tokenizer, found {expected}")
    assert line.endswith("; use the tokenizer.json that came with the model")
    assert not (tmp_path / "architecture.json").exists()


@pytest.mark.long
def test_a_tokenizer_that_does_not_end_is_ended(tmp_path, monkeypatch):
    """Each start of a match takes just less than the library's own limit of steps: minutes for a line of text."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": MODEL, **split_by("(?:a|aa){21}x")}))
    monkeypatch.setattr("lockstep.checkpoint.tokenizer_file.TIME_LIMIT", 2)
    line = error_of(check_loads, path)
    assert line.startswith(
        f"{path}: expected a tokenizer that splits 256 characters at once, found it still "
        f"at work after 2 s; its expressions explode"
    )


@pytest.mark.long
def test_a_tokenizer_that_fills_the_memory_is_ended(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps(
            {"model": MODEL, "normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 5_000_000}}
        )
    )
    line = error_of(check_loads, path)
    assert line.startswith(
        f"{path}: expected a tokenizer, found its process ended by SIGABRT (more than 4 GB of memory?); "
    )


def test_a_tokenizer_is_taken(tmp_path):
    check_loads(DEMO / "tokenizer.json")
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    check_loads(tmp_path / "tokenizer.json")
    # A vocabulary that cannot spell every text is a tokenizer all the same.
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}})
    )
    check_loads(tmp_path / "tokenizer.json")
