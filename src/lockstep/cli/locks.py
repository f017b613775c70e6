"""The commands of locks: `lockstep lock`, `lockstep verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lockstep.cli.opened import BUNDLE_SUFFIX, check_was_run
from lockstep.cli.options import FILE, JSON, LOCKS, RESULTS
from lockstep.cli.terminal import echo_json, file_json, working
from lockstep.errors import CheckError, InputError
from lockstep.targets import Results


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--accept", is_flag=True, help="Write it also where checks become looser, or places are dropped.")
@JSON
@LOCKS
@RESULTS
def lock(models: tuple[str, ...], accept: bool, as_json: bool, locks: Path, results: Path) -> None:
    """Write locks/<model>.lock.json of finished models.

    A lock that is there already keeps what other devices locked, and each change of it is printed.
    """
    from lockstep.artifacts.files import read_json
    from lockstep.manifests.manifest_files import manifest_entries
    from lockstep.provenance.lock import lock_path
    from lockstep.provenance.lock_update import updated_lock

    check_was_run(Results(results))
    config = Results(results).config()
    with manifest_entries(config):
        chosen = models or sorted(read_json(config)["models"])
    written = []
    for model in chosen:
        path = lock_path(locks, model)
        update = updated_lock(results, model, path)
        if not as_json:
            for line in update.changes:
                click.echo(f"{path}: {line}", err=True)
        if update.looser and not accept:
            raise CheckError(
                f"{path}: expected checks as strict as those locked, found {len(update.looser)} that are dropped or "
                f"looser ({update.looser[0]}); take back the change, or write the lock with --accept"
            )
        update.lock.save(path)
        written.append({"model": model, **file_json(path), "changes": update.changes})
        if not as_json:
            click.echo(path)
    if as_json:
        echo_json({"locks": written})


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--deep", is_flag=True, help="Hash large files too that have the size and times of when they were hashed last."
)
@click.option("-v", "--verbose", is_flag=True, help="List also artefacts that are the same.")
@click.option("--signature", is_flag=True, help="Of bundles: who signed them, by --key.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="PUBLIC_KEY",
    type=FILE,
    help="A public key that may have signed. May be given several times.",
)
@JSON
@LOCKS
@RESULTS
def verify(
    models: tuple[str, ...],
    deep: bool,
    verbose: bool,
    signature: bool,
    keys: tuple[Path, ...],
    as_json: bool,
    locks: Path,
    results: Path,
) -> None:
    """Check that every artefact is as recorded and locked.

    A MODEL may be a bundle, a file that ends with .tar, or a certificate, which ends with .json. Exit code 0 if all are
    right, else 1.
    """
    kind, *other_kinds = set(map(_kind, models)) or {"model"}
    if other_kinds:
        raise InputError("verify: expected models, bundles or certificates, found several of these; run it for each")
    if keys and not signature:
        raise InputError("--key: expected --signature with it, found none; add --signature")
    if kind == "model" and signature:
        raise InputError("--signature: expected a bundle, found none; name one that ends with .tar")
    if signature and not keys:
        raise InputError("--signature: expected a public key of a possible signer, found none; name one by --key")
    # Without keys the bytes of a certificate are checked, and no signature.
    if kind == ".json":
        return _verify_certificates([Path(name) for name in models], keys, as_json)
    if kind == BUNDLE_SUFFIX:
        return _verify_bundles([Path(name) for name in models], keys, as_json)
    from lockstep.provenance.verify import SAME
    from lockstep.provenance.verify import verify as verify_results

    locks_by_model = {path.name.removesuffix(".lock.json"): path for path in sorted(locks.glob("*.lock.json"))}
    for model in models:
        if model not in locks_by_model and not (results / model).is_dir():
            raise InputError(
                f"{results / model}: expected results of a model, or a lock in {locks}, found "
                f"neither; run `lockstep run` first, or correct the name"
            )
    with working(f"verify {results}"):
        chosen_locks = {model: path for model, path in locks_by_model.items() if not models or model in models}
        findings = verify_results(results, chosen_locks, models, deep)
    if not findings:
        raise InputError(f"{results}: expected results to verify, found none; run `lockstep run` first")
    wrong = [finding for finding in findings if finding.status != SAME]
    if as_json:
        entries = [asdict(finding) for finding in findings]
        echo_json({"locks": sorted(locks_by_model), "same": len(findings) - len(wrong), "findings": entries})
    else:
        for finding in findings:
            if verbose or finding.status != SAME:
                click.echo(finding)
        with_locks = "without a lock"
        if locks_by_model:
            with_locks = f"with {len(locks_by_model)} lock{'s' * (len(locks_by_model) != 1)}"
        click.echo(f"{len(findings) - len(wrong)} of {len(findings)} the same, {with_locks}")
    if wrong:
        raise CheckError(
            f"{len(wrong)} of {len(findings)} artefacts are not as recorded: "
            f"{wrong[0].name}{' and others' * (len(wrong) > 1)}"
        )


def _kind(name: str) -> str:
    """Return the suffix of a bundle or certificate; "model" for the name of a model, which may hold a dot."""
    suffix = Path(name).suffix
    return suffix if suffix in (".json", BUNDLE_SUFFIX) else "model"


def _verify_certificates(certificates: list[Path], keys: tuple[Path, ...], as_json: bool) -> None:
    from lockstep.publish import certificates as documents

    lines = [documents.verify(path, keys) for path in certificates]
    if as_json:
        return echo_json({"certificates": lines})
    click.echo("\n".join(lines))


def _verify_bundles(bundles: list[Path], keys: tuple[Path, ...], as_json: bool) -> None:
    from lockstep.publish import signature

    checked = []
    for bundle in bundles:
        entry = file_json(bundle)
        line = f"{bundle}: as it was packed"
        with working(f"verify {bundle}"):
            if keys:
                entry["signer"] = signature.verify(bundle, keys)
                line += f", signed by {entry['signer']}"
            else:
                signature.read_engine_statement(bundle)
        checked.append(entry)
        if not as_json:
            click.echo(line)
    if as_json:
        echo_json({"bundles": checked})
