"""The command that packs a target into one file: `lockstep bundle TARGET`."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.opened import BUNDLE_SUFFIX, TARGET, made_target, used_config
from lockstep.cli.options import FILE, JSON, RESULTS
from lockstep.cli.terminal import echo_json, file_json
from lockstep.errors import InputError
from lockstep.targets import Results


@click.command()
@TARGET
@click.option("--weights", is_flag=True, help="Pack the weights too.")
@click.option("--out", type=FILE, help="The file to write.  [default: MODEL-PRECISION-LAYERS-BACKEND.tar]")
@click.option("--sign-key", metavar="KEY", type=FILE, help="Sign it with this private key.")
@JSON
@RESULTS
def bundle(target: str, weights: bool, out: Path | None, sign_key: Path | None, as_json: bool, results: Path) -> None:
    """Pack a target into one file.

    It runs where its backend is installed.
    """
    from lockstep.bundle.pack import pack
    from lockstep.publish import dsse, signature

    if out is not None and out.suffix != BUNDLE_SUFFIX:
        raise InputError(
            f"--out: expected a name that ends in {BUNDLE_SUFFIX}, by which commands recognise a bundle, found {out}"
        )
    if sign_key is not None:
        # Only for its errors: a key that cannot sign is reported before gigabytes are packed.
        dsse.private_key(sign_key)

    tree = Results(results)
    config = used_config(tree)
    chosen = made_target(config, tree, target)
    name = f"{chosen}".replace("/", "-") + BUNDLE_SUFFIX
    path = pack(tree, chosen, config.limits.plain(), out or Path(name), weights)
    signed: list[Path] = []
    if sign_key is not None:
        signed = signature.sign(path, sign_key)
    if as_json:
        value = {"target": str(chosen), "weights": weights, **file_json(path)}
        if signed:
            value["signed"] = [str(file) for file in signed]
        return echo_json(value)
    for file in (path, *signed):
        click.echo(file)
