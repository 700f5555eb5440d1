"""Odd completions and a W&B that is down neither end a run nor change its result."""

import contextlib
import http.server
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from rewards import BUILT_IN, penalties
from test_smoke import Run, train

# ---- Completions ---------------------------------------------------------------------------------

PIECES = """
    <think> </think> <answer> </answer> <Think> <answer <<>> \n \r\n \t #### #### - -- + . .. , , %
    $ 1 0 42 -7 1,234 1,23,4 .5 5. 1e9 1e999 1e-999 nan inf ∞ ½ ٣ ４２ \\frac{1}{2} \\boxed{ } { } (
    ) * / = 0x1F 1_000 999999999999999999999999999999 é 𝟙 \x00 \ud800 \u202e \u2028 ​ 🙂 the a
""".split(" ")
ANSWERS = [
    "#### 42",
    "#### -1,234.5",
    "#### nan",
    "",
    "####",
    "no number",
    "#### 1/0",
    "#### " + "9" * 400,
]
REWARDS = BUILT_IN | penalties(max_length=64, overlong_cache=8)


def test_no_reward_function_raises_on_a_hundred_thousand_odd_completions() -> None:
    rng = random.Random(0)
    for _ in range(100):
        completions = ["".join(rng.choices(PIECES, k=rng.randrange(30))) for _ in range(1000)]
        answers = [rng.choice(ANSWERS) for _ in completions]
        ids = [[rng.randrange(5) for _ in range(rng.randrange(20))] for _ in completions]
        for name, reward in REWARDS.items():
            rewards = reward(completions, answer=answers, completion_ids=ids)
            assert len(rewards) == 1000
            assert all(value is None or -1 <= value <= 1 for value in rewards), name


# Each text has about 100 kB of what makes regular expressions slow.
HUGE = [
    "<think>" * 14_000,
    "<answer>" * 12_000,
    "<think>\n" + "a" * 100_000,
    "1" * 100_000,
    "1," * 50_000,
    "-" * 100_000,
    "1.1" * 33_000,
    " " * 100_000,
    "\n" * 100_000,
    "<" * 100_000,
    "<answer>" + "1 " * 50_000 + "</answer>",
    "<answer>" + "," * 100_000,
    "#### " * 20_000,
    "<think></think>\n" * 6_000 + "<answer>42</answer>",
    "\\frac{" * 16_000,
    "$" * 100_000,
]


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_of_a_hundred_kilobytes_takes_less_than_twenty_milliseconds(name: str) -> None:
    ids = [list(range(1000)) * 25]  # As many tokens as such a text may have.
    for text in HUGE:
        seconds = []
        for _ in range(5):
            start = time.process_time()
            REWARDS[name]([text], answer=["#### 42"], completion_ids=ids)
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.02, text[:20]


# ---- W&B -----------------------------------------------------------------------------------------


QUICK = {"STEPS": "2", "EVAL_EVERY_STEPS": "0", "BATCH_SIZE": "2", "WANDB_SILENT": "true"}
QUICK |= {"MAX_LENGTH_SAMPLE": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def with_wandb(out: Path, **env: str) -> Run:
    """A run of two steps that finds no W&B key on this machine."""
    pytest.importorskip("wandb", reason="an optional package")
    out.parent.mkdir(parents=True, exist_ok=True)
    (out.parent / "netrc").touch()
    nobody = {"NETRC": str(out.parent / "netrc"), "WANDB_API_KEY": "", "HOME": str(out.parent)}
    return train(out, **QUICK | nobody | env)


def offline_runs(out: Path) -> list[Path]:
    return sorted((out / "wandb").glob("offline-run-*"))


def wandb_ids(out: Path) -> list[str]:
    return [folder.name.rpartition("-")[2] for folder in offline_runs(out)]


def told_to_wandb(folder: Path, text: str) -> bool:
    return any(text.encode() in file.read_bytes() for file in folder.glob("run-*.wandb"))


@pytest.mark.parity
def test_wandb_offline_has_the_settings_of_the_run(tmp_path: Path) -> None:
    done = with_wandb(tmp_path / "run", WANDB_MODE="offline")
    assert done.code == 0, done.errors
    (folder,) = offline_runs(tmp_path / "run")
    written = "ppo_epochs derived.global_batch derived.policy_loss_impl derived.commit verdict"
    for name in written.split():
        assert told_to_wandb(folder, name)


@pytest.mark.parity
def test_a_resumed_run_keeps_its_wandb_run_and_a_fork_gets_a_new_one(tmp_path: Path) -> None:
    parent, fork = tmp_path / "parent", tmp_path / "fork"
    more = {"WANDB_MODE": "offline", "LR_SCHEDULE": "constant", "WARMUP_RATIO": "0"}
    assert with_wandb(parent, **more).code == 0
    (first,) = wandb_ids(parent)
    assert with_wandb(parent, **more, STEPS="3").code == 0
    assert wandb_ids(parent) == [first]  # in a folder that replaces the first one
    there = f"{parent}/checkpoints/2"
    for steps in ("4", "5"):  # The fork begins, and then it is resumed.
        done = with_wandb(fork, **more, STEPS=steps, RESUME=there if steps == "4" else "auto")
        assert done.code == 0, done.errors
    assert len(wandb_ids(fork)) == 1 and wandb_ids(fork) != wandb_ids(parent)
    (folder,) = offline_runs(fork)
    assert told_to_wandb(folder, "forked_from") and told_to_wandb(folder, there)
    assert not told_to_wandb(offline_runs(parent)[0], "forked_from")


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["silent", "refuses"])
def test_a_run_that_wandb_refuses_goes_on_without_it(tmp_path: Path, kind: str) -> None:
    """The server accepts connections and is silent, as when W&B is down, or it refuses the key."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST
        log_message = lambda self, *_: None  # noqa: E731

    with contextlib.ExitStack() as stack:
        if kind == "silent":
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            kept: list = []
            wait = lambda: [kept.append(server.accept()) for _ in range(99)]  # noqa: E731
            threading.Thread(target=wait, daemon=True).start()
            port = server.getsockname()[1]
        else:
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            port = server.server_address[1]
        began, out = time.monotonic(), tmp_path / "run"
        url = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "a" * 40}
        done = with_wandb(out, WANDB_MODE="online", **url)
    assert done.code == 0, done.errors
    assert time.monotonic() - began < 150
    told = [line for line in done.lines.splitlines() if line.startswith("W&B: ")]
    end = f"; the run goes on without it, and {out}/metrics.jsonl has the records"
    assert len(told) == 1 and told[0].endswith(end)
    assert done.lines.strip().splitlines()[-1].startswith("DONE: steps=2")
    assert len(done.records()) == 2
    assert "a" * 40 not in done.lines + done.errors


@pytest.mark.parity
@pytest.mark.parametrize(
    "key, words",
    [
        ("", "WANDB_MODE=online: there is no API key; set WANDB_API_KEY or run `wandb login`"),
        ("short", "WANDB_MODE=online: the API key that is set has 5 characters, not 40 or more"),
    ],
)
def test_a_wrong_api_key_stops_the_run_before_it_starts(
    tmp_path: Path, key: str, words: str
) -> None:
    done = with_wandb(tmp_path / "run", WANDB_MODE="online", WANDB_API_KEY=key)
    assert done.code == 2
    last = done.errors.strip().splitlines()[-1]
    assert last.startswith(f"error: {words}") and "WANDB_MODE=offline" in last
    assert "model=" not in done.lines and not (tmp_path / "run").exists()
