"""A stand-in for the service of W&B, which keeps the rows of its runs as the real one does."""

import http.server
import json
import re
import threading
from typing import Any


class WandbService:
    """Serves at `url`. rows: of each run, as it has received them; summary: the newest of a run."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.summary: dict[str, Any] = {}
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            log_message = lambda self, *_: None  # noqa: E731

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                told = json.dumps(service.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            do_GET = do_POST = do_PUT = answer

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # a client that is killed is no news
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if stream := re.search(r"/([^/]+)/file_stream$", path):
            files = json.loads(body).get("files") or {}
            if summary := files.get("wandb-summary.json"):
                self.summary = json.loads(summary["content"][-1])
            if history := files.get("wandb-history.jsonl"):
                rows = self.rows[stream[1]]
                rows[history["offset"] :] = map(json.loads, history["content"])
            return {"limits": {}}
        if not path.endswith("graphql"):
            return {}
        asked = json.loads(body)
        name = re.search(r"(?:query|mutation) (\w+)", asked["query"])[1]
        return {"data": getattr(self, f"_{name}", lambda **_: {})(**asked.get("variables") or {})}

    def _Viewer(self) -> dict[str, Any]:
        who = {"id": "1", "entity": "us", "username": "me", "email": "", "flags": "{}"}
        return {"viewer": who | {"teams": {"edges": []}}}

    def _RunResumeStatus(self, *, name: str, **_: Any) -> dict[str, Any]:
        if name not in self.rows:
            return {"model": {"id": "1", "name": "p", "entity": ENTITY, "bucket": None}}
        rows = self.rows[name]
        bucket = {
            **{"id": "1", "name": name, "displayName": name, "tags": [], "notes": ""},
            **{"summaryMetrics": json.dumps(rows[-1] if rows else {}), "config": "{}"},
            **{"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0},
            "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
            **{"eventsTail": "[]", "wandbConfig": json.dumps({"t": 1})},
        }
        return {"model": {"id": "1", "name": "p", "entity": ENTITY, "bucket": bucket}}

    def _UpsertBucket(self, *, name: str, **_: Any) -> dict[str, Any]:
        inserted = name not in self.rows
        rows = self.rows.setdefault(name, [])
        bucket = {"id": "1", "name": name, "displayName": name, "config": "{}", "sweepName": None}
        project = {"id": "1", "name": "p", "entity": ENTITY}
        bucket |= {"description": "", "project": project, "historyLineCount": len(rows)}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _CreateRunFiles(self, *, files: list[str], **_: Any) -> dict[str, Any]:
        urls = [{"name": file, "uploadUrl": f"{self.url}/{file}"} for file in files]
        return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": urls}}

    def _ArtifactType(self, **_: Any) -> dict[str, Any]:
        return {"project": None}

    def _CreateArtifact(self, **_: Any) -> dict[str, Any]:
        artifact = {"id": "1", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}


ENTITY = {"id": "1", "name": "us"}
