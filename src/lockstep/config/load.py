"""Load the typed configuration: a YAML file or Snakemake's merged mapping in, a frozen `Config` or an error out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.config.documents import read_document, typed
from lockstep.config.messages import one_line
from lockstep.config.schema import Config
from lockstep.config.sources import source_folders
from lockstep.errors import InputError
from lockstep.targets import Results

DEMO = Path("config/config.yaml")


def load(config: str | os.PathLike | Mapping[str, Any], where: str | None = None) -> Config:
    """Load the config in a YAML (or `.json`) file, or in a mapping.

    The mapping may be Snakemake's merged config. Raises InputError, one line that begins with `where` (default: the
    path, or `config` for a mapping) and the key of the first mistake.
    """
    if isinstance(config, Mapping):
        where = where or "config"
        value = dict(config)
    else:
        where = where or os.fspath(config)
        value = read_document(config)
    if value is None:
        raise InputError(f"{where}: expected a mapping of {', '.join(Config.model_fields)}; found an empty file")
    try:
        return Config.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {one_line(Config, error)}") from None


def find_config(path: Path | None, results: Results = Results()) -> Path:
    """Return `path`, by default the config of this folder.

    That is its config/config.yaml, else its only YAML file that names models, else that of the last run here
    (`results`), else the demo's, of the repository. Raises InputError where there is none.
    """
    if path is not None:
        return path
    working_folder, repository = source_folders()
    local_configs = configs_in(Path())
    # With several, none is the default: a guess could build another model.
    if len(local_configs) > 1:
        local_configs = []
    for place in (working_folder / DEMO, *local_configs, results.config(), repository / DEMO):
        if place.is_file():
            return place
    raise InputError(f"{DEMO}: expected a config, found none here; name one by --config, or start in the checkout")


def configs_in(folder: Path) -> list[Path]:
    """Return the YAML files of a folder that name models, those with mistakes too."""
    # Matched as text, not parsed, so that a config with a mistake is found too.
    files = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
    return [path for path in files if re.search(rb"^models\s*:", path.read_bytes(), re.MULTILINE)]


def load_config(path: Path | None, results: Results = Results()) -> Config:
    """Load the config at `path`, by default that of this folder (`find_config`). Raises InputError as `load` does."""
    return load(find_config(path, results))


def load_merged(
    merged: Mapping[str, Any],
    files: Sequence[str | os.PathLike],
    options: Mapping[str, Any] | None = None,
    merged_names: Collection[str] = (),
) -> Config:
    """Load Snakemake's merged config, and check the files it was merged from.

    merged: as JSON has it, without dates and with texts for keys. options: what of it the command line gave
    (`--config`), whose numbers in mappings and lists are text. merged_names: keys of another workflow, to leave out.

    Snakemake reads the files itself, and of two equal keys silently takes the last. So they are read again, strictly,
    and used if they are all of the config, which they are not in a workflow that has this one as a module. Messages
    begin with the file if one file is all of the config, else with `config`. Raises InputError as `load` does.
    """
    options = options or {}
    values: dict[str, Any] = {}
    for file in files:
        document = read_document(file)
        if isinstance(document, Mapping):
            values = _merged(values, document)
    values = _merged(values, options)
    is_all_of_files = plain(values) == plain(merged)
    if not is_all_of_files:
        values = dict(merged)
    config = _with_types(values, options)
    ours = {key: value for key, value in config.items() if key not in merged_names}
    if len(files) == 1 and is_all_of_files and not options.keys() - set(merged_names):
        return load(ours, os.fspath(files[0]))
    return load(ours, None)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first mapping overridden by the second, as Snakemake merges its config files."""
    values = dict(first)
    for key, value in second.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), Mapping):
            value = _merged(values[key], value)
        values[key] = value
    return values


def _with_types(merged: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged config with the options in it as YAML reads them."""
    values = dict(merged)
    for key, value in options.items():
        if key in values:
            if isinstance(value, Mapping) and isinstance(values[key], Mapping):
                values[key] = _with_types(values[key], value)
            else:
                values[key] = typed(value)
    return values
