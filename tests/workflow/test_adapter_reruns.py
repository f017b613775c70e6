"""What another adapter makes again: itself, and the checks of adapters. Nothing that it could be built into."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml
from checkout import Checkout

CONFIG = "config/adapters.yaml"
MADE = ("demo-lora/fp32/engines/onnxruntime/engines.json", "demo-lora/adapters.json")


def edit(checkout: Checkout, adapters: dict[str, str], **limits: int) -> None:
    """The demo with these adapters, in fp32."""
    path = checkout.folder / CONFIG
    value = yaml.safe_load(path.read_text())
    value["models"]["demo-lora"] |= {"precisions": ["fp32"], **limits}
    value["models"]["demo-lora"]["adapters"] = {name: {"source": source} for name, source in adapters.items()}
    path.write_text(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


@pytest.mark.long
def test_another_adapter_rebuilds_nothing(tmp_path: Path) -> None:
    checkout = Checkout.make(tmp_path / "checkout")
    one = {"captain": "resources/demo-adapters/captain"}
    edit(checkout, one)
    asked = [*(f"results/{path}" for path in MADE), "--configfile", CONFIG]
    checkout.finish(*asked)
    before = checkout.digests()
    edit(checkout, {**one, "shakespeare": "resources/demo-adapters/shakespeare"})
    assert checkout.would_run(*asked) == Counter(adapters=1)
    checkout.finish(*asked)
    after = checkout.digests()
    changed = {path for path in before if after.get(path) != before[path]}
    assert changed == {"demo-lora/adapters.json", "demo-lora/adapters.build.json"} and set(before) == set(after)
    assert not checkout.would_run(*asked)
    edit(checkout, one, max_adapters=8)
    assert checkout.would_run(*asked) == Counter(adapters=1, export=1, build=1)
