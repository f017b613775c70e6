"""The login of a registry from `docker login`: `config.json` below `DOCKER_CONFIG`, else `~/.docker`.

Passwords are in the file, or come from a program `docker-credential-NAME` that the file names.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

from lockstep.errors import InputError

_TIMEOUT = 60.0  # seconds; a helper may ask its user


def basic_login(host: str) -> str | None:
    """Return user and password of a registry as the scheme Basic has them, None where nobody is logged in.

    Raises InputError for a file that is not docker's, and for a helper that cannot be started.
    """
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        config = json.loads(path.read_text())
        entries: dict[str, dict[str, str]] = config.get("auths") or {}
        # Docker's order: the helper for this registry, the general one, then the file.
        helper = (config.get("credHelpers") or {}).get(host) or config.get("credsStore")
        names = [name for name in entries if api_host(name) == api_host(host)]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: expected what `docker login` writes, found: {error}; log in again") from None
    if helper is not None:
        return _ask_helper(helper, next(iter(names), host))
    for name in names:
        if auth := entries[name].get("auth"):
            return auth
    return None


def api_host(name: str) -> str:
    """Return the host of a registry's API by a name of it, which may have a scheme and a path too."""
    host = (name.partition("://")[2] or name).partition("/")[0]
    if host in ("docker.io", "index.docker.io"):
        return "registry-1.docker.io"
    return host


def _ask_helper(helper: str, name: str) -> str | None:
    """Run docker's credential helper. It answers with JSON, and fails for a registry without a login."""
    command = [f"docker-credential-{helper}", "get"]
    try:
        process = subprocess.run(command, input=name, capture_output=True, text=True, timeout=_TIMEOUT)
        if process.returncode != 0:
            return None
        credentials = json.loads(process.stdout)
        if not credentials:
            return None
        login = f"{credentials['Username']}:{credentials['Secret']}"
    except (OSError, ValueError, LookupError, TypeError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{command[0]}: expected the login of {name}, found: {error}; run `docker login`") from None
    return base64.b64encode(login.encode()).decode()
