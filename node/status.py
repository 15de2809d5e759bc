"""Error class -> gRPC status code -> HTTP status. The one table; a test checks that it is whole."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from engine import errors as engine_errors
from kvpack import errors as kvpack_errors
from kvpack.errors import KvpackError
from kvpack.store import errors as store_errors
from node import errors as node_errors
from node import fault_points
from node.migration.wire import OWNER_ADDRESS_KEY, OWNER_KEY, REASON_KEY, RETRY_AFTER_KEY
from node.records import errors as record_errors

log = logging.getLogger(__name__)

_Code = grpc.StatusCode

#: What a caller is told to wait that came while a session was being handed over.
RETRY_AFTER_MS: Final = 500

CODES: Final[Mapping[type[KvpackError], grpc.StatusCode]] = {
    KvpackError: _Code.INTERNAL,
    # What a peer or client sent.
    kvpack_errors.FieldError: _Code.INVALID_ARGUMENT,
    kvpack_errors.FormatError: _Code.INVALID_ARGUMENT,
    kvpack_errors.VersionError: _Code.INVALID_ARGUMENT,
    kvpack_errors.LimitError: _Code.INVALID_ARGUMENT,
    node_errors.UsageError: _Code.INVALID_ARGUMENT,
    node_errors.InventoryError: _Code.INVALID_ARGUMENT,
    # Whose it is.
    kvpack_errors.UnknownKeyError: _Code.PERMISSION_DENIED,
    kvpack_errors.AuthenticationError: _Code.PERMISSION_DENIED,
    node_errors.PeerRefusedError: _Code.PERMISSION_DENIED,
    node_errors.PairRefusedError: _Code.PERMISSION_DENIED,
    # What it is for.
    kvpack_errors.LayoutMismatchError: _Code.FAILED_PRECONDITION,
    kvpack_errors.IdentityMismatchError: _Code.FAILED_PRECONDITION,
    kvpack_errors.IncompleteError: _Code.FAILED_PRECONDITION,
    node_errors.ConsentError: _Code.FAILED_PRECONDITION,
    node_errors.ProtocolVersionError: _Code.FAILED_PRECONDITION,
    node_errors.ProbeError: _Code.FAILED_PRECONDITION,
    node_errors.ProducerCheckError: _Code.FAILED_PRECONDITION,
    node_errors.SessionStateError: _Code.FAILED_PRECONDITION,
    node_errors.StaleTokenError: _Code.FAILED_PRECONDITION,
    node_errors.TransferStateError: _Code.FAILED_PRECONDITION,
    node_errors.LeaseLiveError: _Code.FAILED_PRECONDITION,
    node_errors.LeaseLostError: _Code.FAILED_PRECONDITION,
    engine_errors.ChatTemplateError: _Code.INVALID_ARGUMENT,
    engine_errors.ContextLimitError: _Code.OUT_OF_RANGE,
    node_errors.ContextLengthError: _Code.OUT_OF_RANGE,
    # What is there already, or not.
    node_errors.SessionNotFoundError: _Code.NOT_FOUND,
    node_errors.SessionMovedError: _Code.NOT_FOUND,
    node_errors.PackNotFoundError: _Code.NOT_FOUND,
    node_errors.TransferNotFoundError: _Code.NOT_FOUND,
    node_errors.SessionExistsError: _Code.ALREADY_EXISTS,
    node_errors.ReplayError: _Code.ALREADY_EXISTS,
    record_errors.RecordMissingError: _Code.NOT_FOUND,
    record_errors.ConflictError: _Code.FAILED_PRECONDITION,
    record_errors.BusyError: _Code.FAILED_PRECONDITION,
    # Try again later.
    record_errors.RecordsError: _Code.UNAVAILABLE,
    record_errors.RecordsFullError: _Code.RESOURCE_EXHAUSTED,
    node_errors.NodeBusyError: _Code.RESOURCE_EXHAUSTED,
    node_errors.OverloadedError: _Code.RESOURCE_EXHAUSTED,
    node_errors.StagingBusyError: _Code.UNAVAILABLE,
    node_errors.DrainingError: _Code.UNAVAILABLE,
    node_errors.UnhealthyError: _Code.UNAVAILABLE,
    node_errors.SessionFrozenError: _Code.UNAVAILABLE,
    node_errors.FencedError: _Code.UNAVAILABLE,
    node_errors.MemoryLackingError: _Code.RESOURCE_EXHAUSTED,
    node_errors.DirectoryError: _Code.UNAVAILABLE,
    node_errors.DirectoryAmbiguousError: _Code.UNAVAILABLE,
    node_errors.DirectoryWentBackError: _Code.UNAVAILABLE,
    node_errors.JournalError: _Code.UNAVAILABLE,
    node_errors.PeerUnavailableError: _Code.UNAVAILABLE,
    # A move that ended as planned, without success.
    node_errors.TransferFailedError: _Code.ABORTED,
    node_errors.PeerAnswerError: _Code.ABORTED,
    # An answer that nobody waited for.
    node_errors.RunCancelledError: _Code.ABORTED,
    node_errors.StalledReaderError: _Code.ABORTED,
    # This node's own trouble.
    kvpack_errors.KeyFileError: _Code.INTERNAL,
    store_errors.StoreError: _Code.INTERNAL,
    store_errors.NotStoredError: _Code.NOT_FOUND,
    store_errors.ConflictError: _Code.ABORTED,
    store_errors.IntentLostError: _Code.ABORTED,
    store_errors.StoreBusyError: _Code.UNAVAILABLE,
    store_errors.StoreFullError: _Code.RESOURCE_EXHAUSTED,
    store_errors.StoreAwayError: _Code.UNAVAILABLE,
    store_errors.StoreDeniedError: _Code.FAILED_PRECONDITION,
    store_errors.StoreUnsafeError: _Code.FAILED_PRECONDITION,
    store_errors.StoreExtraError: _Code.FAILED_PRECONDITION,
    kvpack_errors.PublishError: _Code.INTERNAL,
    node_errors.NodeError: _Code.INTERNAL,
    fault_points.FaultError: _Code.INTERNAL,
    node_errors.BackendFailedError: _Code.INTERNAL,
    node_errors.ListenError: _Code.INTERNAL,
    node_errors.PairError: _Code.INTERNAL,
    node_errors.VolumeError: _Code.INTERNAL,
    node_errors.FolderInUseError: _Code.INTERNAL,
    node_errors.CredentialsError: _Code.INTERNAL,
    engine_errors.ModelFolderError: _Code.INTERNAL,
    engine_errors.UnsupportedCacheError: _Code.INTERNAL,
    engine_errors.BackendError: _Code.INTERNAL,
    engine_errors.CacheDiscontinuity: _Code.INTERNAL,
    engine_errors.RowsNotLiveError: _Code.INTERNAL,
    engine_errors.ToolCallError: _Code.INTERNAL,
    engine_errors.TornGenerationError: _Code.DATA_LOSS,
}


#: What each code is called over HTTP.
HTTP_STATUSES: Final[Mapping[grpc.StatusCode, HTTPStatus]] = {
    _Code.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    _Code.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    _Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    _Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    _Code.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    _Code.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    _Code.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    _Code.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    _Code.ABORTED: HTTPStatus.BAD_GATEWAY,
    _Code.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    _Code.DATA_LOSS: HTTPStatus.INTERNAL_SERVER_ERROR,
    _Code.UNKNOWN: HTTPStatus.INTERNAL_SERVER_ERROR,
}


def code_of(error: KvpackError) -> grpc.StatusCode:
    """The status code of ``error``: of its class, or of the nearest one above it."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    return _Code.UNKNOWN


def http_status_of(error: KvpackError) -> HTTPStatus:
    """The HTTP status of ``error``: that of its code."""
    return HTTP_STATUSES[code_of(error)]


def retry_after_s(error: KvpackError) -> float | None:
    """After how long the caller may come again, in seconds; None: that would not help."""
    if code_of(error) not in (_Code.RESOURCE_EXHAUSTED, _Code.UNAVAILABLE):
        return None
    told = getattr(error, "retry_after_s", None)
    return RETRY_AFTER_MS / 1000 if told is None else float(told)


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: KvpackError) -> NoReturn:
    """End the call with ``error``: its code, its sentence, its stable word in the trailer.

    Beside the word stand where to go instead, and after how long to come again, if that is known.
    Why a peer was refused is for this node's log alone: of that the wire carries no word.
    """
    if isinstance(error, node_errors.PeerRefusedError):
        log.warning("refused: %s", error)
        await context.abort(code_of(error), "refused")
    trailer = [(REASON_KEY, error.reason)]
    if cause := node_errors.cause_of(error):
        trailer.append((node_errors.CAUSE_KEY, cause))
    if isinstance(error, node_errors.SessionMovedError) and error.address:
        trailer += [(OWNER_KEY, error.owner), (OWNER_ADDRESS_KEY, error.address)]
    if isinstance(error, node_errors.SessionFrozenError | node_errors.NodeBusyError):
        trailer.append((RETRY_AFTER_KEY, str(RETRY_AFTER_MS)))
    context.set_trailing_metadata(tuple(trailer))
    await context.abort(code_of(error), str(error))
    raise RuntimeError("abort returned")
