"""Documents that are what their dataclass says: what is read, what is refused and where, what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.typed import Document
from lockstep.errors import InputError


@dataclass(frozen=True)
class Part:
    name: str
    error: float | None
    note: str | None = None


@dataclass(frozen=True)
class Whole(Document):
    FORMAT: ClassVar[str] = "lockstep.test/1"
    layers: int | str
    passed: bool
    parts: tuple[Part, ...]
    by_name: Mapping[str, tuple[int, ...]]
    anything: Any
    limit: int = 4


WHOLE = Whole("all", True, (Part("a", None), Part("b", 0.5, "far")), {"x": (1, 2)}, {"free": [1, None]})
JSON = {
    "format": "lockstep.test/1",
    "layers": "all",
    "passed": True,
    "parts": [{"name": "a", "error": None}, {"name": "b", "error": 0.5, "note": "far"}],
    "by_name": {"x": [1, 2]},
    "anything": {"free": [1, None]},
}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    WHOLE.save(tmp_path / "whole.json")
    assert read_json(tmp_path / "whole.json") == JSON, "fields with their default are left out"
    assert Whole.load(tmp_path / "whole.json") == WHOLE


def test_entries_of_a_newer_writer_are_no_fault(tmp_path: Path) -> None:
    write_json(tmp_path / "whole.json", {**JSON, "newer": 1})
    assert Whole.load(tmp_path / "whole.json") == WHOLE


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"layers": 1.5}, "layers: expected an integer or a text, found 1.5"),
        ({"layers": True}, "layers: expected an integer or a text, found True"),
        ({"passed": 1}, "passed: expected true or false, found 1"),
        ({"parts": {}}, "parts: expected a list, found {}"),
        ({"parts": [{"name": "a"}]}, r"parts\[0\]: expected an object with error, found \['name'\]"),
        ({"parts": [{"name": "a", "error": "0"}]}, r"parts\[0\].error: expected a finite number, found '0'"),
        ({"parts": ["a"]}, r"parts\[0\]: expected an object, found 'a'"),
        ({"by_name": {"x": [None]}}, r"by_name.x\[0\]: expected an integer, found None"),
        ({"limit": "4"}, "limit: expected an integer, found '4'"),
        ({"format": "lockstep.test/2"}, "expected format 'lockstep.test/1', found 'lockstep.test/2'"),
    ],
)
def test_another_type_is_named_with_its_place(tmp_path: Path, damage: dict[str, Any], message: str) -> None:
    path = tmp_path / "whole.json"
    write_json(path, {**JSON, **damage})
    with pytest.raises(InputError, match=f"^{path}: {message}; ") as error:
        Whole.load(path)
    assert "\n" not in str(error.value)


def test_what_lacks_an_entry_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "whole.json", {key: value for key, value in JSON.items() if key != "passed"})
    with pytest.raises(InputError, match="expected an object with passed, found"):
        Whole.load(tmp_path / "whole.json")
