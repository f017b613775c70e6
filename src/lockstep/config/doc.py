"""Generated pages of the config: `README.md`, and the schema at `../workflow/schemas/config.schema.yaml`.

The first is for people, the second for editors and the Snakemake workflow catalogue, which looks for it there.

    python -m lockstep.config.doc --write config
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lockstep.artifacts.files import write_bytes
from lockstep.config.backends import backends
from lockstep.config.schema import Config
from lockstep.config.section import INT32_MAX
from lockstep.errors import guard

Schema = dict[str, Any]

EXAMPLE = """\
# yaml-language-server: $schema=workflow/schemas/config.schema.yaml
models:
  my-llama:                          # your name for it: a folder in results/, and the first part of a target's name
    source: checkpoints/my-llama     # a Hugging Face model folder: config.json, *.safetensors, tokenizer.json
    layers: [2, all]                 # the first two layers, and the whole model: no engine is built twice
    precisions: [fp32, fp16]
    backends: [onnxruntime]
    golden:
      max_new_tokens: 16
      prompts:
        - text: San Francisco is a   # any text; quotes are needed around yes, no, on, off, numbers and `a: b`
        - text: "The sea:"
          expected:                  # optional: what must come after the prompt, by layer count
            all: " wide and cold, and the ships come home"

limits:                              # all optional from here on: these are the defaults
  max_batch_size: 4
  max_input_len: 128                 # at most max_seq_len
  max_seq_len: 256                   # at most the model's max_position_embeddings
  max_num_tokens: 512                # at least max_batch_size

tolerances:
  fp16:
    noise: 4                         # keys left out, here fp32 and bf16, keep their default of 6
"""

SCHEMA = "../workflow/schemas/config.schema.yaml"
MADE_FROM = "Made from src/lockstep/config/types.py by `python -m lockstep.config.doc --write config`: edit there"
README = """\
<!-- {made_from}. -->
# Configuration

`config.yaml` is the demo. For models of your own, write a file like the one below and name it:
`snakemake --cores 4 --configfile my.yaml --directory out`. Threads, memory and the output folder are not in it: they
are Snakemake's `--cores`, `--resources` and `--directory`.

Everything is checked before any job starts. An unknown key, a wrong type, a layer count above the model's or a
precision that a backend lacks gives one line that names the key, what was found and what is allowed.

## Example

```yaml
{example}```

With the first line in place, editors that have a YAML language server complete and check the keys from
`workflow/schemas/config.schema.yaml`.

## Keys

{keys}

A model gives one target for each combination of its layer counts, precisions and backends, named
`<model>/<precision>/<layers>/<backend>`. Without `/<backend>` the name means the model's first backend.
Some names are taken by files next to the models' folders in `results/`: `config.json`, `summary` and `report` with
or without an ending, `logs` and `benchmarks`.

| backend | precisions |
|---|---|
{backends}

## Where a relative `source` is looked up

First from the working directory (which is the folder given as `--directory`, if one is), then from the repository. The
first of the two that is a folder is taken; if neither is, the error names both. An absolute path is taken as it is.
"""


def schema() -> Schema:
    """Return the JSON schema of the config (draft 2020-12): keys, types and bounds, without rules across keys."""
    body = _closed(Config.model_json_schema())
    # Editors complete the names of backends, unless the config has devices, whose names are the user's.
    names = {"enum": list(backends())}
    model = {"properties": {"backends": {"items": names}, "backend_precisions": {"propertyNames": names}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **body,
        "if": {"not": {"required": ["devices"]}},
        "then": {"properties": {"models": {"additionalProperties": model}}},
        "title": "Lockstep configuration",
    }


def readme() -> str:
    root = schema()
    rows = [f"| `{key}` | {kind} | {default} | {meaning} |" for key, kind, default, meaning in _rows(root, root, "")]
    keys = "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])
    rows_of_backends = (f"| `{name}` | {', '.join(settings.precisions)} |" for name, settings in backends().items())
    return README.format(made_from=MADE_FROM, example=EXAMPLE, keys=keys, backends="\n".join(rows_of_backends))


def generated() -> dict[str, str]:
    listed = yaml.safe_dump(catalogued(schema()), width=120, allow_unicode=True)
    return {"README.md": readme(), SCHEMA: f"# {MADE_FROM}.\n{listed}"}


def catalogued(root: Schema) -> Schema:
    """Return the schema without references, and with the contents of lists and mappings under `properties` too.

    The workflow catalogue follows nothing else, and copies texts into a Markdown table. `properties` of a list have no
    meaning in a schema: they only show the keys, as a mapping's NAME does.
    """

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:  # other keys, such as a description, replace those of the reference's target
            other_keys = {key: value for key, value in node.items() if key != "$ref"}
            return inlined({**_resolve(root, node), **other_keys})
        entries = {key: inlined(value) for key, value in node.items() if key != "$defs"}
        if entries.get("type") == "array" and "properties" in entries.get("items", {}):
            entries["properties"] = entries["items"]["properties"]
        if entries.get("type") == "object" and "patternProperties" in entries:
            entry = next(iter(entries["patternProperties"].values()))
            if "properties" in entry:
                entries["properties"] = {"NAME": entry}
        return entries

    return inlined(root)


def write(folder: Path) -> None:
    for name, text in generated().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / name, text.encode())


def _closed(node: Any) -> Any:
    """Return the schema without pydantic's made-up titles, with named entries closed to other names."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    # Under "properties" the keys are the config's own, so that one named `title` would stay.
    closed: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            closed[key] = {name: _closed(item) for name, item in value.items()}
        # The keys of a default value are the config's own, and stay as they are.
        elif key == "default":
            closed[key] = value
        elif key != "title":
            closed[key] = _closed(value)
    if isinstance(node.get("description"), str):
        closed["description"] = " ".join(node["description"].split())
    if "patternProperties" in closed:
        closed["additionalProperties"] = False
    return closed


def _rows(root: Schema, section: Schema, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of each key under `section`, depth first."""
    for name, node in section["properties"].items():
        key = f"{prefix}{name}"
        inner = _resolve(root, node)
        below, prefix_below = _below(root, inner, key)
        shown = _default(node, optional=name not in section.get("required", ()), is_section="properties" in inner)
        yield key, _kind(root, inner), shown, node.get("description", inner.get("description", ""))
        if below:
            yield from _rows(root, below, prefix_below)


def _below(root: Schema, node: Schema, key: str) -> tuple[Schema | None, str]:
    """Return the section in a key, its list or its mapping, and the prefix of its keys; None without one."""
    if "properties" in node:
        return node, f"{key}."
    if "patternProperties" in node:
        entry = _resolve(root, next(iter(node["patternProperties"].values())))
        prefix = f"{key}.<name>."
    else:
        entry = _resolve(root, node.get("items", {}))
        prefix = f"{key}[]."
    if "properties" not in entry:
        return None, ""
    return entry, prefix


def _resolve(root: Schema, node: Schema) -> Schema:
    reference = node.get("$ref")
    if reference is None:
        return node
    return root["$defs"][reference.rpartition("/")[2]]


def _kind(root: Schema, node: Schema) -> str:
    node = _resolve(root, node)
    if "anyOf" in node:
        return " or ".join(_kind(root, item) for item in node["anyOf"])
    if "const" in node or "enum" in node:
        return ", ".join(f"`{word}`" for word in node.get("enum", [node.get("const")]))
    if node["type"] == "array":
        return f"list of {_several(_kind(root, node['items']))}"
    if node["type"] == "object":
        named = node.get("patternProperties")
        if not named:
            return "mapping"
        return f"mapping to {_several(_kind(root, next(iter(named.values()))))}"
    words = ["text" if node["type"] == "string" else node["type"]]
    if "minimum" in node:
        words.append(f"≥ {node['minimum']}")
    if "exclusiveMinimum" in node:
        words.append(f"> {node['exclusiveMinimum']:g}")
    if node.get("maximum", INT32_MAX) != INT32_MAX:
        words.append(f"≤ {node['maximum']}")
    return " ".join(words)


def _several(kind: str) -> str:
    return "mappings" if kind == "mapping" else kind


def _default(node: Schema, optional: bool, is_section: bool) -> str:
    if not optional:
        return "required"
    if is_section:
        return "see below"
    value = node["default"]
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    if value in ({}, None, ""):
        return "none"
    return f"`{value}`"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lockstep.config.doc", description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="FOLDER", type=Path, required=True, help="write the generated files")
    with guard():
        write(parser.parse_args().write)


if __name__ == "__main__":
    main()
