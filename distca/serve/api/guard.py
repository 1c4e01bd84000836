"""What stands before all routes: keys, and the size of bodies."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from distca.serve.api.errors import ApiError, error_body

_OPEN = frozenset({"/", "/health", "/metrics", "/openapi.json", "/docs"})


class Guard:
    """Lets requests through that have a key, and bodies that are not too large.

    The page, health, metrics and the description of the routes need no key.

    Args:
        app: what is guarded.
        keys: keys, of which a request needs one; none: all requests are let through.
        most_bytes: most bytes of a body.
    """

    def __init__(self, app: Any, keys: Sequence[str], most_bytes: int) -> None:
        self._app, self._most = app, most_bytes
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._keys and scope["path"] not in _OPEN and not self._has_key(headers):
            body = error_body(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                None,
                "invalid_api_key",
            )
            await JSONResponse(body, 401)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._most:
            await JSONResponse(error_body(413, self._too_large()), 413)(scope, receive, send)
            return
        read = 0

        async def bounded() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise ApiError(413, self._too_large())
            return message

        await self._app(scope, bounded, send)

    def _too_large(self) -> str:
        return f"the body has more than {self._most:,} bytes"

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # All are compared, and in constant time, so that nothing tells how much of one is right.
        right = [hmac.compare_digest(given, key) for key in self._keys]
        return any(right) and scheme.lower() == b"bearer"
