"""Random weights with the activations of trained models: outlier channels, a first token that is attended to, logits
that spread."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import FAMILIES
from tests import lifelike


@pytest.mark.parametrize(
    "family, first", [("llama", 0.3), ("gemma", 0.3), ("olmo2", 0.3), ("gpt2", 0.0), ("phi3", 0.0)]
)
def test_activations_are_like_those_of_trained_models(tmp_path: Path, family: str, first: float) -> None:
    """`first`: of one fused projection the queries cannot be told from the keys."""
    actual = lifelike.write(FAMILIES[family].config, 0, tmp_path)
    assert 50 <= actual.outlier <= 500
    assert 3 <= actual.logits <= 8
    assert actual.first is not None and actual.first >= first
