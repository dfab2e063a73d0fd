"""`sharpscope view RUN --live`: the page of a run while it is written, served on this machine only and read-only.

The address has a random port and a random word, without which nothing is served; names of other hosts are refused, so that no
page of the web can read it through the browser. The page asks for its version and takes over the parts that have changed.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from sharpscope.analysis.output import report_html
from sharpscope.analysis.report import page_of
from sharpscope.analysis.study import quiet
from sharpscope.errors import UserError
from sharpscope.traces import RUN_FILE, has_writer, load_runs

LOOPBACK = "127.0.0.1"


@dataclass
class LivePage:
    """The page of the runs below some folders, made again when their files have changed.

    Attributes:
        paths: run folders, or folders of runs.
        html: the page as of `version`.
    """

    paths: list[Path]
    html: str = ""
    version: str = ""
    _lock: Lock = field(default_factory=Lock)

    def current(self) -> str:
        """The version of the files, whose page is `html` afterwards: a hash of names, sizes and times, and of who writes.

        Files that vanish, or that can no longer be read, leave the last page as it is. A run that does not exist yet is left out.
        """
        with self._lock, quiet(), suppress(OSError, UserError):
            files = sorted(file for path in self.paths for file in path.rglob("*") if _counts(file))
            facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            # a process that was killed changes no file
            written = [has_writer(file.parent) for file in files if file.name == RUN_FILE]
            version = hashlib.sha256(repr((facts, written)).encode()).hexdigest()[:16]
            if files and version != self.version:
                runs = load_runs([path for path in self.paths if path.exists()])
                page = page_of(runs, ", ".join(map(str, self.paths)))
                self.html = report_html(page, {}, live=True)
                self.version = version
        return self.version


def _counts(file: Path) -> bool:
    """Whether a file is part of a run's record; one that is being written has a name that begins with a dot."""
    return (file.suffix == ".parquet" or file.name == "run.json") and not file.name.startswith(".")


def server_of(paths: list[Path]) -> tuple[ThreadingHTTPServer, str]:
    """A server of the live page of the runs below `paths`, not yet running, and its address."""
    page, word = LivePage(paths), secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        """Answers GET of the page and of its version, and nothing else."""

        def do_GET(self) -> None:
            """The page at /WORD/, its version at /WORD/version."""
            port = server.server_port
            if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif secrets.compare_digest(self.path.encode(), f"/{word}/".encode()):
                page.current()
                self._answer(page.html, "text/html")
            elif secrets.compare_digest(self.path.encode(), f"/{word}/version".encode()):
                self._answer(page.current(), "text/plain")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _answer(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(HTTPStatus.OK)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Print no request: each contains the word that opens the page."""
            return

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    server.daemon_threads = True
    return server, f"http://{LOOPBACK}:{server.server_port}/{word}/"


def wait_for_runs(
    paths: list[Path],
    on_wait: Callable[[str], object],
    *,
    every: float = 2.0,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when a run is below one of `paths`; `on_wait` is told if there is none yet, then it looks every `every` seconds."""
    if any(_has_run(path) for path in paths):
        return
    on_wait(f"waiting for a run below {', '.join(map(str, paths))}; Ctrl-C ends it")
    while not any(_has_run(path) for path in paths):
        sleep(every)


def _has_run(path: Path) -> bool:
    """Whether `load_runs` finds a run below `path`."""
    with quiet(), suppress(UserError):
        return len(load_runs(path)) > 0
    return False


def serve(paths: list[Path], on_ready: Callable[[str], object]) -> None:
    """Serve the live page until interrupted; `on_ready` is called with its address."""
    server, address = server_of(paths)
    on_ready(address)
    with server:
        server.serve_forever(poll_interval=0.5)
