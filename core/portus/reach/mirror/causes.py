"""Causes of obstore's errors: the class and the message of each.

obstore reports most causes as one class, ``GenericError``, with a text of many lines. That text may
repeat parts of an address or an answer. So a message has only the name of the server, its status
and its code, and, of an error that is not known here, one line without values that look like
secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

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

_CREDENTIALS: Final = {
    StoreKind.S3: "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    StoreKind.GOOGLE: "GOOGLE_APPLICATION_CREDENTIALS",
    StoreKind.AZURE: "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_LATER: Final = "Portus retries later"
_ENDPOINT: Final = "check the network{endpoint}"


class _Cause(NamedTuple):
    """kind: the class of the error. found, advice: for the message, with words in braces."""

    kind: type[TransportError] | type[UsageError] | type[MediumError] | type[MissingError]
    found: str
    advice: str


_DENIED: Final = _Cause(
    UsageError, "permission is denied", "grant the right to {right} on {bucket}"
)
_REDIRECTED: Final = _Cause(
    UsageError, "the bucket is in another region", "set AWS_REGION to its region"
)
_FAILED: Final = _Cause(TransportError, "the server failed", _LATER)

_BY_ANSWER: Final = (
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|InvalidSecurity|AuthenticationFailed"
        "|AuthenticationRequired|InvalidAuthenticationInfo|401",
        _Cause(UsageError, "the credentials are refused", "check {credentials}"),
    ),
    (
        "ExpiredToken|TokenRefreshRequired",
        _Cause(UsageError, "the credentials have expired", "renew {credentials}"),
    ),
    (
        "RequestTimeTooSkewed",
        _Cause(
            UsageError, "this machine's clock differs too much from the server's", "set the clock"
        ),
    ),
    (
        "NoSuchBucket|ContainerNotFound|ContainerBeingDeleted",
        _Cause(UsageError, "there is no such bucket", "make {bucket}, or name another"),
    ),
    (
        "PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraintException|301",
        _REDIRECTED,
    ),
    (
        "QuotaExceeded|InsufficientCapacity|XMinioStorageFull|507",
        _Cause(MediumError, "it has no space left", "raise its quota, or remove versions"),
    ),
    ("AccessDenied|AllAccessDisabled|AuthorizationPermissionMismatch|403", _DENIED),
    ("InternalError|OperationAborted|ServerTimeout", _FAILED),
    (
        "SlowDown|ServiceUnavailable|ServerBusy|RequestLimitExceeded|503",
        _Cause(TransportError, "the server is busy or unavailable", _LATER),
    ),
    (
        "RequestTimeout|IncompleteBody|408",
        _Cause(TransportError, "the server received an incomplete request", _LATER),
    ),
    (
        "NoSuchUpload",  # also for one that was completed, whose answer was lost
        _Cause(TransportError, "the server does not know this upload any more", _LATER),
    ),
    (
        "InvalidObjectState",
        _Cause(UsageError, "the object was moved to an archive", "restore it, and change the rule"),
    ),
    ("404", _Cause(MissingError, "there is no such object", "")),
    ("405", _Cause(UsageError, "the server does not support this request", _ENDPOINT)),
    ("409", _Cause(TransportError, "another request for it is in progress", _LATER)),
    ("429", _Cause(TransportError, "the server asks for fewer requests", _LATER)),
    ("501", _Cause(UsageError, "the store cannot do this", "a mirror needs conditional writes")),
)
"""Patterns for the code of an answer, or for its status."""

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
    (r"BareRedirect|without LOCATION", _REDIRECTED),
    (_STATUS.pattern.replace(r"\d{3}", r"5\d\d"), _FAILED),
    (_STATUS.pattern, _Cause(UsageError, "the server refuses the request", _ENDPOINT)),
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
    return bool(re.search(r"status(?: code)?: 416|InvalidRange|StartTooLarge", str(error)))


def translate(
    error: BaseException,
    address: StoreAddress,
    operation: str,
    name: str,
    *,
    connect_s: float,
    request_s: float,
) -> PortusError:
    """Return ``error`` of obstore as one of ours, with its cause. Nothing in it refers to
    ``error``, whose text is not to be shown. connect_s, request_s: the longest waits of the
    call."""
    text = _USER.sub("", str(error))
    code = next((found[1] or found[2] for found in _CODE.finditer(text)), "")
    status = next((found[1] for found in _STATUS.finditer(text)), "")
    # By the class of the error, for texts without a status.
    if isinstance(error, FileNotFoundError):
        kind = "404"
    else:
        kind = {"PermissionDeniedError": "403", "UnauthenticatedError": "401"}.get(
            type(error).__name__, status
        )
    # The server's code says most, then its status; the text is the last resort.
    cause = (
        (_NO_CREDENTIALS if _METADATA.search(text) else None)
        or _first(_BY_ANSWER, re.fullmatch, code)
        or _first(_BY_ANSWER, re.fullmatch, kind)
        or _first(_BY_TEXT, re.search, _NAMES.sub("", text))
        or _unknown(text)
    )
    is_s3 = address.kind is StoreKind.S3
    words = {
        "credentials": _CREDENTIALS.get(address.kind, "the credentials"),
        "bucket": address.bucket,
        "endpoint": ", and AWS_ENDPOINT_URL if it is set" if is_s3 else "",
        "right": _RIGHTS.get(operation, operation) if is_s3 else "do this",
        "connect_s": connect_s,
        "request_s": request_s,
    }
    found, advice = (each.format(**words) for each in (cause.found, cause.advice))
    said, server = " ".join(filter(None, (status, code))), _SERVER.search(text)
    found += (f" ({said})" if said else "") + (f", at {server[1]}" if server else "")
    what = f"{address}: cannot {operation} {name}".rstrip()
    is_write = cause is _DENIED and operation in _WRITES
    raised = UnwritableError if is_write else cause.kind
    return raised(f"{what}: {found}" + (f"; {advice}" if advice else ""))


def _first(
    causes: Iterable[tuple[str, _Cause]],
    match: Callable[[str, str], re.Match[str] | None],
    text: str,
) -> _Cause | None:
    return next((cause for pattern, cause in causes if match(pattern, text)), None)


def _unknown(text: str) -> _Cause:
    # One line, without queries and secrets of the environment: obstore's text may repeat a signed
    # URL or a key.
    line = re.sub(r"\?[^\s\"]*", "", text.strip().split("\n", 1)[0])  # queries may be signed
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SECRET_SIZE_MIN:
            line = line.replace(value, "...")
    line = printable(line)[:_LINE_MAX].replace("{", "{{").replace("}", "}}")
    return _Cause(TransportError, f"an unknown error, {line}", _LATER)
