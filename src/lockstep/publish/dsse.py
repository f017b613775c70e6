"""Signed statements: an in-toto statement in a DSSE envelope (https://github.com/secure-systems-lab/dsse).

Keys are elliptic-curve keys in PEM, as those of OpenSSF Model Signing: P-256, P-384 or P-521.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.files import dump_json, write_bytes
from lockstep.errors import CheckError, InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import Key, SSlibKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAKE = "make one with `openssl ecparam -name prime256v1 -genkey -noout -out signer.key`"
_MAKE_PUBLIC = "make it with `openssl ec -in signer.key -pubout -out signer.pub`"


def private_key(path: Path) -> EllipticCurvePrivateKey:
    """Read a private key. Raises InputError for another file, or an encrypted key."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return _key(path, lambda data: load_pem_private_key(data, None), "a private key in PEM without a password", _MAKE)


def public_key(path: Path) -> EllipticCurvePublicKey:
    """Read a public key. Raises InputError for another file."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    return _key(path, load_pem_public_key, "a public key in PEM", _MAKE_PUBLIC)


def _key(path: Path, load: Callable[[bytes], Any], what: str, remedy: str) -> Any:
    try:
        key = load(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{path}: expected {what}, found no file; {remedy}") from None
    except (ValueError, TypeError):  # TypeError: the key is encrypted
        raise InputError(f"{path}: expected {what}, found something else; {remedy}") from None
    if getattr(getattr(key, "curve", None), "name", None) not in _CURVES:
        raise InputError(f"{path}: expected a key on {', '.join(_CURVES)}, found another; {remedy}")
    return key


def key_id(key: EllipticCurvePublicKey) -> str:
    """Return the hex sha256 of a public key in PEM: the hint of Model Signing's signatures."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _with_id(key: EllipticCurvePublicKey) -> SSlibKey:
    from securesystemslib.signer import SSlibKey

    return SSlibKey.from_crypto(key, key_id(key))


def write_envelope(path: Path, statement: Mapping[str, Any], key: Path) -> Path:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    signer = private_key(key)
    envelope = Envelope(dump_json(statement).encode(), PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(signer, _with_id(signer.public_key())))
    write_bytes(path, dump_json(envelope.to_dict()).encode())
    return path


def read_envelope(path: Path, keys: Sequence[Path]) -> tuple[dict[str, Any], str]:
    """Return an envelope's statement and the id of the key that signed it. Raises CheckError if none of `keys` did."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import FormatError

    public_keys: list[Key] = [_with_id(public_key(key)) for key in keys]
    try:
        data = json.loads(path.read_bytes())
        # A key's id is only a hint, which other tools leave out or compute otherwise: try all keys on all signatures.
        signatures = [{**entry, "keyid": str(number)} for number, entry in enumerate(data["signatures"])]
        envelope = Envelope.from_dict({**data, "signatures": signatures})
        signers = [key.keyid for key in public_keys if _has_signed(key, envelope)]
        statement = json.loads(envelope.payload)
    except FileNotFoundError:
        raise InputError(f"{path}: expected a signed statement, found no file") from None
    # Everything that malformed JSON can raise, here and in the library.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, FormatError):
        envelope = None
    if envelope is None or envelope.payload_type != PAYLOAD_TYPE:
        raise InputError(
            f"{path}: expected a DSSE envelope of an in-toto statement, found something else; copy it again"
        )
    if not signers:
        names = ", ".join(map(str, keys))
        raise CheckError(
            f"{path}: expected a signature by {names}, found none: it is another's, or the file was changed"
        )
    return statement, signers[0]


def _has_signed(key: Key, envelope: Envelope) -> bool:
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import Signature

    for signature in envelope.signatures.values():
        try:
            key.verify_signature(Signature(key.keyid, signature.signature), envelope.pae())
        except UnverifiedSignatureError:
            continue
        return True
    return False
