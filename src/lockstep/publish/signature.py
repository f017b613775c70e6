"""Signatures of bundles, by OpenSSF Model Signing (https://github.com/sigstore/model-transparency).

`BUNDLE.sig` is a bundle's signature by a key, which `model_signing verify key` reads too. `BUNDLE.statement.json` is
the statement of its engines, signed.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from lockstep.bundle.archive import check_contents, read_archive
from lockstep.errors import CheckError, InputError
from lockstep.publish import dsse

_STATEMENT = "engines/engines.statement.json"


def signature_path(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.name}.sig")


def envelope_path(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.name}.statement.json")


def sign(bundle: Path, key: Path) -> list[Path]:
    """Sign a bundle and the statement of its engines with a private key, and return the two signed files."""
    from model_signing.signing import Config

    dsse.private_key(key)  # for its messages: the library shows a traceback
    Config().use_elliptic_key_signer(private_key=key).sign(bundle, signature_path(bundle))
    return [signature_path(bundle), dsse.write_envelope(envelope_path(bundle), read_engine_statement(bundle), key)]


def read_engine_statement(bundle: Path) -> dict[str, Any]:
    """Return the statement of a bundle's engines. Raises InputError for a file that is not of its digest."""
    archive = read_archive(bundle)
    check_contents(archive)
    if _STATEMENT not in archive.members:
        raise InputError(f"{bundle}: expected {_STATEMENT}, found none; make the bundle again")
    with tarfile.open(bundle) as tar, cast(IO[bytes], tar.extractfile(_STATEMENT)) as file:
        return json.load(file)


def verify(bundle: Path, keys: Sequence[Path]) -> str:
    """Check a bundle's bytes, its signature, and the signed statement; return in words who signed it.

    keys: public keys, one of which must have signed. Raises InputError and CheckError.
    """
    statement = read_engine_statement(bundle)
    signature = signature_path(bundle)
    if not signature.is_file():
        raise InputError(
            f"{signature}: expected the signature of {bundle.name}, found none; sign with `lockstep bundle --sign-key`"
        )
    signer = _signer(bundle, signature, keys)
    if envelope_path(bundle).is_file():
        signed, _ = dsse.read_envelope(envelope_path(bundle), [signer])
        if signed != statement:
            raise CheckError(
                f"{envelope_path(bundle)}: expected the statement that is in {bundle.name}, found another; sign again"
            )
    return f"key {dsse.key_id(dsse.public_key(signer))[:12]} ({signer})"


def _signer(bundle: Path, signature: Path, keys: Sequence[Path]) -> Path:
    from cryptography.exceptions import InvalidSignature
    from model_signing.verifying import Config

    reason = ""
    for key in keys:
        dsse.public_key(key)  # for its messages, as above
        try:
            Config().use_elliptic_key_verifier(public_key=key).verify(bundle, signature)
            return key
        except InvalidSignature:
            reason = "a signature that was changed"
        # What the library raises for a file that is not a signature.
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = "no Sigstore bundle"
            if str(error):
                reason = str(error).splitlines()[0]
    raise CheckError(
        f"{signature}: expected the signature of {bundle.name} by {', '.join(map(str, keys))}, found: {reason}"
    )
