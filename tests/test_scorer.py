"""REWARD_MODEL_PATH: the scores are TRL's, however they are computed, a run learns from them, and
what cannot score is refused.

goldens/scorer has four tiny random models, and the scores that TRL 1.16 and transformers 5.23 give
to 16 conversations, in float64.

`PYTHONPATH=. python tests/test_scorer.py FOLDER` writes a reward model that prefers short answers.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from mistakes import few, refused
from runs import (
    REPO,
    Result,
    assert_same_run,
    copy_at_call,
    environment,
    run_as_user_here,
    train,
    train_two,
)
from safetensors.numpy import load_file, save_file
from small_model import copy_tiny, tensor_shapes, train_layout, write_config

import train_grpo
from chat import ChatFormat
from config import Config
from data import Prompt
from extras.scorer import Scorer, read_scorer
from fingerprint import result_fingerprint
from infra.sizes import derive_sizes
from model import hf
from rewards import RewardFunction, total_rewards
from run import Run
from startup import set_up

GOLDENS = Path(__file__).parent / "goldens" / "scorer"
TRL = json.loads((GOLDENS / "scores.json").read_text(encoding="utf-8"))
TEXTS = [conversation["completion"] for conversation in TRL["conversations"]]
CHATS = [conversation["prompt"] for conversation in TRL["conversations"]]
COLUMNS = {"question": [chat[-1]["content"] for chat in CHATS], "prompts": CHATS}
TINY = REPO / "tiny"


def write_scorer_of_lengths(folder: Path) -> Path:
    """A reward model whose score is about 50 times the share of a text's tokens that begin a turn,
    so that it falls with the length: its attention is the mean over all tokens."""
    D, V = 16, 576
    config = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), D)
    ones = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config |= dict.fromkeys(ones, 1) | {"vocab_size": V, "tie_word_embeddings": False}
    config |= {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}
    config |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 1e4}
    write_config(copy_tiny(folder), config)
    shapes = tensor_shapes(config)
    tensors = {name: np.full(shapes[name], "norm" in name, np.float32) for name in shapes}
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:1]
    begin = hf.load_tokenizer(TINY).convert_tokens_to_ids("<|im_start|>")
    tensors["model.embed_tokens.weight"][:, 0] = 1
    tensors["model.embed_tokens.weight"][begin, 1] = 1
    tensors["model.layers.0.self_attn.v_proj.weight"][2, 1] = 1
    tensors["model.layers.0.self_attn.o_proj.weight"][2, 2] = 1
    tensors["score.weight"][0, 2] = 50 / 8**0.5 / 4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# ---- The scores ----------------------------------------------------------------------------------


def settings_of(folder: Path, tmp_path: Path, **env: str) -> Config:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TRL["judge_prompt"])
    given = {"REWARD_FN": "reward_correct,reward_model", "REWARD_MODEL_PATH": str(folder)}
    if "judge" in folder.name:
        given["JUDGE_PROMPT"] = str(prompt)
    return Config.from_env(environment("NUM_PRE_Q=4 BATCH_SIZE=4 DTYPE=float32") | given | env)


def place(scorer: Scorer, *mesh: int) -> Scorer:
    """Reads the weights onto this mesh."""
    scorer.params, scorer.compute = None, scorer.compute._replace(layout=train_layout(*mesh))
    scorer.prepare(ChatFormat(None, []), [Prompt([1], {"question": "1 + 1?", "answer": "2"})])
    return scorer


def scorer_of(folder: Path, tmp_path: Path, **env: str) -> Scorer:
    cfg = settings_of(folder, tmp_path, **env)
    return place(read_scorer(cfg, derive_sizes(cfg, 1, 8)), 1, 1, 1)


def scores_of(scorer: Scorer, order: list[int] | None = None) -> np.ndarray:
    order = [*range(len(TEXTS))] if order is None else order
    columns = {name: [values[i] for i in order] for name, values in COLUMNS.items()}
    return np.array(scorer([TEXTS[i] for i in order], trainer_state={}, **columns), float)


JUDGES = {name: name.removesuffix("_thinking") for name in TRL["judgements"]}


@pytest.mark.parametrize("name", ["qwen3", "llama", *JUDGES])
def test_the_scores_are_those_of_trl_in_every_batch_order_and_mesh(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    golden, env = TRL["judgements"].get(name), {}
    if golden:
        env = {"JUDGE_TEMPLATE_KWARGS": json.dumps(golden["template_kwargs"])}
    scorer = scorer_of(GOLDENS / JUDGES.get(name, name), tmp_path, **env)
    scores, printed = scores_of(scorer), capsys.readouterr().out
    metrics = scorer.take_metrics()
    assert metrics.pop("too_long") == metrics.pop("too_long_frac") == 0
    if golden:
        np.testing.assert_allclose(scores, golden["p_yes"], atol=1e-5)
        np.testing.assert_allclose(np.log(scores / (1 - scores)), golden["log_odds"], atol=1e-4)
        probability = np.mean(golden["mass"])
        assert metrics == {"words_probability": pytest.approx(probability, rel=1e-4)}
        assert f"JUDGE_WORDS=Yes,No have probability {probability:.2g}: the judge would" in printed
    else:
        np.testing.assert_allclose(scores, TRL["scores"][name], atol=1e-4)
        assert metrics == {}
        # What other readings of the text would give is far away.
        for other in ("scores_of_the_last_token", "scores_with_a_second_bos"):
            if name == "llama":
                assert abs(scores - TRL[other][name]).max() > 0.2
    note = "as in TRL the token before the final '<|im_end|>', its pad token, is scored: here '.'"
    assert (note in printed) == (name == "llama")

    if name not in ("qwen3", "judge_llama"):  # one with a score.weight, and a judge
        return
    scorer.batch_size = 8
    place(scorer, 2, 2, 2)
    order = [5, 3, 12, 0, 7, 9, 15, 1, 2, 14, 4]  # 12 is the longest
    np.testing.assert_allclose(scores_of(scorer, order), scores[order], atol=1e-5)
    np.testing.assert_allclose(scores_of(scorer, [12]), scores[[12]], atol=1e-5)
    assert "the judge would" not in capsys.readouterr().out, "it is said once"


def test_bfloat16_scores_are_near(tmp_path: Path) -> None:
    for name in ("qwen3", "llama"):
        scores = scores_of(scorer_of(GOLDENS / name, tmp_path, DTYPE="bfloat16"))
        assert 0 < abs(scores - TRL["scores"][name]).max() < 0.15


def test_a_text_that_is_too_long_has_no_score_and_is_counted(tmp_path: Path) -> None:
    scorer = scorer_of(GOLDENS / "qwen3", tmp_path)
    model = dataclasses.replace(scorer.compute.model, max_positions=114)  # "system 4" has 114
    scorer.compute = scorer.compute._replace(model=model)
    scores, is_too_long = scores_of(scorer), np.isin(np.arange(16), [8, 12])
    assert (np.isnan(scores) == is_too_long).all()
    near = TRL["scores"]["qwen3"]
    np.testing.assert_allclose(scores[~is_too_long], np.array(near)[~is_too_long], atol=1e-4)
    assert scorer.take_metrics() == {"too_long": 2, "too_long_frac": 2 / 16}
    # A step that MAX_HOURS gave up, and an evaluation of three questions in two passes.
    for texts in ([0, 1, 2, 3], [8, 0], [12, 12]):
        scores_of(scorer, texts)
    assert scorer.take_metrics(3) == {"too_long": 2, "too_long_frac": 2 / 3}
    # Two calls, each with two texts of two processes; the fifth text is the first of process 1.
    scorer.measured = [np.ones((2, 2)), np.array([[np.nan, np.nan], [1, 1]])]
    assert scorer.take_metrics(5) == {"too_long": 2, "too_long_frac": 2 / 5}
    scorer.params = jax.tree.map(lambda x: x * np.nan, scorer.params)
    line = "reward reward_model, completion 0: nan is neither a finite number nor None"
    refused(lambda: total_rewards(TEXTS, dict(COLUMNS), [scorer.as_reward_function()], [1.0]), line)


def test_it_is_called_after_the_functions_of_files_and_keeps_its_column() -> None:
    called = []

    def function(name: str, value: float) -> RewardFunction:
        def rewards(completions: list[str], **columns: list) -> list[float]:
            called.append(name)
            return [value] * len(completions)

        return RewardFunction(name, rewards)

    functions = [function("first", 1), function("reward_model", 2), function("last", 3)]
    totals, rewards = total_rewards(["a"], {}, functions, [1, 10, 100])
    assert called == ["first", "last", "reward_model"]
    assert rewards.tolist() == [[1, 2, 3]] and totals.tolist() == [321]


# ---- Bad input -----------------------------------------------------------------------------------


def run_of(folder: Path, tmp_path: Path, **env: str) -> Run:
    cfg = settings_of(folder, tmp_path)
    base = few() | {"MODEL_PATH": str(TINY), "STEPS": "1"}
    base |= environment("MAX_LENGTH_SAMPLE=16 NUM_PRE_Q=4 ROLLOUT_GLOBAL_BATCH_SIZE=8")
    names = ("reward_fn", "reward_model_path", "judge_prompt")
    return set_up(Config.from_env(base | {n.upper(): getattr(cfg, n) for n in names} | env))


def copy(name: str, folder: Path, tensors: dict[str, Any] | None = None, **config: object) -> Path:
    """A copy of a golden's folder with more tensors, or without those that are None."""
    shutil.copytree(GOLDENS / name, folder)
    file = folder / "model.safetensors"
    if tensors:
        changed = load_file(file) | tensors
        save_file({n: x for n, x in changed.items() if x is not None}, file, {"format": "pt"})
    if config:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | config))
    return folder


SQUARE = {"score.weight": None, "score.0.weight": np.ones((48, 48), np.float32)}
VALUES = {"v_head.summary.weight": np.ones((1, 32), np.float32)}
OTHER_HEADS = [  # of two labels, of tokens, of a process, of values
    ("qwen3", {"score.weight": np.ones((2, 48), np.float32)}, ": score.weight is [2, 48], its"),
    ("qwen3", {"score.bias": np.ones(1, np.float32)}, " has unknown tensors score.bias"),
    ("qwen3", SQUARE, " lacks tensors score.weight"),
    ("judge_llama", VALUES, " has unknown tensors v_head.summary.weight"),
]


@pytest.mark.parametrize("name, tensors, words", OTHER_HEADS)
def test_another_head_is_refused_by_its_tensor(
    name: str, tensors: dict, words: str, tmp_path: Path
) -> None:
    folder = copy(name, tmp_path / "other", tensors)
    refused(lambda: run_of(folder, tmp_path), f"REWARD_MODEL_PATH={folder}: {folder}{words}")


FIELDS = ": its fields are {question}, {answer}, {completion}, and other"
UNREAD = {"JUDGE_TEMPLATE_KWARGS": '{"enable_thoughts": 1}'}
BAD_JUDGES = [  # settings, or the text of JUDGE_PROMPT, and words of the line
    ({"JUDGE_PROMPT": ""}, " without score.weight is a judge; set JUDGE_PROMPT to a file with {"),
    ({"JUDGE_WORDS": "Yes,Certainly not"}, "JUDGE_WORDS=Yes,Certainly not: its tokenizer m"),
    ({"JUDGE_WORDS": "Yes,Yes"}, "JUDGE_WORDS=Yes,Yes: its tokenizer makes ['Yes'] and ['Yes'] of"),
    (UNREAD, "its template does not use 'enable_thoughts'; it uses enable_thinking"),
    ("Is {answer} right?", " has no {completion}, the text that is judged"),
    ("{completion} {reply}", FIELDS),
    ("\\boxed{{completion}", FIELDS),
]


@pytest.mark.parametrize("env, words", BAD_JUDGES)
def test_a_judge_that_cannot_judge_is_one_line(env: Any, words: str, tmp_path: Path) -> None:
    if isinstance(env, str):
        (tmp_path / "bad.txt").write_text(env)
        env = {"JUDGE_PROMPT": str(tmp_path / "bad.txt")}
        words = f"JUDGE_PROMPT={tmp_path}/bad.txt{words}"
    refused(lambda: run_of(GOLDENS / "judge_qwen3", tmp_path, **env), words)


def test_a_scorer_that_cannot_score_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    words = f"REWARD_MODEL_PATH={missing}: {missing}: this folder does not exist"
    refused(lambda: run_of(missing, tmp_path), words)
    short = copy("qwen3", tmp_path / "short", max_position_embeddings=40)
    words = f"REWARD_MODEL_PATH={short}: MAX_LENGTH_SAMPLE=16 after the longest prompt makes "
    refused(lambda: run_of(short, tmp_path), words, "the model has 40 positions")
    (short / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    words = f"REWARD_MODEL_PATH={short}: {short}: its tokenizer has no chat template; use an instr"
    refused(lambda: run_of(short, tmp_path), words)
    deaf = copy("qwen3", tmp_path / "deaf")
    template = {"chat_template": "{% for m in messages[:1] %}{{ m['content'] }}{% endfor %}"}
    (deaf / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | template))
    words = f"REWARD_MODEL_PATH={deaf}: its chat template leaves out texts of assistant"
    refused(lambda: run_of(deaf, tmp_path), words)


def test_an_export_does_not_overwrite_the_scorer(tmp_path: Path) -> None:
    earlier = copy("qwen3", tmp_path / "hf")
    (earlier / "exported_from.json").write_text("{}")
    words = f"EXPORT_HF={earlier} is REWARD_MODEL_PATH; the model would be overwritten"
    refused(lambda: run_of(earlier, tmp_path, EXPORT_HF=str(earlier)), words)


def test_a_resumed_run_needs_the_same_scorer_template_and_prompt(tmp_path: Path) -> None:
    def differs(folder: Path, **env: str) -> set[str]:
        other = result_fingerprint(run_of(folder, tmp_path, **env))
        return {n for n in before | other if before.get(n) != other.get(n)}

    before = result_fingerprint(run_of(GOLDENS / "judge_qwen3", tmp_path))
    same = copy("judge_qwen3", tmp_path / "judge_same")
    assert differs(same) == set()
    values = json.loads((same / "tokenizer_config.json").read_text())
    values["chat_template"] = "{# new #}" + values["chat_template"]
    (same / "tokenizer_config.json").write_text(json.dumps(values))
    assert differs(same) == {"the scorer's chat template"}
    norm = {"model.norm.weight": np.full(48, 2, np.float32)}
    assert differs(copy("judge_qwen3", tmp_path / "judge_other", norm)) == {"the scorer's weights"}
    (tmp_path / "new.txt").write_text("{completion}?")
    new = {"JUDGE_PROMPT": str(tmp_path / "new.txt")}
    assert differs(GOLDENS / "judge_qwen3", **new) == {"the text of JUDGE_PROMPT"}
    kwargs = {"JUDGE_TEMPLATE_KWARGS": '{"enable_thinking": false}'}
    assert differs(GOLDENS / "judge_qwen3", **kwargs) == {"JUDGE_TEMPLATE_KWARGS"}
    assert differs(GOLDENS / "judge_qwen3", JUDGE_WORDS="No,Yes") == {"JUDGE_WORDS"}
    alone = {"REWARD_FN": "reward_correct", "REWARD_MODEL_PATH": "", "JUDGE_PROMPT": ""}
    names = {n for n in before if "scorer" in n or "JUDGE" in n}
    assert differs(TINY, **alone) == names | {"REWARD_FN", "REWARD_WEIGHTS"} and len(names) == 6


SFT = "LOSS_TYPE=sft NUM_PRE_Q=1 COMPLETION_COLUMN=answer MAX_LENGTH_SAMPLE=64"


@pytest.mark.parametrize(
    "settings, is_read",
    [
        ("STEPS=1 EVAL_EVERY_STEPS=0", True),
        ("STEPS=0 EVAL_EVERY_STEPS=0", False),
        (f"{SFT} EVAL_EVERY_STEPS=1", True),
        (f"{SFT} EVAL_EVERY_STEPS=0", False),
    ],
)
def test_the_weights_are_read_only_if_completions_are_scored(
    settings: str, is_read: bool, tmp_path: Path
) -> None:
    run = run_of(copy("qwen3", tmp_path / "scorer"), tmp_path, **environment(settings))
    assert (run.rollout.functions[1].call.params is not None) == is_read


# ---- Runs ----------------------------------------------------------------------------------------

LEARNS = environment(
    """REWARD_FN=reward_correct,reward_model REWARD_WEIGHTS=0,1 BATCH_SIZE=8 NUM_PRE_Q=8
    TRAIN_MICRO_BATCH_SIZE=8 LEARNING_RATE=1e-3 LR_SCHEDULE=constant WARMUP_RATIO=0 REMAT=none
    EXPORT_HF=none STEPS=8"""
)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scorer_of_lengths(tmp_path_factory.mktemp("scorers") / "short")


MORE = environment(
    """EVAL_EVERY_STEPS=8 EVAL_PROMPTS=8 SAMPLE_EVERY_STEPS=1 SAVE_EVERY_STEPS=6
    NUM_MINI_BATCHES=2 DYNAMIC_SAMPLING=1 DYNAMIC_SAMPLING_MAX_ROUNDS=2"""
)


class Learnt(NamedTuple):
    result: Result
    digests: list[str]  # of the scorer's weights in each step
    killed: Path  # what a kill in the seventh step leaves


@pytest.fixture(scope="module")
def learnt(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    folder, runs, digests = tmp_path_factory.mktemp("runs"), [], []
    out, killed = folder / "learnt", folder / "killed"
    start, update = train_grpo.start, train_grpo.update_policy

    def started(cfg: Config) -> tuple:
        runs.append(start(cfg))
        return runs[0]

    def updated(*arguments: Any) -> tuple:
        done, scorer = update(*arguments), runs[0][0].rollout.functions[1].call
        arrays = b"".join(x.tobytes() for x in jax.tree.leaves(jax.device_get(scorer.params)))
        digests.append(hashlib.sha256(arrays).hexdigest())
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_grpo, "start", started)
        patch.setattr(train_grpo, "update_policy", updated)
        copy_at_call(patch, train_grpo, "update_policy", 7, out, 6, killed)
        result = train(out, **LEARNS | MORE, REWARD_MODEL_PATH=str(short))
    return Learnt(result, digests, killed)


def test_completions_become_shorter_and_the_scorer_stays_as_it_is(learnt: Learnt) -> None:
    steps = [record for record in learnt.result.records if "train-other/loss" in record]
    tokens = [record["train-seq_len/completion/mean"] for record in steps]
    scores = [record["train-reward/func/reward_model/mean"] for record in steps]
    assert len(steps) == 8 and tokens[-1] < tokens[0] - 2 and scores[-1] > scores[0] + 0.1
    assert [record["train-reward/total/mean"] for record in steps] == scores
    assert {record["train-reward/model/too_long"] for record in steps} == {0}
    assert len(learnt.digests) == 8 and len({*learnt.digests}) == 1


def test_evaluations_samples_and_pictures_have_the_score(learnt: Learnt) -> None:
    evaluated = [record for record in learnt.result.records if "eval/accuracy" in record]
    means = [record["eval/reward/func/reward_model/mean"] for record in evaluated]
    assert len(means) == 2 and means[1] > means[0] > 1
    assert evaluated[0]["eval/reward/model/too_long_frac"] == 0
    for name in ("samples.jsonl", "eval.jsonl"):
        entry = json.loads((learnt.result.out / name).read_text(encoding="utf-8").splitlines()[0])
        assert entry["completions"][0]["rewards"]["reward_model"] > 1
    assert "  reward=" in learnt.result.lines and " reward_model=" in learnt.result.lines
    assert "train-reward/func/reward_model/mean" in (learnt.result.out / "report.html").read_text()


def test_ask_prints_the_score_without_an_answer(short: Path, tmp_path: Path) -> None:
    settings = {"REWARD_MODEL_PATH": str(short), "REWARD_FN": "reward_correct,reward_model"}
    done = run_as_user_here(tmp_path / "ask", "--ask", "1 + 1?", RESUME="never", **settings)
    assert done.code == 0, done.errors
    *_, blank, last = done.lines.splitlines()
    assert blank == "" and last.startswith("reward_model ") and float(last.split()[1]) > 1


def test_eval_only_refuses_reward_model_as_the_first_function(short: Path, tmp_path: Path) -> None:
    settings = {"REWARD_MODEL_PATH": str(short), "REWARD_FN": "reward_model", "RESUME": "never"}
    done = run_as_user_here(tmp_path / "eval", "--eval-only", **settings, **few())
    line = "error: REWARD_FN=reward_model: evaluations count the rewards of 1 of the first function"
    assert done.code == 2 and done.errors.startswith(line)


def test_a_run_that_is_killed_and_resumed_ends_like_an_undisturbed_one(
    learnt: Learnt, short: Path
) -> None:
    resumed = train(learnt.killed, **LEARNS | MORE, REWARD_MODEL_PATH=str(short))
    assert "resumed after 6 of 8 steps" in resumed.lines
    assert_same_run(learnt.result.out, learnt.killed, 8)


@pytest.mark.slow
def test_two_processes_give_texts_of_other_lengths_the_same_scores(tmp_path: Path) -> None:
    """They agree on the widths, and on the probability of the judge's words."""
    (tmp_path / "prompt.txt").write_text(TRL["judge_prompt"])
    settings = LEARNS | {"REWARD_MODEL_PATH": str(GOLDENS / "judge_qwen3"), "STEPS": "1"}
    settings |= {"JUDGE_PROMPT": str(tmp_path / "prompt.txt"), "SAMPLE_EVERY_STEPS": "1"}
    half = {"BATCH_SIZE": "4", "MESH_SHAPE": "2,2,1", "TRAIN_MICRO_BATCH_SIZE": "4"}
    alone = train(tmp_path / "alone", **settings)
    both, _ = train_two(tmp_path / "both", 2, **settings | half)
    scores = []
    for result in (alone, both):
        entries = map(json.loads, (result.out / "samples.jsonl").open(encoding="utf-8"))
        completions = [x for entry in entries for x in entry["completions"]]
        scores.append([x["rewards"]["reward_model"] for x in completions])
    assert len(scores[0]) == 16 and len({*scores[0]}) > 4
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)
    for name in ("func/reward_model/mean", "model/words_probability"):
        means = [result.records[0][f"train-reward/{name}"] for result in (alone, both)]
        assert means[1] == pytest.approx(means[0], rel=1e-5)


if __name__ == "__main__":
    write_scorer_of_lengths(Path(sys.argv[1]))
