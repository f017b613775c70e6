"""What transformers says of a checkpoint folder, as a reference has it, without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.export.torch_model import cut_config, load_folder
from lockstep.verify.golden.reference import Reference, answer, load_tokenizer
from lockstep.verify.golden.terms import GoldenTerms


def compute(
    folder: Path, config: Mapping[str, Any], layers: int | str, prompts: Sequence[str], max_new_tokens: int
) -> Reference:
    """Return the reference of a folder. config: config.json's content."""
    model = load_folder(folder, cut_config(config, layers))
    return answer(model, load_tokenizer(folder), folder, config, GoldenTerms(max_new_tokens, tuple(prompts)))
