"""The chat template of a model, which renders messages to the text of a prompt.

`graphs/chat_template.json` in and out, beside the tokenizer. The template is Jinja, as transformers has it; whoever
renders it treats it as hostile, for it comes from whoever published the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.assembly import load_chat_template
from lockstep.artifacts.files import SEAL, dump_json, sha256_file, sha256_json
from lockstep.artifacts.manifests import NAME, read_checked
from lockstep.artifacts.schema import mapping, record, text
from lockstep.errors import CheckError

FILE = "chat_template.json"
LONGEST, LONGEST_TOKEN = 1_000_000, 1000  # characters; the longest that are published have some ten thousand
_SCHEMA = record(
    {
        "template": text(rf"[^\ud800-\udfff]{{1,{LONGEST}}}", f"a text of 1 to {LONGEST} characters"),
        "special_tokens": mapping(text(rf"[^\ud800-\udfff]{{0,{LONGEST_TOKEN}}}", "a token"), NAME),
    }
)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it uses.

    special_tokens: what it names besides the messages, such as bos_token, by name.
    """

    template: str
    special_tokens: Mapping[str, str]

    @classmethod
    def open(cls, assembly_json: str | os.PathLike) -> ChatTemplate | None:
        """Read the template that an assembly names; None where it names none.

        Raises InputError for a file that holds no template, CheckError for one that was not exported with the assembly.
        """
        entry = load_chat_template(assembly_json)
        if entry is None:
            return None
        path = Path(assembly_json).parent / entry.file
        value = read_checked(path, formats.CHAT_TEMPLATE, _SCHEMA)
        if (found := sha256_file(path)) != entry.sha256:
            raise CheckError(f"{path}: sha256: expected {entry.sha256}, found {found}; export again")
        return cls(value["template"], value["special_tokens"])

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        value: dict[str, Any] = {
            "format": formats.CHAT_TEMPLATE,
            "template": self.template,
            "special_tokens": dict(self.special_tokens),
        }
        return dump_json({**value, SEAL: sha256_json(value)}).encode()
