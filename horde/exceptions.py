# SPDX-License-Identifier: AGPL-3.0-or-later
"""The one family of refusals, raised where the fact is known and answered by one handler."""

from horde.return_codes import ReturnCode


class HordeError(Exception):
    """What a client is told: ``{message, rc}`` and ``extra`` with ``status``; an ``rc`` of None
    leaves the key out.

    A transaction that one is raised in leaves nothing.
    """

    status = 400

    def __init__(self, message: str, rc: ReturnCode | None, **extra: object) -> None:
        super().__init__(message)
        self.message, self.rc, self.extra = message, rc, extra


class BadRequest(HordeError):
    """400: the request as sent can never be served."""

    def __init__(
        self, message: str, rc: ReturnCode = ReturnCode.BAD_REQUEST, **extra: object
    ) -> None:
        super().__init__(message, rc, **extra)


class PayloadInvalid(BadRequest):
    """400 of a body that breaks its schema: the fixed message and ``errors``, a map from path to
    text.
    """

    def __init__(self, errors: dict[str, str]) -> None:
        super().__init__("Input payload validation failed", errors=errors)


class Unauthorized(HordeError):
    """401: no account has this key."""

    status = 401


class Forbidden(HordeError):
    """403: the caller is known and may not do this now."""

    status = 403

    def __init__(
        self, message: str, rc: ReturnCode = ReturnCode.FORBIDDEN, **extra: object
    ) -> None:
        super().__init__(message, rc, **extra)


class NotFound(HordeError):
    """404: nothing there that the caller may see."""

    status = 404


class Conflict(HordeError):
    """409: the request contradicts what is stored."""

    status = 409


class RequestTooLarge(HordeError):
    """413: a body or upload over its bound."""

    status = 413

    def __init__(
        self, message: str, rc: ReturnCode = ReturnCode.REQUEST_TOO_LARGE, **extra: object
    ) -> None:
        super().__init__(message, rc, **extra)


class Locked(HordeError):
    """423: the thing is in use and cannot be removed now."""

    status = 423


class TooManyRequests(HordeError):
    """429 of the concurrency limit; the rate limiter answers its own 429 without an ``rc``."""

    status = 429


class ServiceUnavailable(HordeError):
    """503: a part the request needs is away; trying again later may work."""

    status = 503

    def __init__(self, message: str, rc: ReturnCode | None = None, **extra: object) -> None:
        super().__init__(message, rc, **extra)
