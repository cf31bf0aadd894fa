"""Serves the pages of runs on this machine while they train. It reads their folders and no more.

    GET /                  the runs of the folder
    GET /runs/NAME         the page of a run, which asks for its body twice a second
    GET /runs/NAME/body    what the page says now; 304 if nothing is new

The first request brings the token in its address, and gets a cookie for the others. The cookie is
lax, because the address may be opened from a terminal that is a page of another site. Other hosts'
names are refused, so that no page of another site can ask through the browser.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Awaitable, Callable
from html import escape
from pathlib import Path
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dynmo.errors import DynmoError
from dynmo.report.numbers import show_share
from dynmo.report.page import body, whole_page
from dynmo.report.run_record import RunRecord

HOSTS = ["127.0.0.1", "localhost", "[::1]"]
_FILES = ("events.jsonl", "config.toml", "costs.json", "decisions.jsonl", "trace.json")
_HEADERS = {
    "Cache-Control": "private, no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Runs:
    """The runs of a folder, or one run. Pages are made again only if a run's files have changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # matplotlib draws in one thread
        self._bodies: dict[str, tuple[str, str]] = {}
        self._records: dict[str, tuple[str, RunRecord | str]] = {}

    def folders(self) -> dict[str, Path]:
        """Returns the folder of each run by its name, the one that was written last first."""
        own = self._folder / "events.jsonl"
        logs = [own] if own.exists() else list(self._folder.glob("*/events.jsonl"))
        logs.sort(key=_written, reverse=True)
        found = [log.parent.resolve() if log == own else log.parent for log in logs]
        return {folder.name.encode(errors="replace").decode(): folder for folder in found}

    def version(self, folder: Path) -> str:
        """Returns a text that differs once a file of the run has changed."""
        return "-".join(_state(folder / name) for name in _FILES)

    def record(self, folder: Path) -> RunRecord | str:
        """Reads a run. Returns a line if it cannot be shown."""
        version, key = self.version(folder), str(folder)
        if self._records.get(key, ("",))[0] != version:
            try:
                self._records[key] = version, RunRecord.read(folder)
            except Exception as error:  # one broken folder must not hide the others
                self._records[key] = version, _told(error)
        return self._records[key][1]

    def body(self, folder: Path) -> tuple[str, str]:
        """Returns the version of a run's page, and what it says."""
        with self._lock:
            version, key = self.version(folder), str(folder)
            if self._bodies.get(key, ("",))[0] != version:
                record = self.record(folder)
                try:
                    text = body([record]) if isinstance(record, RunRecord) else _notice(record)
                except Exception as error:
                    text = _notice(_told(error))
                self._bodies[key] = version, text
            return self._bodies[key]

    def table(self) -> str:
        """Returns a row for each run."""
        with self._lock:
            rows = [self._row(name, folder) for name, folder in self.folders().items()]
        if not rows:
            return _notice(f"no runs in {self._folder}: dynmo train writes them")
        heading = "".join(
            f'<th scope="col">{each}</th>'
            for each in ("run", "state", "steps", "loss", "tokens/s", "idle")
        )
        return (
            '<section data-part="runs"><h1>Runs</h1><div class="scroll"><table><thead><tr>'
            f"{heading}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
        )

    def _row(self, name: str, folder: Path) -> str:
        link = f'<a href="/runs/{quote(name, safe="")}">{escape(name)}</a>'
        record = self.record(folder)
        if isinstance(record, str):
            return f'<tr><td>{link}</td><td colspan="5">{escape(record)}</td></tr>'
        last = record.steps[-1]
        cells = (
            record.summary.reason or "not ended",
            f"{record.summary.steps:,}",
            f"{last.loss:.4f}",
            f"{last.tokens_per_s:,.0f}",
            show_share(last.idle_ratio),
        )
        return f"<tr><td>{link}</td>{''.join(f'<td>{escape(each)}</td>' for each in cells)}</tr>"


def _state(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "0"
    return f"{found.st_size:x}.{found.st_mtime_ns:x}"


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has just been removed
        return 0.0


def _told(error: Exception) -> str:
    if isinstance(error, DynmoError):
        return str(error)
    return f"this run cannot be shown: {type(error).__name__}: {error}"


def _notice(text: str) -> str:
    return f'<section data-part="notice"><p class="verdict">{escape(text)}</p></section>'


class _Token(BaseHTTPMiddleware):
    """Lets in who brings the token in the address or in the cookie, and adds headers."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        super().__init__(app)
        self._token, self._cookie = token, cookie

    async def dispatch(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        given = request.query_params.get("token")
        known = given if given is not None else request.cookies.get(self._cookie, "")
        if not secrets.compare_digest(known.encode(), self._token.encode()):
            text = "wrong token: open the address that dynmo dashboard has printed"
            response: Response = PlainTextResponse(text, 403)
        elif given is not None:
            response = RedirectResponse(request.url.remove_query_params("token").path, 303)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
        else:
            response = await call_next(request)
        response.headers.update(_HEADERS)
        return response


def application(folder: Path, token: str, port: int = 0) -> Starlette:
    """Returns the dashboard of a run, or of a folder of runs.

    Args:
        folder: The folder. It may still be empty.
        token: What the first request must bring.
        port: The port that it is served on, for the name of the cookie.
    """
    runs = Runs(folder)

    def live(title: str, version: str, text: str, request: Request) -> Response:
        """Returns a page, or its body alone if that is asked for."""
        tag = f'"{version}"'
        if not request.url.path.endswith("/body"):
            return HTMLResponse(whole_page(title, text, live=True))
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return HTMLResponse(text, headers={"ETag": tag})

    def index(request: Request) -> Response:  # a thread of starlette's pool, as it is not async
        seen = {name: runs.version(folder) for name, folder in runs.folders().items()}
        version = hashlib.sha256(repr(seen).encode()).hexdigest()
        return live("runs", version, runs.table(), request)

    def one(request: Request) -> Response:
        name = request.path_params["name"]
        known = runs.folders().get(name)
        if known is None:
            return PlainTextResponse("there is no such run", 404)
        return live(name, *runs.body(known), request)

    routes = [
        Route(path, view, methods=["GET"])
        for path, view in (
            ("/", index),
            ("/body", index),
            ("/runs/{name}", one),
            ("/runs/{name}/body", one),
        )
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        Middleware(_Token, token=token, cookie=f"dynmo-{port}"),
    ]
    return Starlette(routes=routes, middleware=middleware)
