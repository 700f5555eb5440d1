"""tools/gpu_check.py and tools/profile_step.py print and write what docs/speed.md says."""

import json
from pathlib import Path

import jax
import pytest
from runs import REPO, TIMES, environment, few_examples, run_as_user, run_as_user_here

import train_grpo
from fingerprint import commit_of
from model import blocks
from model.attention import KV, PackedRows, attention
from model.layout import Layout
from tools import gpu_check
from tools.profile_step import Kernel, summarize

MS = 1e6  # ns


def test_the_summary_of_a_profile_has_kernels_of_programs_and_the_longest_waits() -> None:
    """A trace has none where the profiler may not read the counters of a GPU."""
    kernels = [
        Kernel(0, 2 * MS, "jit_decode", "a"),
        Kernel(1 * MS, 5 * MS, "jit_decode", "b"),  # of another stream, beside a and c
        Kernel(3 * MS, 4 * MS, "none", "MemcpyD2H"),
        Kernel(6 * MS, 7 * MS, "jit_micro_step", "d"),
        Kernel(7 * MS, 8 * MS, "jit_micro_step", "e"),
        Kernel(10 * MS, 11 * MS, "jit_micro_step", "d"),
    ]
    assert summarize(kernels, 0.016) == {
        "step_s": 0.016,
        "kernels": 6,
        "busy_share": 0.5,  # 5 + 2 + 1 of 16 ms
        "programs": {
            "jit_decode": {"kernels": 2, "ms": 6.0},
            "none": {"kernels": 1, "ms": 1.0},
            "jit_micro_step": {"kernels": 3, "ms": 3.0},
        },
        "longest_waits": [
            {"ms": 2.0, "after": "jit_micro_step/e", "before": "jit_micro_step/d"},
            {"ms": 1.0, "after": "jit_decode/b", "before": "jit_micro_step/d"},
        ],
    }
    many = [Kernel(i * i * MS, (i * i + 1) * MS, "jit_decode", str(i)) for i in range(9)]
    waits = [wait["ms"] for wait in summarize(many, 0.1)["longest_waits"]]
    assert waits == [14.0, 12.0, 10.0, 8.0, 6.0]
    none = {"kernels": 0, "busy_share": 0.0, "programs": {}, "longest_waits": []}
    assert summarize([], 2.0) == {"step_s": 2.0} | none


def test_attention_in_rounds_is_within_and_wrong_attention_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "IN_ROUNDS", {"cpu"})
    fields = gpu_check.compare_attention(small=False)  # it is small on a CPU
    assert (fields["device"], fields["small"]) == ("8 x cpu", True)
    within = fields["attention"].pop("within")
    assert within is True and {*fields["attention"]} == {"out", "grad_q", "grad_k", "grad_v"}
    assert all(0 < x < 0.01 for x in fields["attention"].values()), "it compares with another one"

    def sees_all_completions(
        q: jax.Array, kv: KV, rows: PackedRows, layout: Layout, cap: float
    ) -> jax.Array:
        return attention(q, kv, rows._replace(start=0 * rows.start), layout, cap)

    monkeypatch.setattr(gpu_check, "block_attention", sees_all_completions)
    wrong = gpu_check.compare_attention(small=True)["attention"]
    assert wrong["within"] is False and min(wrong[name] for name in ("out", "grad_v")) > 0.1


@pytest.mark.parametrize(
    "within, codes, expected",
    [
        (True, [None, None], 0),
        (False, [None, None], 1),
        (True, [None, 3], 0),  # the second model is too large for the device
        (True, [1, None], 1),
        (True, [None, -9], 1),  # killed
    ],
)
def test_the_exit_code_is_1_if_attention_is_wrong_or_a_run_failed(
    within: bool, codes: list[int | None], expected: int
) -> None:
    runs = {str(i): {"tokens": 1} if x is None else {"exit_code": x} for i, x in enumerate(codes)}
    assert gpu_check.exit_code({"attention": {"within": within}, "runs": runs}) == expected


def test_a_run_that_fails_leaves_its_exit_code_in_the_fields(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """The run reads the model of random weights before it refuses the mesh."""
    monkeypatch.setitem(gpu_check.KNOWN_MODELS, "made/small", {"num_hidden_layers": 1})
    monkeypatch.setattr(gpu_check.tempfile, "tempdir", str(tmp_path))
    arguments = "--steps 3 MAX_LENGTH_SAMPLE=8 MESH_SHAPE=3,1,1"
    assert gpu_check.measure_steps("made/small", arguments) == {"exit_code": 2}
    assert "error: MESH_SHAPE=3,1,1 is a mesh of 3 devices" in capfd.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_check_prints_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    work.mkdir()
    temporary.mkdir()
    settings = {"SCRIPT": "tools/gpu_check.py", "TMPDIR": str(temporary)}
    [line] = run_as_user(work / "run", **settings).lines.splitlines()
    assert not [*work.iterdir(), *temporary.iterdir()]
    fields = json.loads(line)
    assert [*fields] == "device small attention jax commit runs".split()
    assert (fields["device"], fields["small"]) == ("1 x cpu", True)
    assert (fields["jax"], fields["commit"]) == (jax.__version__, commit_of(REPO))
    assert fields["attention"]["within"] is True
    [(name, run)] = fields["runs"].items()
    assert name == "bench.py"
    assert (run["plen"], run["clen"], run["tokens"]) == (64, 32, 8 * 4 * 32)
    assert run["recompiled"] == 0 and run["peak_rss_mib"] > 100
    assert run["decode_ms_per_token"] == pytest.approx(
        1000 / 32 * run["steady_rollout_s"], rel=0.01
    )
    profile = run["profile"]
    kernels = {program: x["kernels"] for program, x in profile["programs"].items()}
    assert sum(kernels.values()) == profile["kernels"] and "none" not in kernels
    assert kernels["jit_decode"] > 31 * 4 and kernels["jit_micro_step"] > 4 * 4  # layers
    assert 0 < profile["busy_share"] <= 1 and profile["step_s"] > 0
    ms = [wait["ms"] for wait in profile["longest_waits"]]
    assert len(ms) == 5 and ms == sorted(ms, reverse=True) and ms[-1] > 0


@pytest.mark.slow
def test_a_profiled_run_is_the_run_without_its_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler changes no number of the steps before, and the trace is that of a real run."""
    settings = environment("STEPS=2 EVAL_EVERY_STEPS=0 MAX_LENGTH_SAMPLE=16 BATCH_SIZE=2")
    settings |= {"LR_SCHEDULE": "linear", "DATASET": str(few_examples(32, 32))}  # to 0 at the end
    plain = run_as_user_here(tmp_path / "plain", **settings)
    profiler = {"SCRIPT": "tools/profile_step.py"}
    monkeypatch.setattr(train_grpo, "log_step", train_grpo.log_step)  # the profiler replaces it
    profiled = run_as_user_here(tmp_path / "profiled", str(tmp_path / "x"), **settings | profiler)
    assert (plain.code, profiled.code) == (0, 0), plain.errors + profiled.errors
    [record] = profiled.records
    assert [x["step"] for x in plain.records] == [0, 1] and record["step"] == 0
    same = {k: x for k, x in record.items() if not k.startswith(TIMES) or "computed" in k}
    assert len(same) > 20 and same.items() <= plain.records[0].items()
    assert len([*(tmp_path / "x").rglob("*.xplane.pb")]) == 1
    profile = json.loads((tmp_path / "x" / "profile.json").read_text())
    assert {"jit_decode", "jit_micro_step"} <= {*profile["programs"]}


@pytest.mark.parametrize(
    "arguments, settings, message",
    [
        ([], {}, "usage: python tools/profile_step.py FOLDER"),
        (["--config"], {}, "usage: python tools/profile_step.py FOLDER"),
        (["x"], {"STEPS": "1"}, "STEPS=1: the first step compiles; a profile needs 2 or more"),
        (["x"], {"LERNING_RATE": "1"}, "unknown setting LERNING_RATE; did you mean LEARNING_RATE?"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_in_one_line(
    arguments: list[str], settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    script = {"SCRIPT": "tools/profile_step.py"}
    done = run_as_user_here(tmp_path / "run", *arguments, **script | settings)
    assert done.code in (1, 2) and message in done.errors.splitlines()[-1]
    assert not [*tmp_path.iterdir()]
