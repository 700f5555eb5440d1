"""Claims about infra/log.py: a run that is killed and resumed is one run in W&B.

Most tests put a stand-in into the place of the package wandb, which notes what it gets. Those of
`pytest -m parity` have the real package, and a stand-in for the service.
"""

import http.server
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import REPO

from infra import log
from infra.log import RunLog
from infra.mistakes import UserMistake

STEP_S = "time/train/step_s"


class StandIn:
    """The package wandb and its run, which has the steps below starting_step. fails_at: the first
    step whose row it does not take; -1: it does not even start."""

    def __init__(self, starting_step: int = 0, fails_at: float = math.inf) -> None:
        self.starting_step, self.fails_at = starting_step, fails_at
        self.asked, self.rows, self.summary = {}, [], {}

    def init(self, **asked: Any) -> "StandIn":
        self.asked = asked
        if self.fails_at < 0:
            raise ConnectionError("service\nis gone")
        return self

    def log(self, values: dict[str, Any], step: int, commit: bool) -> None:
        if step >= self.fails_at:
            raise ConnectionError("service\nis gone")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.rows.append("end")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple]:
    """Opens the log of a run of 5 steps, with a stand-in for W&B."""

    def open_log(first_step: int = 0, **facts: Any) -> tuple:
        stand_in, wandb = StandIn(**facts), {"mode": "online", "id": "abc"}
        monkeypatch.setitem(sys.modules, "wandb", stand_in)
        log = RunLog(tmp_path, steps=5, first_step=first_step, writes=True, wandb=wandb)
        return stand_in, log

    return open_log


def test_a_row_has_all_records_of_a_step(opened) -> None:
    wandb, log = opened()
    log.record_metrics(0, {"eval/accuracy": 0.5})
    log.record_metrics(0, {"loss": 1.0, STEP_S: 2.0})
    assert wandb.rows == []
    log.record_metrics(1, {STEP_S: 4.0})
    mean = {"time/train/step_avg_last10_s": 2.0}
    assert wandb.rows == [(0, {"eval/accuracy": 0.5, "loss": 1.0, STEP_S: 2.0} | mean)]


@pytest.mark.parametrize(
    "record, finished, sent",
    [
        ({"eval/accuracy": 0.5}, False, [2]),  # a resumed run makes step 3 again
        ({"eval/accuracy": 0.5}, True, [2, 3]),
        ({STEP_S: 1.0}, False, [2, 3]),
    ],
)
def test_a_step_that_a_resumed_run_makes_again_is_not_sent_before(
    opened, record: dict, finished: bool, sent: list[int]
) -> None:
    wandb, log = opened()
    log.record_metrics(2, {STEP_S: 1.0})
    log.record_metrics(3, record)
    log.close({"state": "done"}, finished=finished)
    *rows, end = wandb.rows
    assert [step for step, _ in rows] == sent and end == "end"
    assert wandb.summary["state"] == "done"


@pytest.mark.parametrize("known", [0, 2, 4])
def test_a_resumed_run_sends_the_steps_that_wandb_does_not_have(opened, known: int) -> None:
    """It was killed in step 4, after the checkpoint of step 3; W&B has the steps below `known`."""

    def take_step(log: RunLog, step: int) -> None:
        log.record_metrics(step, {"eval/accuracy": step / 4})
        log.record_metrics(step, {STEP_S: float(step)})

    _, log = opened()
    for step in range(4):
        take_step(log, step)
    log.record_metrics(4, {"eval/accuracy": 1.0})
    wandb, log = opened(first_step=3, starting_step=known)
    assert wandb.asked["id"] == "abc" and wandb.asked["resume"] == "allow"
    for step in (3, 4):
        take_step(log, step)
    log.record_metrics(5, {"eval/accuracy": 1.25})
    log.close(finished=True)
    *rows, _ = wandb.rows
    assert [step for step, _ in rows] == list(range(known, 6))
    for step, row in rows:
        assert row["eval/accuracy"] == step / 4
        assert row.get(STEP_S) == (step if step < 5 else None)


@pytest.mark.parametrize("fails_at", [-1, 0, 2])  # at the start, in a row of the file, at the end
def test_a_run_goes_on_without_wandb_after_one_line_whenever_wandb_fails(
    opened, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails_at: int
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    _, log = opened(first_step=1, fails_at=fails_at)
    for step in (1, 2):
        log.record_metrics(step, {"a": step})
    log.close({"state": "done"}, finished=True)
    assert capsys.readouterr().out == (
        f"W&B: service is gone; the run goes on without it, and {tmp_path}/metrics.jsonl has the "
        f"records\n"
    )
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


# ---- WANDB_MODE ----------------------------------------------------------------------------------


def test_without_the_package_a_mode_that_needs_it_is_a_mistake_and_a_key_alone_gets_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb fails now
    log.raise_if_wandb_unusable("disabled")
    with pytest.raises(UserMistake, match="WANDB_MODE=offline needs wandb: pip install wandb"):
        log.raise_if_wandb_unusable("offline")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert log.choose_wandb_mode("") == "disabled"
    assert capsys.readouterr().out.startswith(
        "W&B: WANDB_API_KEY is set, but the run goes on without W&B: WANDB_MODE=online needs wandb"
    )


def test_an_api_key_alone_means_online_if_it_is_long_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def set_key(key: str) -> None:
        package = SimpleNamespace(api=SimpleNamespace(api_key=key))
        monkeypatch.setitem(sys.modules, "wandb", package)
        monkeypatch.setenv("WANDB_API_KEY", key)

    set_key("a" * 40)
    assert log.choose_wandb_mode("") == "online" and log.choose_wandb_mode("offline") == "offline"
    for key, words in (("", "there is no API key; set WANDB_API_KEY"), ("short", "5 characters")):
        set_key(key)
        with pytest.raises(UserMistake, match=f"WANDB_MODE=online: .*{words}"):
            log.raise_if_wandb_unusable("online")
        assert log.choose_wandb_mode("") == "disabled"
    assert "short" not in capsys.readouterr().out


# ---- The real package ----------------------------------------------------------------------------


@pytest.mark.parity
def test_a_run_that_is_killed_twice_is_one_run_of_the_service_and_a_fork_is_another(
    tmp_path: Path,
) -> None:
    """The second kill also hits the process of W&B, so that the service may lack steps that are
    done. Each step is there once, and the summary has the published names. The fork is offline, and
    its second start replaces the folder of the first one."""
    pytest.importorskip("wandb", reason="an optional package")
    service, out = WandbService(), tmp_path / "run"
    env = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": "a" * 40, "WANDB_SILENT": "true"}
    env |= {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1", "HOME": str(tmp_path)}
    env |= {"OUTPUT_DIR": str(out), "STEPS": "7", "SAVE_EVERY_STEPS": "2", "EXPORT_HF": "none"}
    env |= {"BATCH_SIZE": "2", "MAX_LENGTH_SAMPLE": "8", "SAMPLE_EVERY_STEPS": "1"}
    env |= {"LR_SCHEDULE": "constant", "WARMUP_RATIO": "0"}
    env |= {"EVAL_EVERY_STEPS": "3", "EVAL_PROMPTS": "4", "EVAL_FULL_SWEEP": "1"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    slow = "import time\ndef slow(completions, **columns):\n    time.sleep(0.5)\n"
    (tmp_path / "slow.py").write_text(slow + "    return [1.0] * len(completions)\n")
    env |= {"REWARD_FN": f"{tmp_path}/slow.py:slow", "REWARD_WEIGHTS": "1"}
    command = [sys.executable, str(REPO / "train_grpo.py")]
    for killed_in in (3, 5):
        process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE)
        while not process.stdout.readline().startswith(f"step={killed_in} "):
            assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        for number in [process.pid, *map(int, children if killed_in == 5 else ())]:
            os.kill(number, signal.SIGKILL)
        process.communicate()
        time.sleep(0.5)
        (rows,) = service.rows.values()
        assert [row["_step"] for row in rows] == list(range(len(rows))), "without a gap"
    done = subprocess.run(command, env=env, text=True, capture_output=True)
    service.close()
    assert done.returncode == 0 and "resumed after step" in done.stdout, done.stderr
    assert "W&B: " not in done.stdout
    (rows,) = service.rows.values()
    assert [row["_step"] for row in rows] == list(range(8))
    assert [row["_step"] for row in rows if STEP_S in row] == list(range(7))
    assert [row["_step"] for row in rows if "eval/accuracy" in row] == [0, 3, 6, 7]
    last = json.loads((out / "summary.json").read_text())["last"] | {"state": "done"}
    published = "eval_full/accuracy eval_full/accuracy/pass_at_1 time/eval_full/step_s state"
    for name in (*published.split(), STEP_S, "time/train/step_avg_last10_s"):
        assert service.summary[name] == last[name]
    parent, fork = f"{out}/checkpoints/7", tmp_path / "fork"
    env |= {"OUTPUT_DIR": str(fork), "RESUME": parent, "WANDB_MODE": "offline"}
    for steps in ("8", "9"):
        subprocess.run(command, env=env | {"STEPS": steps}, check=True)
    [folder] = (fork / "wandb").glob("offline-run-*")
    assert folder.name.rpartition("-")[2] not in service.rows
    [file] = folder.glob("run-*.wandb")
    names = "ppo_epochs derived.global_batch derived.commit verdict forked_from".split()
    assert all(name.encode() in file.read_bytes() for name in (*names, parent))


# ---- The service ---------------------------------------------------------------------------------


class WandbService:
    """A stand-in for the service of W&B, at `url`.

    rows: of each run, as it has received them; summary: the newest of a run.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.summary: dict[str, Any] = {}
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            log_message = lambda self, *_: None  # noqa: E731

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = json.dumps(service.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

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
