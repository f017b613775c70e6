"""Documents described by dataclasses: values that are read, errors with their place, entries that are omitted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest

from lockstep.artifacts.document import (
    Bound,
    Document,
    JsonObject,
    Key,
    Mark,
    ValidationError,
    integers,
    length,
    like,
    matching,
    one_of,
)
from lockstep.artifacts.files import DIGEST_KEY, read_json, write_json
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
        ({"passed": 1}, "passed: expected true or false, found 1"),
        ({"parts": [{"name": "a"}]}, r"parts\[0\]: expected an object with error, found \['name'\]"),
        ({"parts": [{"name": "a", "error": "0"}]}, r"parts\[0\].error: expected a finite number, found '0'"),
        ({"parts": [{"name": "a", "error": 10**400}]}, r"parts\[0\].error: expected a finite number, found 10+\.\.\."),
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


def test_another_versions_document_says_what_makes_it_again(tmp_path: Path) -> None:
    write_json(tmp_path / "whole.json", {**JSON, "format": "lockstep.test/2"})
    with pytest.raises(
        InputError, match="found 'lockstep.test/2'; another version .*: `lockstep run` makes it again, or delete it"
    ):
        Whole.load(tmp_path / "whole.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_what_is_no_finite_number_is_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "whole.json"
    path.write_text(json.dumps(JSON).replace("0.5", number))
    with pytest.raises(InputError, match=f"^{path}: .*expected ") as error:
        Whole.load(path)
    assert "\n" not in str(error.value)


def test_deep_nesting_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    for depth in (200, 900, 100_000):
        path.write_text(json.dumps(JSON).replace("true", "[" * depth + "]" * depth))
        with pytest.raises(InputError, match=f"^{path}: .*expected .*, found ") as error:
            Whole.load(path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_what_lacks_an_entry_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "whole.json", {key: value for key, value in JSON.items() if key != "passed"})
    with pytest.raises(InputError, match="expected an object with passed, found"):
        Whole.load(tmp_path / "whole.json")


def test_any_change_of_a_file_with_its_digest_is_seen(tmp_path: Path) -> None:
    """The digest is of what a file says: it holds for other white space too, and for nothing else."""
    path = tmp_path / "whole.json"
    WHOLE.save(path)
    written = path.read_text()
    path.write_text(json.dumps(json.loads(written), indent=None))
    assert Whole.load(path) == WHOLE
    for text in (written.replace('"all"', '"al1"'), written.replace('"far"', f'"far",\n  "{DIGEST_KEY}": ""')):
        path.write_text(text)
        with pytest.raises(InputError, match="expected content of sha256"):
            Whole.load(path)


@dataclass(frozen=True)
class Sizes:
    width: Annotated[int, integers(1, 9)] | None = None


@dataclass(frozen=True)
class Place:
    file: str
    rows: tuple[tuple[int, int], ...] = ()

    def validate(self, stored: Mapping[str, Any]) -> None:
        if any(low > high for low, high in self.rows):
            raise ValidationError("rows", "rising numbers", stored["rows"])


@dataclass(frozen=True)
class Bounded(JsonObject):
    COMPUTED: ClassVar[Mapping[str, str]] = {"count": "count"}
    kind: Annotated[Literal["a", "b"], Key("class")]
    place: Annotated[Place, Mark.INLINED]
    names: Annotated[Sequence[Annotated[str, matching("[a-z]+", "a name")]], length(2, minimum=1)]
    bits: Mapping[Annotated[str, matching("[a-z]+", "a name")], Annotated[int, one_of(4, 8)]]
    size: Annotated[int, integers(1, 9)] | Annotated[str, one_of("any")]
    device: Annotated[Mapping[str, Any], like(Sizes)]
    ends: Annotated[tuple[int, ...], Mark.ALWAYS] = ()
    shares: Annotated[Mapping[str, int], length(2)] = field(default_factory=dict)
    count_or_all: Annotated[int | str | None, one_of(1, "all")] = None
    part: Annotated[float, Bound("more than nothing", lambda value: value > 0)] = 1.0
    pair: Annotated[tuple[int, int], Bound("rising numbers", lambda value: value[0] < value[1])] = (0, 1)
    more: Annotated[Mapping[str, Any], Mark.OTHERS] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.names)


BOUNDED = {
    "class": "a", "file": "f", "rows": [[1, 2]], "names": ["x"], "bits": {"w": 4}, "size": "any",
    "device": {"width": 3, "isa": ["y"]}, "ends": [], "count": 1, "format": "of something else",
    "more": "as the field is called that takes it",
}  # fmt: skip


def test_names_and_marks_say_how_a_field_stands_in_the_file() -> None:
    value = Bounded.from_json(BOUNDED)
    assert (value.kind, value.place, value.size) == ("a", Place("f", ((1, 2),)), "any")
    assert value.more == {key: BOUNDED[key] for key in ("format", "more")}
    assert value.to_json() == BOUNDED


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"class": "c"}, "class: expected one of a, b, found 'c'"),
        ({"rows": [[1, 2, 3]]}, r"rows\[0\]: expected a list of 2, found \[1, 2, 3\]"),
        ({"rows": [[2, 1]]}, r"rows: expected rising numbers, found \[\[2, 1\]\]"),
        ({"names": []}, r"names: expected a list of 1 to 2, found \[\]"),
        ({"names": ["x", "Y"]}, r"names\[1\]: expected a name, found 'Y'"),
        ({"bits": {"w": 4.0}}, r"bits.w: expected one of 4, 8, found 4\.0"),
        ({"bits": {"W": 4}}, "bits: name: expected a name, found 'W'"),
        ({"size": 10}, "size: expected an integer from 1 to 9, found 10"),
        ({"size": "all"}, "size: expected one of any, found 'all'"),
        ({"size": None}, "size: expected an integer from 1 to 9 or one of any, found None"),
        ({"device": {"width": 10**40}}, "device.width: expected an integer from 1 to 9, found 10+"),
        ({"ends": None}, "ends: expected a list, found None"),
        ({"shares": dict.fromkeys("abc", 1)}, r"shares: expected a list of 0 to 2, found \{.*\}"),
        ({"count_or_all": 2}, "count_or_all: expected one of 1, all, found 2"),
        ({"part": 0}, "part: expected more than nothing, found 0"),
        ({"pair": [2, 1]}, r"pair: expected rising numbers, found \[2, 1\]"),
    ],
)
def test_what_is_out_of_bounds_is_named_with_its_place(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"^{message}$"):
        Bounded.from_json({**BOUNDED, **damage})


def test_a_field_that_always_stands_in_the_file_must_be_there() -> None:
    with pytest.raises(ValidationError, match="expected an object with ends, found"):
        Bounded.from_json({key: value for key, value in BOUNDED.items() if key != "ends"})
