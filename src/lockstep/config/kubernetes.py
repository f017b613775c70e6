"""Settings of Snakemake's executor plugin for Kubernetes.

For `profiles/kubernetes`, where all pods share a folder. In: the installed package
snakemake-executor-plugin-kubernetes. Out: its settings, changed in this process.
"""

from __future__ import annotations

import functools
from typing import Any

from lockstep.errors import InputError


def share_claim() -> None:
    """Tell the plugin that pods share the run's folder, and fix its logs.

    The plugin assumes that pods share nothing, and would copy the files that rules name through a storage plugin.
    Manifests name more files than rules do (graphs, engines, weights), and these would be missing.

    Version 0.5.1 requests the log of a failed container's previous run. A job's pod has none, so Kubernetes answers
    with an error, and the whole run would end with that error instead of the job's.

    Raises InputError where the plugin is not installed.
    """
    try:
        from kubernetes.client import CoreV1Api
        from snakemake_executor_plugin_kubernetes import common_settings
    except ImportError:
        raise InputError(
            "profiles/kubernetes: expected the package snakemake-executor-plugin-kubernetes, found none; "
            "run: pip install snakemake-executor-plugin-kubernetes"
        ) from None
    common_settings.implies_no_shared_fs = False
    common_settings.job_deploy_sources = False
    common_settings.auto_deploy_default_storage_provider = False

    read = CoreV1Api.read_namespaced_pod_log

    @functools.wraps(read)
    def read_only_log(self: Any, *arguments: Any, **options: Any) -> Any:
        return read(self, *arguments, **{**options, "previous": False})

    CoreV1Api.read_namespaced_pod_log = read_only_log
