"""SmolLM2 as `make real` left it: its tokenizer, and what its targets came to."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Tokenizer

import gguf_models
from lockstep.artifacts.files import read_json

RESULTS = Path(os.environ["LOCKSTEP_REAL"]) / "results"


def test_ids_are_those_of_llama_cpp() -> None:
    table = gguf_models.table()
    tokenizer = Tokenizer.from_file(str(RESULTS / "smollm2/checkpoint/tokenizer.json"))
    strings = zip(table["strings"], table["ids"]["SmolLM2"])
    assert not {text: ids for text, ids in strings if text and tokenizer.encode(text).ids != ids}


def test_every_target_passes() -> None:
    targets = read_json(RESULTS / "summary.json")["targets"]
    assert targets and {target["golden"] for target in targets} <= {"pass", "not run"}
