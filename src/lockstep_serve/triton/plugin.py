"""The plug-in that `lockstep serve` finds by an entry point: see `lockstep_serve.protocols`."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import PATH
from lockstep_serve.protocols import OpenProtocol, ProtocolPlugin

if TYPE_CHECKING:
    from lockstep_serve.bodies import Access
    from lockstep_serve.service import Service


class TritonPlugin(ProtocolPlugin):
    """Triton's protocols: over HTTP always, over gRPC at a port that an option gives."""

    title = "Triton's protocols"
    options = (
        click.Option(
            ["--grpc-port"], type=click.IntRange(0, 65535), help="Serve Triton's gRPC too; 0: any.  [default: none]"
        ),
        click.Option(
            ["--fold-token-ids"],
            is_flag=True,
            help="Triton's API: take token ids modulo the vocabulary's size, for benchmarks that send random ones.",
        ),
        click.Option(
            ["--triton-repository"],
            type=PATH,
            help="A repository that `lockstep triton` wrote: its options are used instead of those here.",
        ),
    )

    def prepare(self, options: SimpleNamespace) -> None:
        if options.grpc_port is not None:
            # gRPC writes to stderr, at its import and when the engine is forked.
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")
            os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
            import lockstep_serve.triton.grpc_server  # noqa: F401  # before the engine starts: it may not be installed

        if options.triton_repository is not None:
            from lockstep_serve.triton.repository.options import serve_options

            vars(options).update(serve_options(options.triton_repository))

    def open(self, options: SimpleNamespace, service: Service, access: Access) -> OpenProtocol:
        from lockstep_serve.triton.generate import generate_endpoints
        from lockstep_serve.triton.infer import Triton
        from lockstep_serve.triton.kserve import kserve_endpoints, triton_error

        triton = Triton(service, options.fold_token_ids)
        listener = None
        if options.grpc_port is not None:
            from lockstep_serve.triton.grpc_server import GrpcServer  # needs a package that HTTP does not

            listener = GrpcServer(triton, access, options.host, options.grpc_port)
        endpoints = kserve_endpoints(triton, access) + generate_endpoints(triton, access)
        return OpenProtocol("/v2", endpoints, triton_error, listener)


PLUGIN = TritonPlugin()
