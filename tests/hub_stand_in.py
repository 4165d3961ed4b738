"""A local stand-in for the hub's endpoint: kernel repositories to read and buckets to write, over HTTP on loopback.

It speaks what ``huggingface_hub`` and ``kernels`` ask for, and keeps every request, so that a test can say what was
asked and what was not.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".so", ".bin")  # kept as LFS objects


@dataclass
class Repository:
    """Files by path, with what the hub's refs say of its one commit."""

    files: dict[str, bytes]
    branches: tuple[str, ...] = ("main", "v1")
    commit: str = COMMIT

    def entry(self, path: str) -> dict:
        body = self.files[path]
        blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        found = {"type": "file", "path": path, "size": len(body), "oid": blob}
        if path.endswith(LARGE):
            found["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
        return found


@dataclass
class Hub:
    """What the stand-in holds and what it was asked. ``trusted`` are the organisations the library may trust."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    trusted: set[str] = field(default_factory=set)
    buckets: dict[str, dict[str, dict]] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    operations: list[dict] = field(default_factory=list)
    endpoint: str = ""

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            held = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    held: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None: ...

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.held.requests.append((self.command, path, dict(self.headers)))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "organizations"]:
            org = parts[2]
            trusted = {"trustedKernelPublisher": True} if org in self.held.trusted else {}
            self._json({"name": org, "fullname": org, "avatarUrl": ""} | trusted)
        elif parts[:2] == ["api", "kernels"] and "/".join(parts[2:4]) in self.held.repositories:
            self._kernel_api(self.held.repositories["/".join(parts[2:4])], parts[4:])
        elif parts[0] == "kernels" and parts[3:4] == ["resolve"]:
            self._file(self.held.repositories["/".join(parts[1:3])], "/".join(parts[5:]))
        elif parts[:2] == ["api", "buckets"]:
            self._bucket_api(parts[2:], body)
        elif parts[:2] == ["cas", "v1"] and self.command == "POST":  # it knows no chunk, nor the second protocol
            self._json({"was_inserted": True} if "xorbs" in parts else {"result": 1})
        else:
            self._json({"error": f"no {path}"}, 404)

    def _kernel_api(self, repository: Repository, rest: list[str]) -> None:
        if rest == ["refs"]:
            heads = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": repository.commit}
                for name in repository.branches
            ]
            self._json({"branches": heads, "tags": [], "converts": []})
        elif rest[:1] == ["tree"]:
            inside = "".join(f"{part}/" for part in rest[2:])
            below = [path for path in repository.files if path.startswith(inside)]
            folders = sorted({inside + path.removeprefix(inside).split("/")[0] for path in below})
            found: list[dict] = [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders]
            if "recursive=true" in self.path.lower():
                found += [repository.entry(path) for path in below]
            self._json(found)
        else:
            siblings = [{"rfilename": path} for path in repository.files]
            self._json({"id": "kernel", "sha": repository.commit, "siblings": siblings})

    def _file(self, repository: Repository, path: str) -> None:
        if path not in repository.files:
            self._send(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit})
            return
        body, entry = repository.files[path], repository.entry(path)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        self._send(body, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": repository.commit})

    def _bucket_api(self, rest: list[str], body: bytes) -> None:
        bucket, work = "/".join(rest[:2]), rest[2:]
        if not work and self.command == "POST":
            known = bucket in self.held.buckets
            self.held.buckets.setdefault(bucket, {})
            self._json({"url": f"{self.held.endpoint}/buckets/{bucket}"}, 409 if known else 200)
        elif work[:1] == ["tree"]:
            self._json(list(self.held.buckets[bucket].values()))
        elif work[:1] == ["xet-write-token"]:
            token = {"X-Xet-Cas-Url": f"{self.held.endpoint}/cas", "X-Xet-Access-Token": "t"}
            token |= {"X-Xet-Token-Expiration": "9999999999"}
            self._json({"casUrl": token["X-Xet-Cas-Url"], "exp": 9999999999, "accessToken": "t"}, more=token)
        elif work == ["batch"]:
            for line in body.splitlines():
                self._apply(bucket, json.loads(line))
            self._json({"success": True, "failed": []})
        else:
            facts = {"createdAt": "2026-01-01T00:00:00.000Z", "size": 0, "totalFiles": 0}
            self._json({"id": bucket, "private": False} | facts)

    def _apply(self, bucket: str, operation: dict) -> None:
        self.held.operations.append(operation)
        held = self.held.buckets[bucket]
        if operation["type"] == "deleteFile":
            held.pop(operation["path"], None)
        else:
            held[operation["path"]] = {
                "type": "file", "path": operation["path"], "size": 1, "xetHash": operation["xetHash"],
            }  # fmt: skip

    def _json(self, body: object, status: int = 200, more: dict[str, str] | None = None) -> None:
        self._send(json.dumps(body).encode(), status, {"Content-Type": "application/json"} | (more or {}))

    def _send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
