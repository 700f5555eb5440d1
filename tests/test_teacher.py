"""A teacher: the advantages of tokens have TRL's losses, and a run learns from the teacher that
TEACHER_PATH names, however it is computed.

goldens/teacher.npz and teacher.json have what TRL 1.16 makes of seeded random inputs: its losses
with advantages [B, T], and the gradient of GKD's reverse KL over a vocabulary (beta = 1).
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import few, refused
from runs import REPO, Result, environment, train, train_two
from safetensors.numpy import load_file, save_file
from small_model import (
    copy_tiny,
    numpy_logits,
    numpy_softmax,
    train_layout,
    value_and_grad,
    without_rewards,
)

from config import Config
from data import Prompt
from extras.teacher import load_weights
from fingerprint import result_fingerprint
from infra.chips import exit_on_oom
from loss import Objective, policy_loss
from model import hf
from optimizer import init_state
from rollout import prompts_of_round
from rows import Batch
from run import Run
from startup import set_up
from tools.bench import make_random_model
from train_grpo import with_logps
from update import LearnerConfig, train_on_mini_batch

GOLDENS = Path(__file__).parent / "goldens"
TRL = json.loads((GOLDENS / "teacher.json").read_text(encoding="utf-8"))
ARRAYS = dict(np.load(GOLDENS / "teacher.npz"))
TINY = REPO / "tiny"


# ---- The loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRL)
def test_the_objective_with_an_advantage_for_each_token_is_that_of_trl(name: str) -> None:
    x = {key[8:]: value for key, value in ARRAYS.items() if key.startswith("loss.in.")}
    config, mask = TRL[name]["config"], x["completion_mask"]
    loss_type, eps_high = config["loss_type"], config.get("eps_high", 0.2)
    settings: dict[str, Any] = {"eps_high": eps_high, "max_length_sample": 32}
    settings |= {key: config[key] for key in ("beta", "entropy_coef") if key in config}
    if config.get("importance_sampling_level") == "sequence":
        loss_type = "gspo"
    old = x[config.get("old", "logps")]
    sampling_logps = old
    if "is_ratio" in config:  # 0 is what TRL makes of more than its cap
        weight = x[config["is_ratio"]]
        sampling_logps = old - np.log(np.where(weight > 0, weight, 10.0))
        settings["is_mode"] = "token_mask"
    advantages = ARRAYS[f"loss.{name}.advantages"]
    coef, behind = config["coef"], x[config["behind"]]
    by_hand = coef * (x["teacher_logps"] - behind)
    by_hand += x["advantages"][:, None] if config["with_task"] else 0
    np.testing.assert_allclose(advantages[mask > 0], by_hand[mask > 0], atol=1e-5)
    dirty = np.where(mask > 0, advantages, np.nan)
    loss, grad, metrics = value_and_grad(
        *(x["logps"], old, dirty, mask, mask.sum()),
        loss_type=loss_type,
        ref_logps=x["ref_logps"],
        entropy=x["entropies"],
        sampling_logps=sampling_logps,
        **settings,
    )
    assert loss == pytest.approx(float(ARRAYS[f"loss.{name}.loss"]), abs=1e-6)
    np.testing.assert_allclose(grad, ARRAYS[f"loss.{name}.grad_logps"], atol=1e-6)
    expected = {n: v for n, v in TRL[name]["metrics"].items() if not n.startswith("entropy")}
    metrics = {n: v for n, v in metrics.items() if not n.startswith("is_weight/")}
    assert metrics == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.9])
def test_summed_over_the_vocabulary_the_gradient_is_that_of_the_reverse_kl(
    temperature: float,
) -> None:
    student, teacher, mask = (
        ARRAYS[f"vocabulary.in.{name}"]
        for name in ("student_logits", "teacher_logits", "completion_mask")
    )  # [B, T, V], [B, T, V], [B, T]
    B, T, V = student.shape
    teacher_logps = jax.nn.log_softmax(teacher / temperature)
    of_all = np.repeat(mask, V, axis=1)  # [B, T*V]: each token of the vocabulary is drawn once

    def loss(logits: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(logits / temperature)
        old = jax.lax.stop_gradient(logps)
        advantages = jnp.exp(old) * (teacher_logps - old)  # weighted with its probability
        flat = (x.reshape(B, T * V) for x in (logps, old, advantages))
        return policy_loss(*flat, of_all, mask.sum(), objective=Objective())[0]

    grad = jax.grad(loss)(jnp.asarray(student))
    np.testing.assert_allclose(grad, ARRAYS[f"vocabulary.t{temperature}"], atol=1e-6)


def test_advantages_of_another_shape_are_refused() -> None:
    x = np.zeros((2, 3), np.float32)
    for shape in ((2, 1), (3,), (2, 3, 1)):
        with pytest.raises(ValueError, match=r"needs advantages \[B\] or \[B, T\]"):
            policy_loss(x, x, np.zeros(shape), x, 6, objective=Objective())


# ---- An update, however it is computed -----------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny/ with noise in its weights."""
    folder = copy_tiny(tmp_path_factory.mktemp("teacher") / "noisy")
    rng, file = np.random.default_rng(0), folder / "model.safetensors"
    tensors = load_file(file)
    for name, x in tensors.items():
        tensors[name] = x + 0.4 * x.std() * rng.normal(size=x.shape).astype(np.float32)
    save_file(tensors, file, {"format": "pt"})
    return folder


def run_of(teacher: Path, text: str = "", **env: str) -> Run:
    base = f"NUM_PRE_Q=4 ROLLOUT_GLOBAL_BATCH_SIZE=8 MAX_LENGTH_SAMPLE=16 STEPS=1 {text}"
    paths = {"MODEL_PATH": str(TINY), "TEACHER_PATH": str(teacher)}
    return set_up(Config.from_env(few() | environment(base) | paths | env))


def batch_for(run: Run, support: int = 0) -> Batch:
    """16 sequences of random tokens after 4 prompts, with advantages that cancel in a group."""
    rng, B, T = np.random.default_rng(1), 16, 16
    lengths = rng.integers(3, T + 1, B).astype(np.int32)
    ids = rng.integers(0, 558, (B, T)).astype(np.int32)
    mask = (np.arange(T) < lengths[:, None]).astype(np.int32)
    arrays = {"sampling_logps": np.zeros((B, T), np.float32), "support": None}
    arrays |= without_rewards(mask)
    if support:
        arrays["support"] = rng.integers(0, 558, (B, T, support)).astype(np.int32)
        arrays["support"] = np.concatenate([ids[..., None], arrays["support"]], axis=-1)
    prompts = [Prompt(prompt.ids[-9 - i :], {}) for i, prompt in enumerate(run.train_prompts[:4])]
    return Batch(
        prompts, ids, mask, lengths, **arrays, advantages=np.tile([1.0, -1.0, 0.5, -0.5], 4)
    )


def update_of(
    run: Run, batch: Batch | None = None, judge: LearnerConfig | None = None, **changes: Any
) -> dict[str, float]:
    """The metrics of one update from tiny/. judge: computes the teacher in place of the run's."""
    learner = dataclasses.replace(run.learner, **changes)
    judge = load_weights(judge or run.teacher, run.teacher_folder)
    model, mesh = learner.compute.model, learner.compute.layout.mesh
    params = hf.load_params(run.folder, model, mesh, jnp.float32)
    run_of_update = dataclasses.replace(run, learner=learner, teacher=judge)
    batch = with_logps(run_of_update, params, None, batch or batch_for(run))
    state = init_state(params, optimizer=learner.optimizer, model=model)
    return train_on_mini_batch(learner, state, batch, 1e-3)[1]


def test_the_advantage_of_a_token_is_the_weighted_sum(teacher: Path) -> None:
    """The teacher's log-probabilities are those of a forward in float64."""
    run = run_of(teacher, "DISTILL_COEF=0.5 REWARD_COEF=2 TEMPERATURE=0.7")
    batch, metrics = batch_for(run), update_of(run)
    folders = {"teacher": run.teacher_folder, "student": run.folder}
    logps: dict[str, list[float]] = {name: [] for name in folders}
    for name, folder in folders.items():
        model = hf.read_config(folder)
        params = hf.load_params(folder, model, train_layout(1, 1, 1).mesh, jnp.float32)
        params = jax.tree.map(np.float64, params)
        for i, n in enumerate(batch.lengths):
            prompt, ids = batch.prompts[i // 4].ids, batch.completion_ids[i, :n].tolist()
            logits = numpy_logits(params, [*prompt, *ids], model)[len(prompt) - 1 : -1]
            logps[name] += np.log(numpy_softmax(logits / 0.7))[np.arange(n), ids].tolist()
    reverse_kl = np.mean(np.subtract(logps["student"], logps["teacher"]))
    mean_advantage = np.repeat(batch.advantages, batch.lengths).mean()
    assert abs(reverse_kl) > 0.1 and abs(mean_advantage) > 0.01
    assert metrics["reverse_kl"] == pytest.approx(reverse_kl, rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.5 * reverse_kl - 2 * mean_advantage, rel=1e-4)


@pytest.mark.parametrize("support", [0, 20])
def test_a_teacher_that_is_the_student_changes_nothing(support: int, tmp_path: Path) -> None:
    """Also with a support. It has more rows in the vocabulary, of which it never makes use."""
    folder = copy_tiny(tmp_path / "same", config={"vocab_size": 640})
    tensors = load_file(folder / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    more = np.tile(embed[:1], (640 - len(embed), 1))
    tensors["model.embed_tokens.weight"] = np.concatenate([embed, -3 * more])  # of large logits
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    run = run_of(folder, "REWARD_COEF=0")
    batch = batch_for(run, support)
    metrics = update_of(run, batch)
    assert abs(metrics["reverse_kl"]) < 1e-5 and abs(metrics["loss"]) < 1e-5
    assert metrics["update_token_count"] == batch.completion_mask.sum(), "none is skipped"


def test_micro_batches_packing_and_meshes_do_not_change_an_update(teacher: Path) -> None:
    """The mesh of the teacher may be another one than that of the student."""
    run, results = run_of(teacher), []

    def placed(learner: LearnerConfig, mesh: tuple[int, ...], micro: int) -> dict[str, Any]:
        layout = train_layout(*mesh)
        compute = learner.compute._replace(layout=layout)
        limits = learner.limits._replace(
            shards=layout.batch_shards, full_length_sequences_per_shard=micro
        )
        return {"compute": compute, "limits": limits}

    for mesh, of_teacher, micro in (((1, 1, 1), (1, 1, 1), 16), ((2, 2, 2), (1, 8, 1), 1)):
        judge = dataclasses.replace(run.teacher, **placed(run.teacher, of_teacher, micro))
        metrics = update_of(run, judge=judge, accumulates=True, **placed(run.learner, mesh, micro))
        results.append({name: metrics[name] for name in ("loss", "grad_norm", "reverse_kl")})
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_a_teacher_may_be_of_another_size_and_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 24, "vocab_size": 560}
    make_random_model(TINY, tmp_path / "other", other)
    run = run_of(tmp_path / "other")
    assert f"teacher={tmp_path}/other parameters=0.44M " in capsys.readouterr().out
    # On random tokens a random model is right more often than a trained one.
    assert -20 < update_of(run)["reverse_kl"] < -1


# ---- Bad input -----------------------------------------------------------------------------------


def test_a_teacher_that_cannot_judge_is_one_line(teacher: Path, tmp_path: Path) -> None:
    other = copy_tiny(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    tokens = json.loads(text)
    vocabulary = tokens["model"]["vocab"]
    changed = next(token for token, i in vocabulary.items() if i == 300)
    vocabulary["changed"] = vocabulary.pop(changed)
    tokens["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    line = f"token 300 of its tokenizer is 'changed', and that of the trained model {changed!r}"
    refused(lambda: run_of(other), f"TEACHER_PATH={other}: {line}; a teacher needs the same")
    shutil.rmtree(other)
    refused(lambda: run_of(other), f"TEACHER_PATH={other}: {other}: this folder does not exist")
    short = copy_tiny(tmp_path / "short", config={"max_position_embeddings": 20})
    refused(lambda: run_of(short), f"TEACHER_PATH={short}: MAX_LENGTH_SAMPLE=16 after the longest")
    longest = max(len(prompt.ids) for prompt in run_of(teacher).train_prompts)
    enough = copy_tiny(tmp_path / "enough", config={"max_position_embeddings": longest + 16})
    run = run_of(enough, ENVIRONMENT_CLASS=f"{REPO}/tests/games.py:Echo", SYSTEM_PROMPT="")
    line = f"with the text of reset: TEACHER_PATH={enough}: MAX_LENGTH_SAMPLE=16 after the longest"
    refused(lambda: prompts_of_round(run.rollout, run.train_prompts, 8, 4, 0, 0), line)
    head = {"lm_head.weight": np.ones((576, 96), np.float32)}
    tensors = load_file(TINY / "model.safetensors")
    untied = copy_tiny(tmp_path / "untied")
    save_file(tensors | head, untied / "model.safetensors", {"format": "pt"})
    refused(lambda: run_of(untied), f"TEACHER_PATH={untied}: ", "tie_word_embeddings is true, but")
    (short / "model.safetensors").unlink()
    refused(lambda: run_of(short), f"TEACHER_PATH={short}: {short} has no model.safetensors; ")
    assert run_of(short, STEPS="0", EVAL_EVERY_STEPS="1").teacher is None


def test_an_export_does_not_overwrite_the_teacher(teacher: Path, tmp_path: Path) -> None:
    """Also if the teacher is the export of an earlier run, which an export may replace."""
    earlier = Path(shutil.copytree(teacher, tmp_path / "run" / "hf"))
    (earlier / "exported_from.json").write_text("{}")
    (tmp_path / "link").symlink_to(earlier)
    is_teacher = "is TEACHER_PATH; the model would be overwritten"
    for settings, name in (
        (f"EXPORT_HF={earlier}", f"EXPORT_HF={earlier}"),
        (f"EXPORT_HF={tmp_path}/link", f"EXPORT_HF={tmp_path}/link"),
        (f"OUTPUT_DIR={tmp_path}/run", f"OUTPUT_DIR={tmp_path}/run: its hf"),
    ):
        refused(lambda at=settings: run_of(earlier, at), f"{name} {is_teacher}")
    assert run_of(earlier, f"OUTPUT_DIR={tmp_path}/run EXPORT_HF=none").teacher


def test_a_teacher_that_does_not_fit_says_its_size(
    teacher: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    run = run_of(teacher)
    learner = run.teacher
    wide = dataclasses.replace(learner.compute.model, vocab_size=2**30)
    learner = dataclasses.replace(learner, compute=learner.compute._replace(model=wide))
    monkeypatch.setattr(hf, "load_params", too_large)
    with pytest.raises(SystemExit) as ended, exit_on_oom(run.cfg):
        load_weights(learner, teacher)
    assert ended.value.code == 3
    line = "error: the teacher (64.00 GiB on each device) does not fit in the memory of a device: "
    assert capsys.readouterr().err.startswith(line)


def test_a_resumed_run_needs_the_same_teacher(teacher: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(teacher, tmp_path / "moved"))
    before, after = (result_fingerprint(run_of(folder)) for folder in (teacher, moved))
    assert before == after
    other = result_fingerprint(run_of(TINY))
    assert {n for n in before if before[n] != other[n]} == {"the teacher's weights"}


# ---- Runs ----------------------------------------------------------------------------------------

SETTINGS = environment(
    """BATCH_SIZE=16 NUM_PRE_Q=1 REWARD_COEF=0 TRAIN_MICRO_BATCH_SIZE=8 STEPS=10 REMAT=none
    LEARNING_RATE=1e-4 LR_SCHEDULE=constant WARMUP_RATIO=0 NUM_MINI_BATCHES=2 TOP_K=64
    EXPORT_HF=none"""
)


@pytest.fixture(scope="module")
def undisturbed(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    return train(out, **SETTINGS, TEACHER_PATH=str(TINY), MODEL_PATH=str(teacher))


def test_the_reverse_kl_falls_without_a_reward_and_a_group(undisturbed: Result) -> None:
    values = [record["train-other/reverse_kl"] for record in undisturbed.records]
    assert len(values) == 10 and np.mean(values[-3:]) < 0.6 * np.mean(values[:2])
    rewards = [record["train-reward/total/mean"] for record in undisturbed.records]
    assert max(rewards) > 0, "they are logged as ever"
    assert "the policy gradient is 0" not in undisturbed.lines
    assert "verdict: no sign of trouble" in undisturbed.lines


@pytest.mark.slow
def test_two_processes_with_four_devices_each_do_not_change_a_run(
    undisturbed: Result, teacher: Path, tmp_path: Path
) -> None:
    settings = SETTINGS | {"TEACHER_PATH": str(TINY), "MODEL_PATH": str(teacher), "STEPS": "3"}
    settings |= {"MESH_SHAPE": "2,2,2", "BATCH_SIZE": "8", "TRAIN_MICRO_BATCH_SIZE": "4"}
    result, _ = train_two(tmp_path, 4, **settings)
    for name in ("train-other/loss", "train-other/reverse_kl"):
        ours, theirs = ([r[name] for r in x.records] for x in (result, undisturbed))
        assert len(ours) == 3
        assert ours == pytest.approx(theirs[:3], rel=1e-3, abs=1e-4), name
