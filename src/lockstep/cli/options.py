"""Options and parameter types that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

PATH = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
AT_LEAST_0 = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
RESULTS = click.option("--results", type=FOLDER, default=Path("results"), help="The results tree.")
LOCKS = click.option("--locks", type=FOLDER, default=Path("locks"), help="The folder of the lock files.")
CONFIG = click.option(
    "--config",
    "config_file",
    type=PATH,
    help="The config.  [default: config/config.yaml, else the only one here, else that of the last run here]",
)
