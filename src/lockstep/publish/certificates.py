"""Signed statements of certificates: what an endpoint was asked, when, of which reference, and with which result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.artifacts.certificate import Certificate
from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.statement import in_toto, subjects
from lockstep.errors import CheckError, InputError
from lockstep.publish import dsse
from lockstep.publish.signature import envelope_path


def sign(path: Path, key: Path) -> Path:
    """Write the signed statement of a certificate next to it, and return its path."""
    certificate = Certificate.load(path)
    parameters = {
        name: getattr(certificate, name)
        for name in ("url", "model", "began", "requests", "evidence", "verdict", "best")
    }
    read = {"reference": certificate.reference, "hypotheses": certificate.hypotheses}
    dependencies = [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in read.items()]
    statement = in_toto({path.name: sha256_file(path)}, parameters, dependencies)
    return dsse.write_envelope(envelope_path(path), statement, key)


def verify(path: Path, keys: Sequence[Path]) -> str:
    """Check a certificate's bytes, and with keys its signed statement; return its result in words.

    Raises InputError for another file, CheckError for another signature or other bytes than were signed.
    """
    certificate = Certificate.load(path)
    words = f"{certificate.url} {certificate.model} at {certificate.began}: {certificate.verdict}"
    if not keys:
        return words
    statement, key = dsse.read_envelope(envelope_path(path), keys)
    try:
        signed = subjects(statement["subject"])
    except (LookupError, TypeError):
        raise InputError(
            f"{envelope_path(path)}: expected the statement of a certificate, found another; certify again"
        ) from None
    if signed != {path.name: sha256_file(path)}:
        raise CheckError(f"{path}: expected the certificate that was signed, found another; certify again")
    return f"{words}, signed by key {key[:12]}"
