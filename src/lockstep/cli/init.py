"""The command that writes a model's first config: `lockstep init SOURCE`."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.options import PATH
from lockstep.errors import InputError


@click.command()
@click.argument("source", metavar="FOLDER|hf:ORG/NAME|MODEL.gguf")
@click.option("--out", type=PATH, help="The file to write.  [default: NAME.yaml]")
def init(source: str, out: Path | None) -> None:
    """Write the first config of a model, which works as it is.

    It asks for one precision, by the model's size and what can run here, and limits that fit the model; a line says
    what a run needs of memory, disk and time. Of a model on the hub config.json is fetched.
    """
    from lockstep.artifacts.files import write_bytes
    from lockstep.checkpoint.tensors import find_tensors
    from lockstep.cli.doctor import model_line, needs
    from lockstep.config.first import first_config, name_of
    from lockstep.config.load import load
    from lockstep.config.sources import FolderSource, HubSource, SourceError, parse_source
    from lockstep.step.host_memory import total_bytes

    try:
        kind = parse_source(source)
    except SourceError as error:
        raise InputError(f"init: {error}") from None
    name = name_of(source)
    out = out or Path(f"{name}.yaml")
    if out.exists():
        raise InputError(f"{out}: expected no such file yet, found one; name another by --out, or delete it")
    shape_file = _shape_file(source)
    text = first_config(name, source, shape_file, total_bytes())
    # Write first, so that errors of the check name the user's file; a config that does not work is removed again.
    write_bytes(out, text.encode())
    try:
        config = load(out)
        # Of a model on the hub nothing is here but its config.json.
        if not isinstance(kind, HubSource):
            config.check_sources(where=str(out))
        if isinstance(kind, FolderSource):
            find_tensors(shape_file)
    except InputError:
        out.unlink()
        raise
    if needed := needs(config, name, shape_file):
        click.echo(model_line(name, needed))
    click.echo(f"Wrote {out}. Make and check it: lockstep run {out}")


def _shape_file(source: str) -> Path:
    from lockstep.config import sources

    kind = sources.parse_source(source)
    if isinstance(kind, sources.HubSource):
        from lockstep.checkpoint.hub.fetch import fetch_config

        return fetch_config(source)
    try:
        return sources.resolve_here(kind)
    except InputError as error:
        raise InputError(f"init: {error}") from None
