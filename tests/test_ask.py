"""--eval-only and --ask of train_grpo.py: weights answer questions, and are not trained."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import APPLES, GREEDY, REPO, Result, few_examples, run_as_user, run_as_user_here
from small_model import GEMMA_TEMPLATES, train_layout, write_gemma

from config import Config
from infra.checkpoint import Checkpoints, Progress
from infra.mistakes import UserMistake
from model import hf
from model.attention import prompt_rows
from model.network import ComputeConfig, forward
from model.params import arrange_layers
from rewards import SYSTEM_PROMPT
from tools.ask import ask, find_weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Three steps that change the answers, with a full sweep at the end."""
    out = tmp_path_factory.mktemp("answers") / "run"
    settings = {"STEPS": "3", "EVAL_EVERY_STEPS": "0", "EVAL_FULL_SWEEP": "1", "BATCH_SIZE": "4"}
    settings |= {"RESUME": "never"}  # how it began does not count for --eval-only
    settings |= {"LEARNING_RATE": "3e-4", "DATASET": str(few_examples(40, 40))}
    done = run_as_user_here(out, **settings)
    assert done.code == 0, done.errors
    return done


def answers_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "eval.jsonl").open(encoding="utf-8")]


def test_eval_only_repeats_the_sweep_of_the_run_from_its_checkpoint_and_its_settings(
    trained: Result,
) -> None:
    before = {file: file.stat().st_mtime_ns for file in trained.out.rglob("*") if file.is_file()}
    done = run_as_user_here(trained.out, "--eval-only")
    assert done.code == 0, done.errors
    assert f"weights={trained.out}/checkpoints/3\n" in done.lines
    [folder] = trained.out.glob("eval_*")
    assert answers_of(folder) == answers_of(trained.out)
    swept = next(r for r in trained.records if "eval_full/accuracy" in r)
    (record,) = map(json.loads, (folder / "metrics.jsonl").open(encoding="utf-8"))
    same = [name for name in swept if not name.startswith("time/")]
    assert {name: record[name] for name in same} == {name: swept[name] for name in same}
    assert f" accuracy={swept['eval_full/accuracy']:.4f} accuracy_se=" in done.lines
    changed = [file for file, time in before.items() if file.stat().st_mtime_ns != time]
    assert changed == []
    shutil.rmtree(folder)


def test_eval_only_of_the_exported_folder_gives_the_same_answers(trained: Result) -> None:
    hf = str(trained.out / "hf")
    done = run_as_user_here(
        trained.out.parent / "other",
        "--eval-only",
        MODEL_PATH=hf,
        RESUME="never",
        DATASET=str(few_examples(40, 40)),
        MAX_LENGTH_SAMPLE="32",
    )
    assert done.code == 0, done.errors
    assert f"weights={hf}\n" in done.lines
    [folder] = done.out.glob("eval_*")
    texts = [[e["completions"][0]["text"] for e in answers_of(x)] for x in (folder, trained.out)]
    assert texts[0] == texts[1]
    assert {entry["step"] for entry in answers_of(folder)} == {0}


def weights_of(out: Path, *files: str, **settings: str) -> tuple[str, str]:
    """RESUME and MODEL_PATH of the weights with which a run with these files answers."""
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    cfg = find_weights(Config(**{"model_path": "the/base", "output_dir": str(out)} | settings))
    return cfg.resume, cfg.model_path


def test_weights_are_the_newest_checkpoint_of_the_run_or_what_its_settings_name(tmp_path) -> None:
    a, d = tmp_path / "a", str(tmp_path / "d")
    for resume in ("never", "runs/x"):
        assert weights_of(a, resume=resume) == (resume, "the/base")
    for folder, settings in ((f"{a}/checkpoints", {}), (d, {"checkpoint_dir": d})):
        checkpoints = Checkpoints(folder)
        checkpoints.save({"x": jnp.zeros(2)}, Progress(step=3))
        checkpoints.wait_until_saved()
        assert weights_of(a, **settings) == (folder, "the/base")
    assert find_weights(Config()) == Config()


@pytest.mark.parametrize(
    "files, settings, words",
    [
        (["a/config.yaml"], {}, "{out}/checkpoints; name the folder of a run"),  # runs/, not runs/a
        (["checkpoints/5.orbax-checkpoint-tmp/a"], {}, "{out}/checkpoints;"),  # killed in a save
        ([], {"output_dir": "", "checkpoint_dir": "gone"}, "CHECKPOINT_DIR=gone has no weights"),
    ],
)
def test_a_run_without_weights_is_refused_and_nothing_is_made(
    tmp_path: Path, files: list[str], settings: dict[str, str], words: str
) -> None:
    out = tmp_path / "typo"
    with pytest.raises(UserMistake, match="^[A-Z_]*_DIR=.* has no weights: no ") as error:
        weights_of(out, *files, **settings)
    assert words.format(out=out) in str(error.value) and "RESUME=never" in str(error.value)
    assert {file for file in out.rglob("*") if file.is_file()} == {out / name for name in files}


def test_ask_prints_the_greedy_answer_its_rewards_and_what_stdout_does_not_know_as_numbers(
    tmp_path: Path,
) -> None:
    more = {"PYTHONIOENCODING": "ascii", "OUTPUT_DIR": ""}
    done = run_as_user(tmp_path / "nothing", "--ask", f"€ {APPLES}", "--answer", "18", **more)
    assert (done.code, done.errors) == (0, "") and not done.out.exists()
    answer = "<think>22-7=15, 15+3=18</think>\n<answer>18</answer>"
    rewards = "reward_correct 1\nreward_format 1\ntag_count_reward 1"
    assert done.lines.endswith(f"\n\\u20ac {APPLES}\n\n{answer}\n\n{rewards}\n")


def test_ask_shows_the_answer_also_if_rewards_need_columns_that_it_does_not_have(
    tmp_path: Path,
) -> None:
    sources, reasons = [], []
    for name, arguments in (("a", "level"), ("b", "answer, hints"), ("c", "question, of_mine")):
        takes = f"(completions, {arguments}, **columns): return [1.0]\n"
        (tmp_path / f"{name}.py").write_text(f"def {name}{takes}def prefetch{takes}")
        sources.append(f"{tmp_path}/{name}.py:{name}")
        missing = re.escape(repr(arguments.split()[-1]))
        reasons.append(
            f"{name} is not known: REWARD_FN {sources[-1]} raised TypeError: .*{missing}"
        )
    functions = ",".join([*sources, "reward_correct"])
    more = {"REWARD_FN": functions, "REWARD_WEIGHTS": "", "OUTPUT_DIR": ""}
    done = run_as_user_here(tmp_path / "nothing", "--ask", APPLES, "--answer", "28", **more)
    assert (done.code, done.errors) == (0, "")
    shown, _, rewards = done.lines.partition(f"\n{APPLES}\n\n{GREEDY}\n\n")
    lines = zip([*reasons, "reward_correct 1$"], rewards.splitlines(), strict=True)
    assert shown and all(re.match(pattern, line) for pattern, line in lines)


@pytest.mark.parametrize("family", GEMMA_TEMPLATES)
def test_a_gemma_hears_the_system_prompt_and_answers_with_the_argmax_of_one_forward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """The prompt is written here. It is longer than the windows of 16 tokens."""
    folder = write_gemma(tmp_path / family, family)
    env = {"MODEL_PATH": str(folder), "MAX_LENGTH_SAMPLE": "20", "STEPS": "0", "DTYPE": "float32"}
    text, rewards = ask(Config.from_env(env), {"question": APPLES, "answer": "18"})
    no_role = "note: the chat template has no system role; system messages are prepended to"
    assert (no_role in capsys.readouterr().out) == (family == "gemma2")
    assert rewards[0] == "reward_correct 0"
    model, tokenizer = hf.read_config(folder), hf.load_tokenizer(folder)
    compute = ComputeConfig(model, jnp.dtype("float32"), train_layout(1, 1, 1))
    params = hf.load_params(folder, model, compute.layout.mesh, jnp.float32)
    layers = arrange_layers(params, "scan", compute.dtype)
    prompt = f"<|im_start|>user\n{SYSTEM_PROMPT}\n\n{APPLES}<|im_end|>\n<|im_start|>model\n"
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    end = len(ids)
    run = jax.jit(lambda x, at, mask: forward(layers, compute, x, at, prompt_rows(mask))[0])
    positions, mask = np.arange(end + 20)[None], np.ones((1, end + 20), bool)
    while len(ids) < end + 20 and ids[-1] != 2:
        padded = np.array([ids + [0] * (end + 20 - len(ids))])
        hidden = run(padded, positions, mask)[0, len(ids) - 1]
        ids.append(int((hidden @ params.embed.T).argmax()))  # a softcap keeps the order
    answer = ids[end:-1] if ids[-1] == 2 else ids[end:]
    assert text == tokenizer.decode(answer) and len({*answer}) > 1


def test_ask_takes_a_list_of_messages_whose_system_message_replaces_the_default_one(
    tmp_path: Path,
) -> None:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": APPLES}]
    settings = {"OUTPUT_DIR": "", "CHAT_TEMPLATE": str(REPO / "docs" / "qwen3_turns.jinja")}
    settings |= {"CHAT_TEMPLATE_KWARGS": '{"enable_thinking": true}'}
    done = run_as_user_here(tmp_path / "run", "--ask", json.dumps(messages), **settings)
    assert done.lines.endswith(f"\n\n{GREEDY}\n\n"), done.errors
    assert "note: the chat template lets the model think, and MAX_LENGTH_SAMPLE=32" in done.lines


def test_the_readme_shows_what_the_tiny_model_answers(tmp_path: Path) -> None:
    done = run_as_user_here(tmp_path / "run", "--ask", APPLES, OUTPUT_DIR="")
    assert done.lines.endswith(f"\n{APPLES}\n\n{GREEDY}\n\n")
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    assert f'question="{APPLES}"' in readme
    assert f'python train_grpo.py --ask "$question" | tail -3\n{GREEDY}\n' in readme


@pytest.mark.parametrize(
    "flags, env, words",
    [
        (("--eval-only",), {"RESUME": "nowhere"}, "RESUME=nowhere is not the folder of a complete"),
        (("--ask", APPLES), {}, "/nothing has no weights: no complete checkpoint in "),
        (
            ("--ask", '[ {"role": "user"}]'),
            {"OUTPUT_DIR": ""},
            "--ask: message 1 is {'role': 'user'",
        ),
        (("--ask", "a " * 3000), {"OUTPUT_DIR": ""}, "the model has 2048 positions"),
    ],
)
def test_a_mistake_with_ask_or_eval_only_is_one_line_and_exit_code_2(
    tmp_path: Path, flags: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    done = run_as_user_here(tmp_path / "nothing", *flags, **env)
    last = done.errors.strip().splitlines()[-1]
    assert done.code == 2 and words in last and "Traceback" not in done.errors
    assert not done.out.exists()
