"""A stand-in for the hub: the part of its HTTP interface with which huggingface_hub creates, fills
and downloads repositories of models, without Xet. It keeps everything in memory."""

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

WRITE, READ = "hf_writes", "hf_reads"  # the tokens that it knows
OWNERS = ("me", "team")


class Hub(ThreadingHTTPServer):
    """The server, with its repositories {id: {path: content}}. It answers from its own threads."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}  # what was uploaded, by its SHA-256
        self.requests: list[str] = []
        self.commit_status = 200  # of the answer to a commit
        self.commit_s = 0.0  # the seconds that a commit takes

    def env(self, folder: Path) -> dict[str, str]:
        """The environment of a program that uses this hub. folder: of its cache, and of its token
        file, which does not exist."""
        settings = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        return settings | {"HF_HOME": str(folder), "HF_TOKEN": WRITE}

    def sha(self, repository: str) -> str:
        """The id of the newest commit: a digest of all files."""
        return hashlib.sha1(repr(sorted(self.files[repository].items())).encode()).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, args=[0.05], daemon=True).start()
        yield hub
        hub.shutdown()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: Any = b"", **headers: str) -> None:
        """Sends an answer: bytes, or values as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(f"{self.command} {path}")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        for pattern, respond, changes in ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                if changes and token != WRITE:
                    message = "Forbidden: you lack the rights" if token == READ else "Unauthorized"
                    return self.answer(403 if token == READ else 401, X_Error_Message=message)
                repository = match["id"] if "id" in match.groupdict() else ""
                is_hidden = hub.private.get(repository) and token not in (WRITE, READ)
                if repository and (repository not in hub.files or is_hidden):
                    return self.answer(404, X_Error_Code="RepoNotFound")
                return respond(self, match, body)
        return self.answer(404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    # ---- What it answers -------------------------------------------------------------------------

    def create(self, match: re.Match, body: bytes) -> None:
        values = json.loads(body)
        repository = f"{values['organization']}/{values['name']}"
        url = f"{self.server.url}/{repository}"
        if values["organization"] not in OWNERS:
            return self.answer(403, X_Error_Message="Forbidden: not your namespace")
        if repository in self.server.files:
            return self.answer(409, {"error": "You already created this model repo", "url": url})
        self.server.files[repository] = {".gitattributes": b"*.safetensors filter=lfs\n"}
        # huggingface_hub 1 sends `private`, newer ones `visibility`.
        is_private = values.get("private") or values.get("visibility") == "private"
        self.server.private[repository] = bool(is_private)
        return self.answer(200, {"url": url})

    def preupload(self, match: re.Match, body: bytes) -> None:
        names = [file["path"] for file in json.loads(body)["files"]]
        modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
        self.answer(200, {"files": [
            {"path": name, "uploadMode": mode, "shouldIgnore": False}
            for name, mode in zip(names, modes, strict=True)
        ]})  # fmt: skip

    def batch(self, match: re.Match, body: bytes) -> None:
        objects = json.loads(body)["objects"]
        for item in objects:
            if item["oid"] not in self.server.objects:
                item["actions"] = {"upload": {"href": f"{self.server.url}/objects/{item['oid']}"}}
        self.answer(200, {"transfer": "basic", "objects": objects})

    def put(self, match: re.Match, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == match["oid"]
        self.server.objects[match["oid"]] = body
        self.answer(200)

    def validate(self, match: re.Match, body: bytes) -> None:
        """As the hub does, it refuses a head that names a folder as a model or as a dataset."""
        head = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        ids = [head.get("base_model", "a/b"), *head.get("datasets", [])]
        wrong = [name for name in ids if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)]
        errors = [{"message": f"{name} is not an id"} for name in wrong]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def commit(self, match: re.Match, body: bytes) -> None:
        time.sleep(self.server.commit_s)
        if self.server.commit_status != 200:
            return self.answer(self.server.commit_status, X_Error_Message="the disk is full")
        files = self.server.files[match["id"]]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.server.sha(match["id"])
        url = f"{self.server.url}/{match['id']}/commit/{sha}"
        return self.answer(200, {"commitUrl": url, "commitOid": sha})

    def info(self, match: re.Match, body: bytes) -> None:
        name = match["id"]
        values = {"id": name, "sha": self.server.sha(name), "private": self.server.private[name]}
        siblings = [{"rfilename": path} for path in self.server.files[name]]
        self.answer(200, values | {"siblings": siblings, "tags": []})

    def tree(self, match: re.Match, body: bytes) -> None:
        self.answer(200, [
            {"type": "file", "path": path, "size": len(content), "oid": digest(content)}
            for path, content in self.server.files[match["id"]].items()
        ])  # fmt: skip

    def resolve(self, match: re.Match, body: bytes) -> None:
        content = self.server.files[match["id"]].get(match["path"])
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        sha = self.server.sha(match["id"])
        return self.answer(200, content, ETag=f'"{digest(content)}"', X_Repo_Commit=sha)


def digest(content: bytes) -> str:
    """The id of a file, as git has it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


ID = r"(?P<id>[\w.-]+/[\w.-]+)"
# A request, what answers it, and whether it needs the right to write.
ROUTES = [
    ("POST /api/repos/create", Handler.create, True),
    ("POST /api/validate-yaml", Handler.validate, False),
    (f"POST /api/models/{ID}/preupload/main", Handler.preupload, True),
    (f"POST /api/models/{ID}/commit/main", Handler.commit, True),
    (f"POST /{ID}\\.git/info/lfs/objects/batch", Handler.batch, True),
    (r"PUT /objects/(?P<oid>\w+)", Handler.put, False),  # its address is the permission
    (rf"GET /api/models/{ID}/tree/\w+/?", Handler.tree, False),
    (rf"GET /api/models/{ID}(/revision/\w+)?", Handler.info, False),
    (rf"(GET|HEAD) /{ID}/resolve/\w+/(?P<path>.+)", Handler.resolve, False),
]
