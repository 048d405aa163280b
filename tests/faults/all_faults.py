"""Every fault of the matrix, in the order of the failure table's evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults import faults_grpc, faults_http, faults_replies

if TYPE_CHECKING:
    from tests.faults.faults import Fault


def all_faults() -> list[Fault]:
    """Every fault."""
    return [
        *faults_http.dials(),
        *faults_http.tls_dials(),
        *faults_http.ends(),
        *faults_grpc.ends(),
        *faults_http.statuses(),
        *faults_http.refusals(),
        *faults_replies.redirects(),
        *faults_replies.replies(),
        *faults_replies.uploads(),
        *faults_grpc.statuses(),
        *faults_grpc.refusals(),
        *faults_grpc.replies(),
        *faults_grpc.resets(),
        *faults_grpc.goaways(),
        *faults_grpc.uploads(),
    ]
