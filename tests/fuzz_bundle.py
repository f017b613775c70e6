"""Open and run bundles that are sealed as they should be and say absurd things.

What came of each is printed.

    python fuzz_bundle.py BUNDLE WEIGHTS WORK        # WEIGHTS: - where the bundle holds its own

Of each value in each JSON document of the bundle that is read when it runs, many others are tried: `mutations`. Every
digest and seal is made right again. One line of JSON a case: {"case", "path", "value", "outcome"}; the outcome is the
text that was generated, the one line of the refusal, or what went wrong. A case that ends the process leaves no
outcome.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import re
import resource
import signal
import sys
import tarfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.artifacts.files import DIGEST_KEY, sha256_json
from lockstep.bundle.archive import MANIFEST, header
from lockstep.bundle.opened import opened
from lockstep.errors import LockstepError
from lockstep.runtime import Sampling, command

# Documents that the assembly names, by its key for them.
TEXTS = {"graphs/tokenizer.json": "tokenizer", "graphs/chat_template.json": "chat_template"}
DOCUMENTS = ("graphs/assembly.json", "engines/engines.json", "weights/weights.json", *TEXTS)
MISSING = "(the key is missing)"
AGAIN = "(the list again and again)"
# of time and further memory that a case may take
PROMPT = "San Francisco is a"
SECONDS = 20
BYTES = 1 << 30
DIGESTS = re.compile(r"sha256$")


def mutations(value: Any) -> list[Any]:
    """Yield other values for `value`: of other types, of its type and out of range. And none."""
    renamed = [
        None, True, -1, 0, 1, 10**9, 2**63, 10**40, 0.5, float("nan"), float("inf"), "", "x", "../x", "/etc/passwd",
        "a\nb", [], [value], {}, {"x": value}, [[[[0]]]],
    ]  # fmt: skip
    if isinstance(value, str):
        renamed += [value + "x", value.upper(), "\ud800"]
    elif isinstance(value, bool):
        renamed += [not value]
    elif isinstance(value, int):
        renamed += [value + 1, value * 2, -value, float(value), str(value)]
    elif isinstance(value, list):
        renamed += [value[:-1], value + value[-1:], value[::-1], AGAIN]
    elif isinstance(value, dict):
        renamed += [{**value, "../x": 1}]
    return [MISSING, *(other for other in renamed if json.dumps(other) != json.dumps(value))]


def values(document: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """(path, value) of everything in a document."""
    yield path, document
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, item in items:
        yield from values(item, (*path, key))


def shape(path: tuple, document: Any) -> tuple:
    """Return a path without repeated items: of layers, slots, tensors and tokens the first represents all."""
    named = {"slots", "tensors", "vocab", "isa", "engines"}
    return tuple(
        "*" if isinstance(key, int) or index and path[index - 1] in named else key for index, key in enumerate(path)
    )


def cases(documents: dict[str, Any]) -> Iterator[tuple[str, tuple, Any]]:
    """(document, path, value) of each case, in the order of the documents."""
    for name, document in documents.items():
        tried = set()
        for path, value in values(document):
            kind = shape(path, document)
            if not path or kind in tried or DIGESTS.search(str(path[-1])) or path[-1] in ("provenance", "batchful"):
                continue
            if name == MANIFEST and path[0] == "files":
                continue  # test_bundle.py: headers follow from it
            tried.add(kind)
            yield from ((name, path, other) for other in mutations(value))


def changed(document: Any, path: tuple, value: Any) -> Any:
    document = copy.deepcopy(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = place[path[-1]] * 1000 if value is AGAIN else value
    return document


def dump(value: Any) -> bytes:
    """Write JSON as a hostile writer would. Python's NaN, Infinity and lone surrogates stay as they are."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def sealed(document: Any) -> bytes:
    if isinstance(document, dict) and DIGEST_KEY in document:
        document = {key: item for key, item in document.items() if key != DIGEST_KEY}
        with contextlib.suppress(ValueError):  # NaN and infinity have no seal
            document[DIGEST_KEY] = sha256_json(document)
    return dump(document)


class Bundle:
    """The files of a bundle in memory."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            self.files = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
        self.documents = {name: json.loads(self.files[name]) for name in (MANIFEST, *DOCUMENTS)}

    def write(self, out: Path, name: str, path: tuple, value: Any) -> None:
        """Write the bundle with one value changed, and all that digests it made right."""
        files = dict(self.files)
        documents = dict(self.documents)
        documents[name] = changed(documents[name], path, value)
        if name in TEXTS:
            files[name] = sealed(documents[name])
            documents["graphs/assembly.json"] = changed(
                documents["graphs/assembly.json"], (TEXTS[name], "sha256"), hashlib.sha256(files[name]).hexdigest()
            )
        for document in ("graphs/assembly.json", "engines/engines.json", "weights/weights.json"):
            files[document] = sealed(documents[document])
        files.pop(MANIFEST)
        listed = [
            {"path": file, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for file, data in sorted(files.items())
        ]
        manifest = {key: item for key, item in documents[MANIFEST].items() if key != DIGEST_KEY} | {"files": listed}
        with contextlib.suppress(ValueError):
            manifest[DIGEST_KEY] = sha256_json(manifest)
        first = (json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode(
            errors="surrogatepass"
        )
        with open(out, "wb") as archive:
            for file, data in ((MANIFEST, first), *sorted(files.items())):
                archive.write(header(file, len(data)) + data + bytes(-len(data) % 512))
            archive.write(bytes(1024))


def run(path: Path, weights: Path | None) -> str:
    """Generate text as `lockstep generate BUNDLE.tar` does, and return it.

    Reads what `lockstep serve BUNDLE.tar` reads besides.
    """
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()), opened(path, weights) as place:
        ChatTemplate.open(place.assembly)
        files = place.engines, place.assembly, place.weights, place.target.layers
        command.generate(command.Job(*files, place.limits, 1, Sampling()), PROMPT)
    return text.getvalue()


def outcome(path: Path, weights: Path | None) -> str:
    try:
        return f"text: {run(path, weights)}"
    except LockstepError as error:
        return f"refused: {error}"
    except BaseException as error:  # a panic of the tokenizers package is no Exception
        return f"FAILED: {type(error).__name__}: {error}: {traceback.extract_tb(error.__traceback__)[-1]}"


def main(bundle: str, weights: str, work: str) -> None:
    weights_path = None if weights == "-" else Path(weights)
    folder = Path(work)
    source = Bundle(Path(bundle))
    path = folder / "case.tar"

    def watch(event: str, arguments: tuple) -> None:
        if (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            and isinstance(arguments[0], str)
        ):
            if not os.path.realpath(arguments[0]).startswith((str(folder.resolve()), "/dev/", "/proc/")):
                print(json.dumps({"wrote": arguments[0]}), flush=True)

    sys.addaudithook(watch)
    print(
        json.dumps({"case": -1, "outcome": outcome(Path(bundle), weights_path)}), flush=True
    )  # as it is; libraries are loaded then
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    for number, (name, place, value) in enumerate(cases(source.documents)):
        about = {"case": number, "path": f"{name}: {'.'.join(map(str, place))}", "value": repr(value)[:80]}
        print(json.dumps(about), flush=True)
        try:
            source.write(path, name, place, value)
        except UnicodeEncodeError:
            continue  # no such bundle can be written
        # Of processor time, since other processes may take the machine; and of time, since one that waits for ever
        # takes none.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(30 * SECONDS)
        result = outcome(path, weights_path)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        print(json.dumps({**about, "outcome": result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
