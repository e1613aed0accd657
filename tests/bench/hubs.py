"""A server on this machine that answers as the hub does."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"


class Hub(ThreadingHTTPServer):
    """A hub with the repositories of data sets and models below `root`.

    Every revision is the same commit.
    """

    daemon_threads = True

    def __init__(self, root):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.root = root
        #: what was asked for, in order
        self.requests = []
        #: a status that every answer has instead
        self.down = None
        #: repositories that are gone from a request for /begin/NAME on, by that name
        self.leaves = {}
        self.gone = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format, *args):  # noqa: A002
        """Keep the test's output clean."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if self.server.down:
            return self._say(self.server.down, b"{}")
        kind, repository, rest = self._split(path.strip("/").split("/"))
        if path.startswith("/begin/") and path[7:] in self.server.leaves:
            self.server.gone.add(self.server.leaves[path[7:]])
        if repository in self.server.gone or not (self.server.root / repository).is_dir():
            return self._say(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        return self._file(repository, rest) if kind == "file" else self._facts(repository, rest)

    def _split(self, parts):
        parts = parts[1:] if parts[0] == "api" else parts
        parts = (
            parts if parts[0] in ("datasets", "models") else ["models", *parts]
        )  # as files of models are asked for
        kind = "file" if "resolve" in parts else "facts"
        return kind, "/".join(parts[1:3]) or "none", parts[3:]

    def _facts(self, repository, rest):
        folder = self.server.root / repository
        if rest[:1] == ["tree"]:
            inner = folder.joinpath(*rest[2:])
            if not inner.is_dir():
                return self._say(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return self._json([self._entry(path, folder) for path in sorted(inner.rglob("*"))])
        if rest[:1] == ["revision"] and rest[1] == "gone":
            return self._say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        flags = {
            "private": False,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
        }
        siblings = [
            {"rfilename": path.relative_to(folder).as_posix()} for path in folder.rglob("*.*")
        ]
        return self._json(
            {"_id": "1", "id": repository, "sha": COMMIT, "siblings": siblings, **flags}
        )

    def _entry(self, path, folder):
        entry = {
            "path": path.relative_to(folder).as_posix(),
            "oid": hashlib.sha1(str(path).encode()).hexdigest(),
        }
        return (
            {**entry, "type": "directory", "size": 0}
            if path.is_dir()
            else {**entry, "type": "file", "size": path.stat().st_size}
        )

    def _file(self, repository, rest):
        path = self.server.root.joinpath(repository, *rest[2:])
        if not path.is_file() or rest[1] not in (COMMIT, "main"):
            return self._say(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        data = path.read_bytes()
        facts = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._say(200, data, facts)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        facts["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return self._say(206, part, facts)

    def _json(self, content):
        self._say(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _say(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def write_parquet(path: Path, texts: list[str | None]) -> None:
    """Write a file as lex_glue's are: a text and the numbers of its labels a row."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    labels = pyarrow.array([[0]] * len(texts), pyarrow.list_(pyarrow.int64()))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "labels": labels}), path
    )
