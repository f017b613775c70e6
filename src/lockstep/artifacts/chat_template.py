"""The chat template of a model, which renders messages to the text of a prompt.

`graphs/chat_template.json` in and out, next to the tokenizer. The template is Jinja, as transformers has it; whoever
renders it treats it as hostile, for it comes from whoever published the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.assembly import TextFiles
from lockstep.artifacts.bounds import REMEDY, Name
from lockstep.artifacts.document import Document, matching
from lockstep.artifacts.files import sha256_file
from lockstep.errors import CheckError

FILE = "chat_template.json"
# In characters; the longest that are published have some ten thousand.
LONGEST = 1_000_000
LONGEST_TOKEN = 1000


@dataclass(frozen=True)
class ChatTemplate(Document):
    """A Jinja template, and the special tokens that it uses, {name: token}."""

    FORMAT: ClassVar[str] = formats.CHAT_TEMPLATE
    REMEDY: ClassVar[str] = REMEDY
    template: Annotated[str, matching(rf"[^\ud800-\udfff]{{1,{LONGEST}}}", f"a text of 1 to {LONGEST} characters")]
    special_tokens: Mapping[Name, Annotated[str, matching(rf"[^\ud800-\udfff]{{0,{LONGEST_TOKEN}}}", "a token")]]

    @classmethod
    def open(cls, assembly_json: str | os.PathLike) -> ChatTemplate | None:
        """Read the template that an assembly names; None where it names none.

        Raises InputError for a file that holds no template, CheckError for one that was not exported with the assembly.
        """
        entry = TextFiles.load(assembly_json).chat_template
        if entry is None:
            return None
        path = Path(assembly_json).parent / entry.file
        # Parse before hashing, so that a damaged file is reported as damaged and not as another export's.
        template = cls.load(path)
        digest = sha256_file(path)
        if digest != entry.sha256:
            raise CheckError(f"{path}: sha256: expected {entry.sha256}, found {digest}; export again")
        return template
