"""A model that answers each message as a table says: whatever a client puts around it, its template looks at the last
message alone, and makes of it a prompt of as many line breaks as the answer has for its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import scripted_model
from demo_model import DEMO
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.pre_tokenizers import ByteLevel

from lockstep.targets import Results

# Its last line tells how the model writes calls and reasoning.
_TEMPLATE = """\
{{%- set places = {places} %}}
{{%- set said = messages[-1].content | trim %}}
{{%- if said not in places %}}{{{{ raise_exception('no answer to ' ~ said) }}}}{{% endif %}}
{{{{- '\\n' * places[said] }}}}
{{#- <tool_call> <think> #}}"""
_PROMPT = 8  # tokens of the shortest one


def write(folder: Path, answers: Mapping[str, str], piece: int | None = None) -> Results:
    """Write results of the model.

    answers: by messages. piece: characters of a token, to have fewer positions; None: tokens are the demo's, as a
    grammar wants them, which takes no other tokens for what can only be one text.
    """
    library = Library.from_file(str(DEMO / "tokenizer.json"))
    if piece is None:
        library.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
    document = json.loads(library.to_str())
    vocabulary = document["model"]["vocab"]
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    places: dict[str, int] = {}
    script: dict[int, int] = {}
    at = _PROMPT
    for message, answer in answers.items():
        places[message.strip()] = at
        if piece is None:
            ids = library.encode(answer).ids
        else:
            pieces = [answer[start : start + piece] for start in range(0, len(answer), piece)]
            ids = [vocabulary.setdefault(level.pre_tokenize_str(piece)[0][0], len(vocabulary)) for piece in pieces]
        for token in [*ids, vocabulary["<eos>"]]:
            script[at - 1] = token
            at += 1
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    config = {"chat_template": _TEMPLATE.format(places=json.dumps(places)), "eos_token": "<eos>"}
    checkpoint = scripted_model.write(folder / "checkpoint", folder / "tokenizer.json", script, config, eos_token_id=0)
    return scripted_model.results(checkpoint, folder / "results")
