"""A repository of an OCI registry, by its HTTP API (https://github.com/opencontainers/distribution-spec).

Blobs and manifests in and out, each known by its sha256. Logins are those of docker (`logins.py`). A registry is not
trusted: its redirections must lead to HTTPS, or from plain HTTP to its own host; a login is sent to its domain alone;
and its answers are checked before use. records/libraries.md: why no library does this.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import Annotated, Any, BinaryIO, ClassVar, cast

from lockstep.artifacts.bounds import Bytes
from lockstep.artifacts.document import JsonObject, Key, ValidationError, matching
from lockstep.artifacts.files import dump_json
from lockstep.errors import CheckError, InputError
from lockstep.publish.logins import api_host, basic_login

IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX = "application/vnd.oci.image.index.v1+json"
_TIMEOUT = 60.0  # seconds without a byte
_TOKEN = re.compile(r"[\x21-\x7e]+")
_LARGEST_MANIFEST = 4 << 20  # bytes, as registries have it
_REFERENCE = re.compile(
    r"(?P<host>[a-zA-Z0-9.-]+(?::\d+)?)/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class Reference:
    """A place in a registry: `host[:port]/repository[:tag][@sha256:...]`."""

    host: str
    repository: str
    tag: str = "latest"
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        match = _REFERENCE.fullmatch(text.removeprefix("oci://"))
        if match is None:
            raise InputError(f"expected HOST/REPOSITORY[:TAG][@sha256:...], found {text!r}; correct it")
        return cls(match["host"], match["repository"], match["tag"] or "latest", match["digest"])

    def __str__(self) -> str:
        suffix = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.host}/{self.repository}{suffix}"


def sha256_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True)
class Descriptor(JsonObject):
    """A blob or manifest of a registry."""

    media_type: Annotated[str, Key("mediaType")]
    digest: Annotated[str, matching("sha256:[0-9a-f]{64}", "a digest sha256:...")]
    size: Bytes
    annotations: Mapping[str, str] = field(default_factory=dict)
    artifact_type: Annotated[str | None, Key("artifactType")] = None

    @classmethod
    def of(cls, media_type: str, data: bytes) -> Descriptor:
        return cls(media_type, sha256_digest(data), len(data))


@dataclass(frozen=True)
class Manifest(JsonObject):
    """An image manifest: an artifact's layers, and its subject: the manifest that it refers to."""

    COMPUTED: ClassVar[Mapping[str, str]] = {"mediaType": "media_type", "schemaVersion": "version"}
    media_type: ClassVar[str] = IMAGE_MANIFEST
    version: ClassVar[int] = 2  # of the schema, as OCI has it
    artifact_type: Annotated[str, Key("artifactType")]
    config: Descriptor
    layers: tuple[Descriptor, ...]
    subject: Descriptor | None = None


@dataclass(frozen=True)
class Index(JsonObject):
    """A list of manifests, such as the referrers of one."""

    COMPUTED: ClassVar[Mapping[str, str]] = Manifest.COMPUTED
    media_type: ClassVar[str] = IMAGE_INDEX
    version: ClassVar[int] = 2
    manifests: tuple[Descriptor, ...]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirection after `check` has accepted its URL."""

    def __init__(self, check: Callable[[str], None]) -> None:
        self._check = check

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self._check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Repository:
    """A repository of a registry. plain_http: without TLS, by default for this machine's own registries alone."""

    def __init__(self, reference: Reference, plain_http: bool = False) -> None:
        is_local = reference.host.partition(":")[0] in ("localhost", "127.0.0.1")
        scheme = "http" if plain_http or is_local else "https"
        self.reference = reference
        self._base = f"{scheme}://{api_host(reference.host)}"
        self._path = f"/v2/{reference.repository}"
        self._authorization: str | None = None
        self._opener = urllib.request.build_opener(_Redirects(self._check_place))

    def _check_place(self, place: str) -> None:
        """Raise InputError for a URL that the registry may not lead to."""
        try:
            scheme = urllib.parse.urlsplit(place)[0]
            host = urllib.parse.urlsplit(place).hostname
        except ValueError:
            scheme = ""
            host = None
        ours = urllib.parse.urlsplit(self._base)
        if not host or not (scheme == "https" or (scheme == ours.scheme == "http" and host == ours.hostname)):
            raise InputError(
                f"{self.reference}: expected the registry to lead to HTTPS, found {ascii(place[:120])}; refused"
            )

    def is_own_domain(self, place: str) -> bool:
        """Return whether a URL is of the registry's domain, to which its login goes: gitlab.com, auth.docker.io."""
        ours, theirs = (urllib.parse.urlsplit(url).hostname or "" for url in (self._base, place))
        # The last two numbers of an IP address are not a domain.
        is_name = not theirs.replace(".", "").isdecimal()
        return ours == theirs or (is_name and ours.split(".")[-2:] == theirs.split(".")[-2:] and "." in theirs)

    def put_blob(self, digest: str, size: int, open_content: Callable[[], BinaryIO]) -> bool:
        """Upload a blob in one piece, unless the registry has it; return whether it did not."""
        if self._call("HEAD", f"{self._path}/blobs/{digest}", accept_missing=True) is not None:
            return False
        begun = self._call("POST", f"{self._path}/blobs/uploads/", data=b"")
        assert begun is not None
        # OCI allows a path or a URL, also on another host (blob storage), and either may have parameters.
        place = begun.headers["Location"] or "/"
        if place.startswith("/"):
            place = self._base + place
        self._check_place(place)
        place += "&" if "?" in place else "?"
        place += f"digest={urllib.parse.quote(digest)}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        with open_content() as content:
            self._call("PUT", place, data=content, headers=headers)
        return True

    def open_blob(self, blob: Descriptor, name: str) -> CheckedBlob:
        """Open a blob. Reading its last byte raises CheckError where its digest is another."""
        response = self._call("GET", f"{self._path}/blobs/{blob.digest}")
        assert response is not None
        return CheckedBlob(response, blob, f"{self.reference}: {name}")

    def read_blob(self, blob: Descriptor, name: str, max_bytes: int) -> bytes:
        """Return a blob of at most `max_bytes` bytes. Raises InputError for a larger one."""
        if blob.size > max_bytes:
            raise InputError(
                f"{self.reference}: {name}: expected at most {max_bytes} bytes, found {blob.size}; refused"
            )
        with self.open_blob(blob, name) as content:
            pieces = []
            while piece := content.read(1 << 20):
                pieces.append(piece)
        return b"".join(pieces)

    def put_manifest(self, manifest: Manifest | Index, tag: str | None = None) -> tuple[Descriptor, Message]:
        """Upload a manifest below a tag, else below its digest; return its descriptor and the registry's headers."""
        data = dump_json(manifest.to_json()).encode()
        descriptor = Descriptor.of(manifest.media_type, data)
        headers = {"Content-Type": manifest.media_type}
        response = self._call("PUT", f"{self._path}/manifests/{tag or descriptor.digest}", data, headers)
        assert response is not None
        return descriptor, response.headers

    def get_manifest(self, name: str, what: str) -> tuple[Manifest, str] | None:
        """Return the manifest of a tag or digest, and its digest; None where there is none. what: it should be."""
        data = self._manifest_data(name)
        if data is None:
            return None
        # The digest is of the bytes as sent: equal JSON can be serialized differently.
        return self._parse(Manifest, data, what), sha256_digest(data)

    def get_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return the referrers of a manifest, by the API, or by the tag that registries without it use."""
        response = self._call("GET", f"{self._path}/referrers/{digest}", accept_missing=True)
        if response:
            data: bytes | None = self._read(response)
        else:  # a registry older than OCI 1.1
            data = self._manifest_data(digest.replace(":", "-"))
        if not data:
            return ()
        return self._parse(Index, data, "a list of referrers").manifests

    def _manifest_data(self, name: str) -> bytes | None:
        accept = {"Accept": f"{IMAGE_MANIFEST}, {IMAGE_INDEX}"}
        response = self._call("GET", f"{self._path}/manifests/{name}", headers=accept, accept_missing=True)
        if response is None:
            return None
        data = self._read(response)
        if name.startswith("sha256:") and sha256_digest(data) != name:
            raise CheckError(
                f"{self.reference}: expected the manifest {name}, found {sha256_digest(data)}; push it again"
            )
        return data

    def _read(self, response: HTTPResponse) -> bytes:
        try:
            data = response.read(_LARGEST_MANIFEST + 1)
        except (OSError, HTTPException) as error:
            raise InputError(f"{self.reference}: expected a manifest, found: {error}; try again") from None
        if len(data) > _LARGEST_MANIFEST:
            raise InputError(f"{self.reference}: expected a manifest of at most 4 MiB, found a larger one; refused")
        return data

    def _parse(self, kind: type[Any], data: bytes, what: str) -> Any:
        try:
            return kind.from_json(json.loads(data))
        except (ValueError, RecursionError, ValidationError) as error:
            reason = "no JSON"
            if isinstance(error, ValidationError):
                reason = str(error)
            raise InputError(f"{self.reference}: expected {what}, found another ({reason}); push it again") from None

    def _call(
        self,
        method: str,
        path: str,
        data: Any = None,
        headers: Mapping[str, str] = {},
        accept_missing: bool = False,
        is_second: bool = False,
    ) -> HTTPResponse | None:
        """Return the response; None for a 404 with `accept_missing`. Raises InputError for other errors."""
        place = urllib.parse.urljoin(self._base, path)
        try:
            request = urllib.request.Request(place, data, dict(headers), method=method)
            # A redirection to another host must not receive it.
            if self._authorization and self.is_own_domain(place):
                request.add_unredirected_header("Authorization", self._authorization)
            return cast(HTTPResponse, self._opener.open(request, timeout=_TIMEOUT))
        except urllib.error.HTTPError as error:
            if error.code == 404 and accept_missing:
                return None
            # Registries say how to log in only in a 401, and tokens expire during long uploads.
            if error.code == 401 and not is_second:
                self._authorization = self._authorize(error.headers.get("WWW-Authenticate", ""))
                return self._call(method, path, data, headers, accept_missing, is_second=True)
            remedy = "; run `docker login`" if error.code in (401, 403) else ""
            raise InputError(
                f"{self.reference}: expected the registry to accept {method}, found {error.code} {error.reason}: "
                f"{self._answer(error)}{remedy}"
            ) from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no valid URL
            reason = getattr(error, "reason", error)
            raise InputError(f"{self.reference}: expected a registry at {self._base}, found: {reason}") from None

    def _answer(self, error: urllib.error.HTTPError) -> str:
        try:
            return " ".join(error.read(500).decode(errors="replace").split())[:200]
        except (OSError, HTTPException):
            return "no more words"

    def _authorize(self, challenge: str) -> str:
        """Return the header that answers a challenge: Basic, or a token that its realm gives."""
        kind, _, fields = challenge.partition(" ")
        basic = basic_login(self.reference.host)
        if kind.lower() != "bearer":
            return f"Basic {basic}" if basic else ""
        parameters = dict(re.findall(r'(\w+)="([^"]*)"', fields))
        realm = parameters.pop("realm", "")
        self._check_place(realm)
        # A scope in the registry's challenge takes precedence.
        query = urllib.parse.urlencode({"scope": f"repository:{self.reference.repository}:pull,push"} | parameters)
        request = urllib.request.Request(f"{realm}?{query}")
        if basic and self.is_own_domain(realm):
            request.add_header("Authorization", f"Basic {basic}")
        try:
            with cast(HTTPResponse, self._opener.open(request, timeout=_TIMEOUT)) as response:
                answer = json.loads(response.read(_LARGEST_MANIFEST))
            token = answer.get("token") or answer.get("access_token")
            if not isinstance(token, str) or not _TOKEN.fullmatch(token):
                raise ValueError("no token")
        except (OSError, HTTPException, ValueError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{self.reference}: expected a token from {realm}, found: {error}; run `docker login`"
            ) from None
        return f"Bearer {token}"


class CheckedBlob:
    """The bytes of a blob, hashed as they are read. name: of the file in it, for messages."""

    def __init__(self, response: HTTPResponse, blob: Descriptor, name: str) -> None:
        self._response = response
        self._blob = blob
        self._name = name
        self._hash = hashlib.sha256()
        self._read = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none after the last one."""
        expected = f"{self._name}: expected {self._blob.size} bytes of {self._blob.digest}, found"
        try:
            data = self._response.read(size)
        except (OSError, HTTPException) as error:
            raise InputError(f"{expected} {self._read}: {error}; pull again") from None
        self._hash.update(data)
        self._read += len(data)
        # Verify before returning the last bytes, so that no reader finishes with wrong data.
        if data and self._read < self._blob.size:
            return data
        digest = f"sha256:{self._hash.hexdigest()}"
        if digest != self._blob.digest or self._read != self._blob.size:
            raise CheckError(f"{expected} {self._read} of {digest}: the registry's copy is damaged; push it again")
        return data

    def __enter__(self) -> CheckedBlob:
        return self

    def __exit__(self, *error: object) -> None:
        self._response.close()
