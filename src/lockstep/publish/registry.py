"""A repository of an OCI registry, by its HTTP API (https://github.com/opencontainers/distribution-spec).

Blobs and manifests in and out, each known by its sha256. Logins are those of docker (`logins.py`). A registry is not
trusted: what it leads to is HTTPS, or where it is spoken to by HTTP itself its own host; a login goes to its domain
alone; and what it answers is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import Any, BinaryIO, cast

from lockstep.errors import CheckError, InputError
from lockstep.publish.logins import api_host, basic_login

IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX = "application/vnd.oci.image.index.v1+json"
_TIMEOUT = 60.0  # seconds without a byte
_TOKEN = re.compile(r"[\x21-\x7e]+")
_LARGEST_MANIFEST = 4 << 20  # bytes, as registries have it
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REFERENCE = re.compile(
    r"(?P<host>[a-zA-Z0-9.-]+(?::\d+)?)/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class Reference:
    """Where something lies in a registry: `host[:port]/repository[:tag][@sha256:...]`."""

    host: str
    repository: str
    tag: str = "latest"
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        found = _REFERENCE.fullmatch(text.removeprefix("oci://"))
        if found is None:
            raise InputError(f"expected HOST/REPOSITORY[:TAG][@sha256:...], found {text!r}; correct it")
        return cls(found["host"], found["repository"], found["tag"] or "latest", found["digest"])

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


def sha256_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows what `Repository` may follow."""

    def __init__(self, check: Callable[[str], None]) -> None:
        self._check = check

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self._check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Repository:
    """A repository of a registry. plain_http: without TLS, by default on this machine alone."""

    def __init__(self, reference: Reference, plain_http: bool = False) -> None:
        is_local = reference.host.partition(":")[0] in ("localhost", "127.0.0.1")
        self.reference = reference
        self._base = f"{'http' if plain_http or is_local else 'https'}://{api_host(reference.host)}"
        self._path = f"/v2/{reference.repository}"
        self._authorization: str | None = None
        self._opener = urllib.request.OpenerDirector()  # the default one opens files and FTP too
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _Redirects(self._check_place),
        ):
            self._opener.add_handler(handler)

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

    def _is_own(self, place: str) -> bool:
        """Return whether a URL is of the registry's domain, to which its login goes: gitlab.com, auth.docker.io."""
        ours, theirs = (urllib.parse.urlsplit(url).hostname or "" for url in (self._base, place))
        is_name = not theirs.replace(".", "").isdecimal()
        return ours == theirs or (is_name and ours.split(".")[-2:] == theirs.split(".")[-2:] and "." in theirs)

    def has_blob(self, digest: str) -> bool:
        return self._call("HEAD", f"{self._path}/blobs/{digest}", accept_missing=True) is not None

    def put_blob(self, digest: str, size: int, content: BinaryIO) -> None:
        """Upload a blob of `size` bytes in one piece."""
        begun = self._call("POST", f"{self._path}/blobs/uploads/", data=b"")
        assert begun is not None
        place = begun.headers["Location"] or "/"
        place = self._base + place if place.startswith("/") else place
        self._check_place(place)
        place += f"{'&' if '?' in place else '?'}digest={urllib.parse.quote(digest)}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        self._call("PUT", place, data=content, headers=headers)

    def open_blob(self, digest: str, size: int, name: str) -> CheckedBlob:
        """Open a blob; where its last byte was read and it is not of its digest, that raises CheckError."""
        response = self._call("GET", f"{self._path}/blobs/{digest}")
        assert response is not None
        return CheckedBlob(response, digest, size, f"{self.reference}: {name}")

    def put_manifest(self, data: bytes, media_type: str, tag: str | None = None) -> Message:
        """Upload a manifest below a tag, else below its digest; return the registry's headers."""
        name = tag or sha256_digest(data)
        response = self._call("PUT", f"{self._path}/manifests/{name}", data=data, headers={"Content-Type": media_type})
        assert response is not None
        return response.headers

    def get_manifest(self, name: str) -> bytes | None:
        """Return the manifest or index of a tag or digest; None where there is none."""
        accept = {"Accept": f"{IMAGE_MANIFEST}, {IMAGE_INDEX}"}
        response = self._call("GET", f"{self._path}/manifests/{name}", headers=accept, accept_missing=True)
        if response is None:
            return None
        data = self._read(response)
        if len(data) > _LARGEST_MANIFEST:
            raise InputError(f"{self.reference}: expected a manifest of at most 4 MiB, found a larger one")
        if name.startswith("sha256:") and sha256_digest(data) != name:
            raise CheckError(
                f"{self.reference}: expected the manifest {name}, found {sha256_digest(data)}; push it again"
            )
        return data

    def get_referrers(self, digest: str) -> list[dict[str, Any]]:
        """Return the descriptors of what refers to a manifest, by the API or by the tag that stands in for it."""
        response = self._call("GET", f"{self._path}/referrers/{digest}", accept_missing=True)
        data = self._read(response) if response else self.get_manifest(digest.replace(":", "-"))
        if not data:
            return []
        try:
            found = json.loads(data)["manifests"]
            if all(is_digest(entry["digest"]) for entry in found):
                return list(found)
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        raise InputError(f"{self.reference}: expected a list of referrers, found other data; ask who runs the registry")

    def _read(self, response: HTTPResponse) -> bytes:
        """Return what a manifest's response holds, up to a byte more than it may."""
        try:
            return response.read(_LARGEST_MANIFEST + 1)
        except (OSError, HTTPException) as error:
            raise InputError(f"{self.reference}: expected a manifest, found: {error}; try again") from None

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
            if self._authorization and self._is_own(place):  # a redirection to another host must not have it
                request.add_unredirected_header("Authorization", self._authorization)
            return cast(HTTPResponse, self._opener.open(request, timeout=_TIMEOUT))
        except urllib.error.HTTPError as error:
            if error.code == 404 and accept_missing:
                return None
            if error.code == 401 and not is_second:
                self._authorization = self._authorize(error.headers.get("WWW-Authenticate", ""))
                return self._call(method, path, data, headers, accept_missing, is_second=True)
            said = self._said(error)
            raise InputError(
                f"{self.reference}: expected the registry to accept {method}, found {error.code} {error.reason}: {said}"
                + ("; run `docker login`" if error.code in (401, 403) else "")
            ) from None
        except (OSError, HTTPException, ValueError) as error:  # the last of a URL
            reason = getattr(error, "reason", error)
            raise InputError(f"{self.reference}: expected a registry at {self._base}, found: {reason}") from None

    def _said(self, error: urllib.error.HTTPError) -> str:
        try:
            return " ".join(error.read(500).decode(errors="replace").split())[:200]
        except (OSError, HTTPException):
            return "no more words"

    def _authorize(self, challenge: str) -> str:
        """Return the header that answers a challenge: Basic, or a token that its realm gives."""
        kind, _, rest = challenge.partition(" ")
        basic = basic_login(self.reference.host)
        if kind.lower() != "bearer":
            return f"Basic {basic}" if basic else ""
        asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = asked.pop("realm", "")
        self._check_place(realm)
        basic = basic if self._is_own(realm) else None
        scope = f"repository:{self.reference.repository}:pull,push"
        query = urllib.parse.urlencode({**asked, "scope": asked.get("scope", scope)})
        request = urllib.request.Request(
            f"{realm}?{query}", headers={"Authorization": f"Basic {basic}"} if basic else {}
        )
        try:
            with cast(HTTPResponse, self._opener.open(request, timeout=_TIMEOUT)) as response:
                answer = json.loads(response.read(_LARGEST_MANIFEST))
            token = answer.get("token") or answer.get("access_token")
            if not isinstance(token, str) or not _TOKEN.fullmatch(token):
                raise ValueError("no token")
        except (OSError, HTTPException, ValueError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{self.reference}: expected a token of {realm}, found: {error}; run `docker login`"
            ) from None
        return f"Bearer {token}"


class CheckedBlob:
    """The bytes of a blob, hashed as they are read. name: of the file in it, for messages."""

    def __init__(self, response: HTTPResponse, digest: str, size: int, name: str) -> None:
        self._response = response
        self._expected = digest
        self._size = size
        self._name = name
        self._hash = hashlib.sha256()
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._response.read(size if size >= 0 else None)
        except (OSError, HTTPException) as error:
            raise InputError(
                f"{self._name}: expected {self._size} bytes, found {self._read}: {error}; pull again"
            ) from None
        self._hash.update(data)
        self._read += len(data)
        is_over = size < 0 or not data or self._read >= self._size
        found = f"sha256:{self._hash.hexdigest()}" if is_over else self._expected
        if found != self._expected or (is_over and self._read != self._size):
            raise CheckError(
                f"{self._name}: expected {self._size} bytes of {self._expected}, found {self._read} of {found}: the "
                "registry's copy is damaged; push it again"
            )
        return data

    def __enter__(self) -> CheckedBlob:
        return self

    def __exit__(self, *error: object) -> None:
        self._response.close()
