"""The quick offline claims: `pytest test_smoke.py`, under 90 s on 2 cores, no network.

One real two-step run of the main job, what it leaves behind, and what stops it before it starts.
Each module has its deeper tests in tests/.
"""

import ast
import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import config
from loss import Objective
from runtime import sizes

pytest.importorskip("fcntl", reason="training needs Linux, macOS or WSL")

REPO = Path(__file__).resolve().parent
# room -> the rooms whose files it may import; "" is the top level
ROOMS = {
    "runtime": {"runtime"},
    "models": {"runtime", "models"},
    "": {"runtime", "models", ""},
    "tools": {"runtime", "models", "", "tools"},
}

COMMANDS = {"tools.plan_tpu", "tools.ask"}  # what train_grpo.py imports for its other flags


class Run(NamedTuple):
    code: int
    lines: str
    errors: str
    out: Path

    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").open(encoding="utf-8")]


def environment(out: Path, env: dict[str, str]) -> dict[str, str]:
    """The environment of a run with the settings `env`, away from this shell's settings."""
    names = {field.name.upper() for field in dataclasses.fields(config.Config)}
    of_tests = {"XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    shell = {k: v for k, v in os.environ.items() if k not in names | of_tests}
    return shell | {"JAX_PLATFORMS": "cpu", "WANDB_API_KEY": "", "OUTPUT_DIR": str(out)} | env


def train(out: Path, *flags: str, **env: str) -> Run:
    """`python train_grpo.py` in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(REPO / "train_grpo.py"), *flags],
        env=environment(out, env),
        text=True,
        capture_output=True,
        cwd=out.parent,
        timeout=300,
    )
    return Run(done.returncode, done.stdout, done.stderr, out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of the defaults, from another folder than the repository's."""
    out = tmp_path_factory.mktemp("smoke") / "run"
    settings = {"STEPS": "2", "EVAL_EVERY_STEPS": "2", "EVAL_FULL_SWEEP": "1"}
    return train(out, **settings, SAVE_EVERY_STEPS="2", PRINT_TRAIN_TIME_BREAKDOWN="1")


def test_the_main_job_runs_and_prints_the_lines_people_parse(run: Run) -> None:
    assert run.code == 0, run.errors
    number, seconds = r"-?\d+\.\d+", r"\d+\.\d\ds"
    phases = "rollout rollout_sync rollout_generate reward advantages shard update".split()
    breakdown = "".join(rf" {phase}={seconds}" for phase in phases)
    lengths = (
        rf" prompt_len_mean={number} completion_len_mean={number} completion_len_max=\d+"
        rf" completion_hit_max_frac={number}"
    )
    accuracy = rf"accuracy=[01]\.\d{{4}} accuracy_se={number} accuracy_of=reward_correct"
    accuracy += " decoding=greedy"
    for line in (
        "backend=cpu process=0/1 device_count=1 local_device_count=1",
        "local_batch=128 global_batch=128 rollout.prompt_batch_size=16 rollout.passes_per_step=1 "
        r"train.micro_batch_size=\d+ train.grad_accum_steps=\d+ train.updates_per_step=1",
        rf"eval step=0 split=test questions=\d+ {accuracy} t={seconds}",
        r"step=0 loss=-?\d+\.\d{6} entropy=\d\.\d{4} reward_mean=\d\.\d{4} "
        rf"dt={seconds}{breakdown}{lengths}",
        rf"step=1 loss=.*{lengths}",
        rf"eval step=2 split=test questions=\d+ {accuracy} t={seconds}",
        rf"eval_full split=test questions=500 samples_per_question=1 {accuracy} t={seconds}",
        r"DONE: steps=2 elapsed_sec=\d+\.\d{3}",
    ):
        assert re.search(f"^{line}$", run.lines, re.M), f"{line}\nnot in\n{run.lines}"


def test_the_record_has_the_names_that_dashboards_read(run: Run) -> None:
    first = next(r for r in run.records() if "train-other/loss" in r)
    assert first["step"] == 0
    for name in """
        train-other/loss train-other/entropy train-other/batch_global train-other/batch_local
        train-other/total_valid_token_count train-other/grad_norm train-other/learning_rate
        train-reward/total/mean train-reward/total/std train-reward/total/min train-reward/total/max
        train-reward/advantage/mean train-reward/advantage/std train-reward/advantage/min
        train-reward/advantage/max train-reward/func/reward_correct/mean
        train-reward/func/reward_format/mean train-reward/func/tag_count_reward/mean
        train-seq_len/prompt/mean train-seq_len/prompt/max train-seq_len/completion/mean
        train-seq_len/completion/max train-seq_len/total/mean train-seq_len/total/max
        time/train/rollout_s time/train/rollout_sync_s time/train/rollout_generate_s
        time/train/reward_s time/train/advantages_s time/train/shard_s time/train/update_s
        time/train/step_s time/train/step_avg_last10_s throughput/train/valid_tokens_per_s
        throughput/train/valid_tokens_per_s_update compile/programs compile/s
    """.split():
        assert math.isfinite(first[name]), name
    evaluated = next(r for r in run.records() if "eval/accuracy" in r)
    for name in """
        eval/reward/total/mean eval/reward/total/std eval/reward/total/min eval/reward/total/max
        eval/reward/func/reward_correct/mean time/eval/rollout_s time/eval/rollout_generate_s
        time/eval/reward_s time/eval/step_s
    """.split():
        assert math.isfinite(evaluated[name]), name
    swept = next(r for r in run.records() if "eval_full/accuracy" in r)
    assert (swept["eval_full/split"], swept["eval_full/questions_global"]) == ("test", 500)
    assert swept["eval_full/accuracy/pass_at_1"] == swept["eval_full/accuracy"]


def test_a_run_writes_as_many_gb_as_it_has_said(run: Run) -> None:
    told = r"^disk: 1 x (\S+) GB of checkpoints, \S+ GB free$"
    [gb] = re.findall(told, run.lines, re.M)
    files = [file for file in (run.out / "checkpoints/2/arrays").rglob("*") if file.is_file()]
    written = sum(file.stat().st_size for file in files)
    assert 0.5 < written / (float(gb) * 1e9) < 1.05  # orbax compresses moments that are 0


def test_summary_json_has_the_five_values_of_the_published_summaries(run: Run) -> None:
    last = json.loads((run.out / "summary.json").read_text(encoding="utf-8"))["last"]
    for name in """
        eval_full/accuracy eval/reward/func/reward_correct/mean eval/reward/total/mean
        time/train/step_avg_last10_s time/eval_full/step_s
    """.split():
        assert math.isfinite(last[name]), name


KNOWN_LINES = re.compile(
    "(backend|local_batch|model|loss.loss_type|output|step)=.*|mesh dp,fsdp,tp train=.*|"
    "rollout.backend: naive|(changed|disk|DONE): .*|eval(_full)? .*|compiled .*|"
    r"sample step=.* question: .*|  .*|verdict: .*|[\w ]+ for \d+ s(: .*)?"
)


def test_a_run_prints_nothing_but_its_own_lines(run: Run, tmp_path: Path) -> None:
    """Also where jax itself looks for a device and finds no TPU, with jax[tpu] installed."""
    plain = train(tmp_path / "plain", STEPS="0", EVAL_EVERY_STEPS="0", JAX_PLATFORMS="")
    for done in (run, plain):
        assert (done.code, done.errors) == (0, "")
        assert [line for line in done.lines.splitlines() if not KNOWN_LINES.fullmatch(line)] == []


def test_the_trainer_gives_the_tokens_the_sampler_s_own_probabilities(run: Run) -> None:
    steps = [r for r in run.records() if "train-other/loss" in r]
    assert [r["step"] for r in steps] == [0, 1]
    for record in steps:
        assert record["train-other/sampling_logp_difference/max"] < 1e-4
        assert record["train-other/clip_ratio/region_mean"] == 0  # one update: on-policy
        assert abs(record["train-reward/advantage/mean"]) < 1e-9
        assert record["train-other/grad_norm"] > 0


def test_the_tiny_model_has_format_and_leaves_arithmetic_to_learn(run: Run) -> None:
    evaluated = next(r for r in run.records() if "eval/accuracy" in r)
    assert evaluated["step"] == 0
    assert 0.2 <= evaluated["eval/accuracy"] <= 0.5
    assert evaluated["eval/reward/func/reward_format/mean"] >= 0.8


def test_the_last_checkpoint_has_the_last_accuracy_too(run: Run) -> None:
    """So that a run that goes on with more steps keeps the checkpoint if it is the best one."""
    record = json.loads((run.out / "checkpoints" / "2" / "record" / "metadata").read_text())
    evaluated = [r for r in run.records() if "eval/accuracy" in r]
    assert [r["step"] for r in evaluated] == [0, 2]
    assert record["evals"] == [[r["step"], r["eval/accuracy"]] for r in evaluated]


def test_the_run_keeps_its_settings_and_samples(run: Run) -> None:
    again = config.Config.from_env({}, run.out / "config.yaml")
    assert (again.steps, again.eval_full_sweep, again.output_dir) == (2, True, str(run.out))
    ran = dict(re.findall(r"^derived\.(\w+): (.*)$", (run.out / "config.yaml").read_text(), re.M))
    assert (ran["global_batch"], ran["policy_loss_impl"], ran["dtype"]) == ("128", "jax", "float32")
    assert (ran["mesh_shape"], ran["rollout_mesh_shape"]) == ("1,1,1", "1,1,1")
    assert ran["attention_impl"] == "xla"
    samples = [json.loads(line) for line in (run.out / "samples.jsonl").open(encoding="utf-8")]
    assert [s["step"] for s in samples] == [0, 0, 1, 1]  # of the first and of the last step
    for group in samples:
        assert "####" in group["answer"] and len(group["completions"]) == 8
        assert all("<think>" in completion["text"] for completion in group["completions"])


@pytest.mark.parametrize(
    "env, words",
    [
        ({"LERNING_RATE": "1"}, "unknown setting LERNING_RATE; did you mean LEARNING_RATE?"),
        ({"TRAIN_MICRO_BATCH_SIZE": "7"}, "TRAIN_MICRO_BATCH_SIZE=7 must divide local_batch"),
        ({"OUTPUT_DIR": str(REPO / "LICENSE")}, "LICENSE cannot be written"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(
    tmp_path: Path, env: dict[str, str], words: str
) -> None:
    mistaken = train(tmp_path / "run", **env)
    assert mistaken.code == 2, mistaken.errors
    last = mistaken.errors.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last
    assert "Traceback" not in mistaken.errors
    assert not (tmp_path / "run").exists()


# ---- Guards on the text --------------------------------------------------------------------------


def code() -> dict[str, Path]:
    """{module: file} of all code but the tests, such as "models.hf"."""
    files = [file for room in ROOMS for file in sorted((REPO / room).glob("*.py"))]
    named = {".".join(file.relative_to(REPO).with_suffix("").parts): file for file in files}
    return {name: file for name, file in named.items() if file.stem != "__init__"}


def imports(file: Path) -> set[str]:
    """The names of all that a file imports anywhere in it."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    froms = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    names |= {n.module for n in froms} | {f"{n.module}.{a.name}" for n in froms for a in n.names}
    return names


def imported(file: Path) -> set[str]:
    """The modules of this project that a file imports."""
    return imports(file) & code().keys()


def room(module: str) -> str:
    return module.rpartition(".")[0]


def top_level() -> set[str]:
    """The modules of the top folder that train_grpo.py needs, and test_smoke: no files of yours."""
    graph = {name: imported(file) for name, file in code().items()}
    found, more = set(), {"train_grpo", "test_smoke"}
    while more:
        found |= more
        more = set().union(*(graph[name] for name in more)) - found
    return {name for name in found if room(name) == ""}


@pytest.mark.parametrize("module", code())
def test_every_file_can_be_imported(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize("module", code())
def test_a_file_imports_only_from_its_room_and_the_rooms_below(module: str) -> None:
    above = {name for name in imported(code()[module]) if room(name) not in ROOMS[room(module)]}
    assert above == (COMMANDS if module == "train_grpo" else set())


def test_every_folder_of_code_is_a_room_with_rules_for_its_imports() -> None:
    used = {name.partition(".")[0] for file in code().values() for name in imports(file)}
    assert {folder for folder in used if (REPO / folder).is_dir()} == ROOMS.keys() - {""}


def test_imports_have_no_circles() -> None:
    graph = {name: imported(file) for name, file in code().items()}
    graph["train_grpo"] -= COMMANDS
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph == {}


def test_the_top_level_is_a_handful_of_files_and_each_room_says_what_it_is() -> None:
    top = top_level()
    known = (
        "train_grpo config rewards data rollout sampling loss loss_pallas update metrics startup"
    )
    assert {*known.split(), "test_smoke"} <= top and len(top) <= 14
    for folder in ROOMS.keys() - {""}:
        text = (REPO / folder / "__init__.py").read_text(encoding="utf-8")
        assert re.fullmatch(r'"""[^"]+[.]"""\n', text), folder


def test_files_that_people_copy_alone_import_nothing_of_ours() -> None:
    for name in ("loss", "models.logps"):
        assert imported(code()[name]) == set(), name
    assert imported(code()["loss_pallas"]) == {"models.logps"}
    everyone = {name: imported(file) for name, file in code().items()}
    takes_config = {name for name, needs in everyone.items() if "config" in needs}
    assert {n for n in takes_config if room(n) != "tools"} == {
        "train_grpo",
        "startup",
        "review",
        "rollout",
        "rollout_sglang",
        "test_smoke",
    }


def settings_read(code: str) -> set[str]:
    """Names of what is read from a `cfg`, or from the `cfg` of something, as in run.cfg.seed."""
    reads = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    reads = [node for node in reads if isinstance(node.ctx, ast.Load)]
    return {
        node.attr
        for node in reads
        if getattr(node.value, "id", getattr(node.value, "attr", "")) == "cfg"
    }


def test_every_setting_is_read() -> None:
    modules = [name for name in code() if room(name) != "tools"]
    texts = [code()[name].read_text(encoding="utf-8") for name in modules]
    texts.append(code()["config"].read_text(encoding="utf-8").replace("self.", "cfg."))
    read = set.union(*map(settings_read, texts))
    # These are read by name.
    read |= {*sizes.PASS_SIZES, *sizes.STEP_SIZES, *sizes.MICRO_SIZES, *Objective._fields}
    assert {field.name for field in dataclasses.fields(config.Config)} - read == set()


def test_a_setting_is_not_read_by_another_whose_name_begins_with_it() -> None:
    assert settings_read("f(cfg.dataset_config)") == {"dataset_config"}
    assert settings_read("cfg.steps = other.seed = run.cfg.top_k  # cfg.top_p") == {"top_k"}


def test_the_readme_s_commands_are_those_that_ci_runs() -> None:
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    ci = (REPO / ".ci" / "run").read_text(encoding="utf-8").replace(" --quiet", "")
    lines = [line.replace(" --durations=10", "") for line in ci.splitlines()]
    commands = [
        *("pip install -r requirements.txt", "STEPS=1 python train_grpo.py"),
        *("pip install -r requirements-dev.txt", "pytest", "pytest -m slow"),
        *("pip install -r requirements-parity.txt", "pytest -m parity"),
        "pytest -m engine",
    ]
    found = [next(i for i, line in enumerate(lines) if line.endswith(c)) for c in commands]
    assert found == sorted(found), "in the README's order"
    for command in commands:
        assert re.search(rf"{re.escape(command)}[`\n ]", readme), command
    assert ci.count("--durations=10") == 4
