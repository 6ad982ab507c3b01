"""Causes of obstore's errors: the class and the message of each.

obstore reports most causes as one class, ``GenericError``, with a text of many lines. That text may
repeat parts of an address or an answer. So a message has only the name of the server, its status
and its code, and, of an error that is not known here, one line without values that look like
secrets.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from portus.errors import MediumError, PortusError, TransportError, UsageError, printable
from portus.reach.mirror.address import StoreAddress, StoreKind
from portus.reach.mirror.store import MissingError, UnwritableError

_STATUS: Final = re.compile(r"status(?: code)?: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w{1,80})</Code>|\(code: (\w{1,80})\)")
_SERVER: Final = re.compile(r"https?://([^/\s\"'?@]{1,200})")
_USER: Final = re.compile(r"(?<=//)[^/\s\"'?]*@")
"""Matches in a URL: a user and a password. ``AWS_ENDPOINT_URL`` may have them."""

_LINE_MAX: Final = 200
_SECRET_NAME: Final = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|SAS|AUTH", re.I)
_SECRET_SIZE_MIN: Final = 6


@dataclass(frozen=True, slots=True)
class FailedCall:
    """The call that failed. connect_s, request_s: the longest waits of the call."""

    address: StoreAddress
    operation: str
    name: str
    connect_s: float
    request_s: float


@dataclass(frozen=True, slots=True)
class _Cause:
    """kind: the class of the error. found, advice: for the message, ``_words`` in braces."""

    kind: type[TransportError] | type[UsageError] | type[MediumError] | type[MissingError]
    found: str
    advice: str


_CREDENTIALS: Final = {
    StoreKind.S3: "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    StoreKind.GOOGLE: "GOOGLE_APPLICATION_CREDENTIALS",
    StoreKind.AZURE: "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_LATER: Final = "Portus retries later"
_ENDPOINT: Final = "check the network{endpoint}"

_DENIED: Final = _Cause(
    UsageError, "permission is denied", "grant the right to {right} on {bucket}"
)
_BY_CODE: Final = {
    **dict.fromkeys(
        (
            *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity"),
            *("AuthenticationFailed", "AuthenticationRequired", "InvalidAuthenticationInfo"),
        ),
        _Cause(UsageError, "the credentials are refused", "check {credentials}"),
    ),
    **dict.fromkeys(
        ("ExpiredToken", "TokenRefreshRequired"),
        _Cause(UsageError, "the credentials have expired", "renew {credentials}"),
    ),
    "RequestTimeTooSkewed": _Cause(
        UsageError, "this machine's clock differs too much from the server's", "set the clock"
    ),
    **dict.fromkeys(
        ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"),
        _Cause(UsageError, "there is no such bucket", "make {bucket}, or name another"),
    ),
    **dict.fromkeys(
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
        _Cause(UsageError, "the bucket is in another region", "set AWS_REGION to its region"),
    ),
    **dict.fromkeys(
        ("QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull"),
        _Cause(MediumError, "it has no space left", "raise its quota, or remove versions"),
    ),
    **dict.fromkeys(
        ("AccessDenied", "AllAccessDisabled", "AuthorizationPermissionMismatch"), _DENIED
    ),
    **dict.fromkeys(
        ("InternalError", "OperationAborted", "ServerTimeout"),
        _Cause(TransportError, "the server failed", _LATER),
    ),
    **dict.fromkeys(
        ("SlowDown", "ServiceUnavailable", "ServerBusy", "RequestLimitExceeded"),
        _Cause(TransportError, "the server is busy or unavailable", _LATER),
    ),
    **dict.fromkeys(
        ("RequestTimeout", "IncompleteBody"),
        _Cause(TransportError, "the server received an incomplete request", _LATER),
    ),
    "NoSuchUpload": _Cause(  # also for one that was completed, whose answer was lost
        TransportError, "the server does not know this upload any more", _LATER
    ),
    "InvalidObjectState": _Cause(
        UsageError, "the object was moved to an archive", "restore it, and change the rule"
    ),
}
_BY_STATUS: Final = {
    401: _BY_CODE["InvalidAccessKeyId"],
    403: _DENIED,
    301: _BY_CODE["PermanentRedirect"],
    404: _Cause(MissingError, "there is no such object", ""),
    405: _Cause(UsageError, "the server does not support this request", _ENDPOINT),
    408: _BY_CODE["RequestTimeout"],
    409: _Cause(TransportError, "another request for it is in progress", _LATER),
    429: _Cause(TransportError, "the server asks for fewer requests", _LATER),
    501: _Cause(UsageError, "the store cannot do this", "a mirror needs conditional writes"),
    503: _BY_CODE["SlowDown"],
    507: _BY_CODE["QuotaExceeded"],
}
_METADATA: Final = re.compile(
    r"https?://(?:169\.254\.|metadata\.google\.internal|[^/\s]+/latest/api/token)"
)
"""Addresses where machines of clouds find credentials: asked if the environment has none."""

_NO_CREDENTIALS: Final = _Cause(UsageError, "no credentials were found", "set {credentials}")
_NAMES: Final = re.compile(r"https?://\S+|path: \"[^\"]*\"|(?:path|location|key) \S+")
"""Matches the parts of an error that repeat the call: Portus made these."""

_BY_TEXT: Final = (
    (
        r"Missing(?: )?(?:AccessKeyId|SecretAccessKey)|Account must be specified",
        _Cause(UsageError, "the credentials are incomplete", "set {credentials}"),
    ),
    (
        r"URL scheme is not allowed|BadScheme",
        _Cause(
            UsageError,
            "an http:// address, and only https:// is allowed",
            "use https://, or set AWS_ALLOW_HTTP=true",
        ),
    ),
    (
        r"InvalidContentType|corrupt message|NotTls",
        _Cause(UsageError, "the server does not use TLS", "use http://, or its port for https"),
    ),
    (
        r"(?i)certificate|UnknownIssuer|tls handshake|HandshakeFailure|AlertReceived",
        _Cause(
            UsageError,
            "TLS: the server's certificate is not trusted",
            "add its authority to the system's certificates (SSL_CERT_FILE), or check the address",
        ),
    ),
    (
        r"(?i)dns error|failed to lookup address|name or service not known",
        _Cause(TransportError, "its name cannot be resolved (DNS)", _ENDPOINT),
    ),
    (
        r"ConnectionRefused|(?i:connection refused)",
        _Cause(TransportError, "the connection is refused: nothing listens there", _ENDPOINT),
    ),
    (
        r"Connect,\s+TimedOut",
        _Cause(TransportError, "no connection within {connect_s:g} s", _ENDPOINT),
    ),
    (
        r"(?i)timed ?out|kind: Timeout",
        _Cause(TransportError, "no answer within {request_s:g} s", _LATER),
    ),
    (
        r"(?i)connection ?(?:reset|aborted|closed|error)|broken ?pipe|incomplete ?(?:message|body)"
        r"|unexpected ?eof|response body|body ?write",
        _Cause(TransportError, "the connection was cut", _LATER),
    ),
    (
        r"(?i)unreachable|error sending request|tcp connect error|kind: Connect",
        _Cause(TransportError, "it cannot be reached", _ENDPOINT),
    ),
    (r"BareRedirect|without LOCATION", _BY_CODE["PermanentRedirect"]),
)
_WRITES: Final = ("put", "create", "copy")
_RIGHTS: Final = {
    "put": "s3:PutObject",
    "create": "s3:PutObject",
    "get": "s3:GetObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}


def is_beyond_the_end(error: BaseException) -> bool:
    """Return whether the error is of a range that begins behind the end of the object."""
    text = str(error)
    return _status(text) == 416 or "InvalidRange" in text or "StartTooLarge" in text


def translate(error: BaseException, failed: FailedCall) -> PortusError:
    """Return ``error`` of obstore as one of ours, with its cause. Nothing in it refers to
    ``error``, whose text is not to be shown."""
    text = _USER.sub("", str(error))
    code, status = _code(text), _status(text)
    # The server's code says most, then its status; the text is the last resort.
    cause = (
        (_NO_CREDENTIALS if _METADATA.search(text) else None)
        or _BY_CODE.get(code)
        or _BY_STATUS.get(_status_of(error) or status or 0)
        or _by_text(_NAMES.sub("", text))
        or _server_error(status)
        or _unknown(text)
    )
    said = " ".join(str(each) for each in (status, code) if each)
    server = _SERVER.search(text)
    what = f"{failed.address}: cannot {failed.operation} {failed.name}".rstrip()
    found, advice = (each.format(**_words(failed)) for each in (cause.found, cause.advice))
    found += (f" ({said})" if said else "") + (f", at {server[1]}" if server else "")
    is_write = cause is _DENIED and failed.operation in _WRITES
    kind = UnwritableError if is_write else cause.kind
    return kind(f"{what}: {found}" + (f"; {advice}" if advice else ""))


def _words(failed: FailedCall) -> dict[str, object]:
    """Return the words for the braces of a cause."""
    kind = failed.address.kind
    return {
        "credentials": _CREDENTIALS.get(kind, "the credentials"),
        "bucket": failed.address.bucket,
        "endpoint": ", and AWS_ENDPOINT_URL if it is set" if kind is StoreKind.S3 else "",
        "right": _RIGHTS.get(failed.operation, failed.operation)
        if kind is StoreKind.S3
        else "do this",
        "connect_s": failed.connect_s,
        "request_s": failed.request_s,
    }


def _status(text: str) -> int | None:
    found = _STATUS.search(text)
    return int(found[1]) if found else None


def _code(text: str) -> str:
    found = _CODE.search(text)
    return (found[1] or found[2]) if found else ""


def _status_of(error: BaseException) -> int | None:
    """Return the status by the class of an error of obstore, for texts without a status."""
    if isinstance(error, FileNotFoundError):
        return 404
    return {"PermissionDeniedError": 403, "UnauthenticatedError": 401}.get(type(error).__name__)


def _by_text(text: str) -> _Cause | None:
    return next((cause for pattern, cause in _BY_TEXT if re.search(pattern, text)), None)


def _server_error(status: int | None) -> _Cause | None:
    if status is None:
        return None
    if status >= 500:
        return _Cause(TransportError, "the server failed", _LATER)
    return _Cause(UsageError, "the server refuses the request", _ENDPOINT)


def _unknown(text: str) -> _Cause:
    # One line, without queries and secrets of the environment: obstore's text may repeat a signed
    # URL or a key.
    line = re.sub(r"\?[^\s\"]*", "", text.strip().split("\n", 1)[0])  # queries may be signed
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SECRET_SIZE_MIN:
            line = line.replace(value, "...")
    line = printable(line)[:_LINE_MAX].replace("{", "{{").replace("}", "}}")
    return _Cause(TransportError, f"an unknown error, {line}", _LATER)
