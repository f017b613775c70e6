"""Chat templates from a checkpoint to an export: found as transformers finds them, kept, and refused with one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from demo_model import DEMO
from transformers import AutoTokenizer

from lockstep.artifacts import chat_template
from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.artifacts.files import read_json, write_json
from lockstep.checkpoint import resolve_architecture
from lockstep.checkpoint.chat_template import FILES, read_chat_template
from lockstep.checkpoint.resolve import SIDE_FILES
from lockstep.errors import CheckError, InputError
from lockstep.targets import Results

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": PLAIN}]
TOKEN = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}


def folder_of(path: Path, config: dict[str, Any], **files: str) -> Path:
    """The demo's checkpoint without weights, with another tokenizer_config.json; files: others, with _ for the dot."""
    path.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, path / name)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


FOUND = {
    "a text": ({**CONFIG, "chat_template": PLAIN}, {}),
    "several with names": ({**CONFIG, "chat_template": NAMED[1:]}, {}),
    "a file before the config": ({**CONFIG, "chat_template": NAMED}, {"chat_template__jinja": "{{ eos_token }}é\n"}),
    "tokens as objects": ({**CONFIG, "chat_template": PLAIN, "bos_token": TOKEN, "unk_token": None}, {}),
    "tokens with other names": ({**CONFIG, "chat_template": PLAIN, "image_token": "<img>"}, {}),
    "more tokens": ({**CONFIG, "chat_template": PLAIN, "extra_special_tokens": {"eot_token": "<eot>"}}, {}),
    "an old file of tokens": (
        {**CONFIG, "chat_template": PLAIN, "add_bos_token": True},
        {"special_tokens_map__json": json.dumps({"bos_token": {"content": "<b>", "single_word": False}})},
    ),
}


@pytest.mark.parametrize(("config", "files"), FOUND.values(), ids=FOUND)
def test_it_is_found_as_transformers_finds_it(tmp_path: Path, config: dict, files: dict) -> None:
    folder = folder_of(tmp_path / "model", config, **files)
    actual = read_chat_template(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert actual is not None
    assert (actual.template, dict(actual.special_tokens)) == (
        tokenizer.get_chat_template(),
        dict(tokenizer.special_tokens_map),
    )


def test_a_checkpoint_may_have_none(tmp_path: Path) -> None:
    assert read_chat_template(folder_of(tmp_path, CONFIG)) is None
    assert read_chat_template(folder_of(tmp_path, {**CONFIG, "chat_template": None})) is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_chat_template(tmp_path) is None


def test_a_chat_with_tools_takes_the_template_for_them(tmp_path: Path) -> None:
    named = {"tool_use": "\n \n{{ tools[0].type }}\n  \n", "default": f"  {PLAIN}\n\n"}
    entries = [{"name": name, "template": template} for name, template in named.items()]
    folder = folder_of(tmp_path, {**CONFIG, "chat_template": entries})
    actual = read_chat_template(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert actual is not None
    for tools in (None, [{"type": "function"}]):
        chat = {"conversation": [{"role": "user", "content": "Hi"}], "tools": tools, "tokenize": False}
        expected = tokenizer.apply_chat_template(**chat)
        assert tokenizer.apply_chat_template(**chat, chat_template=actual.template) == expected


def test_templates_without_a_default_refuse_chats_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = folder_of(tmp_path / "model", {**CONFIG, "chat_template": NAMED[:1]})
    assert read_chat_template(folder) is None
    resolve_architecture(str(folder), folder, tmp_path / "architecture.json")
    assert capsys.readouterr().err == (
        f"lockstep: note: {folder}: chats will be refused, for of its chat templates (tool_use) none is the default; "
        "put one into chat_template.jinja there\n"
    )


REFUSED = {
    "no texts": (
        {"chat_template": [{"name": "a", "template": 3}]},
        "a list of objects with name and template, found [{",
    ),
    "a number": ({"chat_template": 3}, "expected chat_template to be a text, or a list of objects"),
    "half a character": ({"chat_template": "a\ud800"}, r"expected chat_template in Unicode, found '\ud800'"),
    "half a token": ({"chat_template": PLAIN, "bos_token": "\udfff"}, "expected bos_token in Unicode"),
    "a book": ({"chat_template": "x" * 1_000_001}, "of at most 1000000 characters, found 1000001; shorten it"),
}


@pytest.mark.parametrize(("config", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_none_is_one_line_before_the_export(tmp_path: Path, config: dict, line: str) -> None:
    folder = folder_of(tmp_path / "model", config)
    with pytest.raises(InputError) as caught:
        resolve_architecture(str(folder), folder, tmp_path / "architecture.json")
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{folder / 'tokenizer_config.json'}: ")


def test_its_files_are_inputs_of_the_export() -> None:
    assert set(FILES) <= set(SIDE_FILES)


def test_the_export_keeps_it_and_a_damaged_one_is_refused(demo: Results, tmp_path: Path) -> None:
    assembly_json = demo.assembly("demo-llama", "fp32")
    actual = ChatTemplate.open(assembly_json)
    assert actual is not None
    assert actual.template == json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    assert dict(actual.special_tokens) == {"eos_token": "<eos>"}
    shutil.copytree(assembly_json.parent, tmp_path / "graphs")
    path = tmp_path / "graphs" / chat_template.FILE
    path.write_bytes(path.read_bytes().replace(b"<eos>", b"<bos>"))
    with pytest.raises(InputError, match="expected content of sha256"):
        ChatTemplate.open(tmp_path / "graphs" / "assembly.json")
    value = read_json(assembly_json.with_name(chat_template.FILE))
    write_json(path, {**value, "template": "{{ 1 }}"})  # sealed as it should be
    with pytest.raises(CheckError, match="export again"):
        ChatTemplate.open(tmp_path / "graphs" / "assembly.json")
