"""A mistake of a user ends in one line that names the setting or file, and in exit code 2.

The tests of each module have the mistakes in its files; here are those that only a start finds, and
the line about an optional file that was deleted.
"""

import json
import shutil
from pathlib import Path

import pytest
from mistakes import few, mistake_of, refused
from runs import REPO, Result, run_as_user, run_here
from safetensors.numpy import save_file
from small_model import FAMILIES, tensors, write_config

import chat
import data
import train_grpo
from config import Config
from infra import hosts
from infra.mistakes import UserMistake, import_optional, reading
from model import families, hf
from startup import set_up

INPUTS = [  # environment, words of the line
    ({"REQUIRE_MULTIHOST": "1"}, "REQUIRE_MULTIHOST=1, and this process is alone"),
    ({"REQUIRE_JAX_PROCESS_COUNT": "2"}, "REQUIRE_JAX_PROCESS_COUNT=2, but 1 joined"),
    ({"REWARD_FN": "mine.py:reward"}, "REWARD_FN: there is no file mine.py"),
    ({"REWARD_WEIGHTS": "1,1"}, "REWARD_WEIGHTS=1.0,1.0 has 2 numbers; give 3"),
    ({"POLICY_LOSS_IMPL": "pallas"}, "POLICY_LOSS_IMPL=pallas needs DTYPE=bfloat16 on a TPU"),
    ({"MESH_SHAPE": "1,3,1"}, "MESH_SHAPE=1,3,1 is a mesh of 3 devices, but the run has 8"),
    ({"CHAT_TEMPLATE_KWARGS": '{"a": 1}'}, "the chat template does not use 'a', or every run sets"),
    ({"MAX_PROMPT_LENGTH": "5"}, "MAX_PROMPT_LENGTH=5: every train prompt is longer"),
    ({"MAX_LENGTH_SAMPLE": "5000"}, "MAX_LENGTH_SAMPLE=5000 after the longest prompt"),
    ({"SYSTEM_PROMPT": "prompts/mine.txt"}, "SYSTEM_PROMPT=prompts/mine.txt cannot be read: File"),
    ({"SYSTEM_PROMPT": "none.md"}, "SYSTEM_PROMPT=none.md cannot be read: FileNotFoundError: "),
    ({"SYSTEM_PROMPT": "~/none.jinja"}, "none.jinja cannot be read: FileNotFoundError: "),
    ({"SYSTEM_PROMPT": "\udcff?"}, r"a question or SYSTEM_PROMPT is not Unicode: '\udcff?'"),
    ({"DATASET": "{files}/half.jsonl"}, r"a question or SYSTEM_PROMPT is not Unicode: '\ud800'"),
    ({"CHAT_TEMPLATE": "no.jinja"}, "CHAT_TEMPLATE=no.jinja cannot be read: FileNotFoundError: "),
    ({"CHAT_TEMPLATE": str(REPO)}, f"CHAT_TEMPLATE={REPO} cannot be read: IsADirectoryError: "),
    ({"EXPORT_HF": str(REPO / "LICENSE")}, "LICENSE cannot be written"),
    ({"EXPORT_HF": str(REPO / "tiny")}, "is MODEL_PATH; the model would be overwritten"),
    ({"ATTENTION_IMPL": "splash"}, "ATTENTION_IMPL=splash: it is a TPU kernel"),
    ({"DATASET": "no/such.jsonl"}, "DATASET=no/such.jsonl: this file or folder does not exist"),
    ({"DATASET": "/no/such"}, "DATASET=/no/such: this file or folder does not exist"),
    ({"DATASET": "~no"}, "DATASET=~no: this file or folder does not exist"),  # no id of the hub
    ({"DATASET": "../no/such"}, "DATASET=../no/such: this file or folder does not exist"),
    ({"MODEL_PATH": "no/such", "DATASET": "no/such.jsonl"}, "MODEL_PATH=no/such: no such folder"),
    ({"MODEL_PATH": "./no/such"}, "MODEL_PATH=./no/such: this folder does not exist"),
    ({"MODEL_PATH": "x" * 300}, "xx cannot be read: OSError: [Errno 36] File name too long: 'xx"),
    ({"DATASET": "{files}/huge.jsonl"}, "set MAX_PROMPT_LENGTH="),
    ({"LORA_RANK": "4", "LORA_TARGETS": "q_proj,lm_head"}, "'lm_head' is none of q_proj,"),
    (
        {"LORA_BASE_DTYPE": "int8"},
        "LORA_BASE_DTYPE=int8 quantizes LoRA's frozen base, and LORA_RANK=0 trains all weights; "
        "set LORA_RANK=16",
    ),
]
LAUNCHERS = [  # a variable, words of the line
    ("JAX_COORDINATOR_ADDRESS=127.0.0.1:1", "needs JAX_NUM_PROCESSES"),
    ("JAX_COORDINATOR_ADDRESS=127.0.0.1", "127.0.0.1 is not host:port, such as"),
    ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=2: this seems to be one of"),
]


def write_lines(file: Path, examples: list) -> str:
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return str(file)


def told(capsys: pytest.CaptureFixture[str], words: str, **env: str) -> list[str]:
    """The lines of a start that contain the words."""
    capsys.readouterr()
    set_up(Config.from_env({"EVAL_EVERY_STEPS": "0"} | env))
    return [line for line in capsys.readouterr().out.splitlines() if words in line]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that rows of INPUTS name."""
    folder = tmp_path_factory.mktemp("files")
    examples = [{"question": "1 " * n, "answer": "2"} for n in [1] * 20 + [50_000]]
    write_lines(folder / "huge.jsonl", examples)  # one prompt is too long for the model
    write_lines(folder / "half.jsonl", [{"question": "\ud800", "answer": "1"}] * 2)
    return folder


@pytest.mark.parametrize(("env", "words"), INPUTS, ids=[words[:40] for _, words in INPUTS])
def test_a_setting_that_does_not_suit_the_inputs_is_named_in_one_line(files, env, words) -> None:
    env = {name: value.replace("{files}", str(files)) for name, value in env.items()}
    assert words in mistake_of(**env)


def test_a_token_that_the_model_has_no_row_for_is_a_mistake_only_in_a_prompt(tmp_path) -> None:
    """Such as the [PAD] that a trainer has added, and has named as another stop token."""
    config = FAMILIES["qwen2_tied"] | {"vocab_size": 558, "max_position_embeddings": 4096}
    write_config(tmp_path, config | {"eos_token_id": [2, 558]})
    save_file(tensors(config), tmp_path / "model.safetensors")
    shutil.copy(REPO / "tiny" / "tokenizer_config.json", tmp_path)
    content = json.loads((REPO / "tiny" / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 558, "content": "[PAD]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    run = set_up(Config.from_env(few() | {"MODEL_PATH": str(tmp_path)}))
    assert len(run.rollout.chat_format.tokenizer) == 559
    assert (run.rollout.stopping.stop_ids, run.rollout.stopping.pad_id) == ((2,), 2)
    words = "a text has the token '[PAD]' (558), for which the model has no embedding"
    assert words in mistake_of(MODEL_PATH=str(tmp_path), SYSTEM_PROMPT="Do not write [PAD].")


def with_answers(folder: Path, **answers: list[str]) -> str:
    """A dataset whose splits have these answers."""
    for split, texts in answers.items():
        examples = [{"question": f"{i} + 1?", "answer": text} for i, text in enumerate(texts)]
        write_lines(folder / f"{split}.jsonl", examples)
    return str(folder)


def test_answers_without_a_number_are_refused_where_the_reward_needs_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, words = ["1", "#### 2"], ["A", r"$5\sqrt{7}$", "72\n#### seventy-two"]
    dataset = with_answers(tmp_path, train=numbers, test=words)
    line = f"DATASET={dataset}: none of the 3 test answers, such as 'A', has a number for "
    line += "reward_correct; set ANSWER_COLUMN to a column with numbers, or "
    line += "REWARD_FN to exact_match (letters, words), "
    assert line in mistake_of(DATASET=dataset)
    with_answers(tmp_path, train=words)
    assert "none of the 3 train answers, such as" in mistake_of(DATASET=dataset)
    other = {"DATASET": dataset, "REWARD_FN": "exact_match"}
    assert len(set_up(Config.from_env(other)).train_prompts) == 3
    only_question = {"question": "1?", "answer": "A"}
    run = set_up(Config.from_env({"DATASET": dataset, "STEPS": "0"}), only_question)
    assert len(run.eval_prompts) == 1
    with_answers(tmp_path, train=numbers * 2, test=numbers + words)
    share = "3 of 5 test answers have no number, such as 'A'"
    line = f"note: {share}: reward_correct leaves them out"
    assert told(capsys, "note: ", DATASET=dataset, EVAL_EVERY_STEPS="1") == [line]


# ---- Data and rewards that do not fit together ---------------------------------------------------

FUNCTIONS = """
def letters(completions, **kwargs):
    return [1.0 for _ in completions]
def maybe(completions, answer=None, **kwargs):
    return [1.0 for _ in completions]
def compares(completions, answer, **kwargs):
    return [1.0 for _ in completions]
"""
CHATS = [{"question": [{"role": "user", "content": f"Write about {i}."}]} for i in range(20)]
TEXTS = [{"question": f"Write about {i}."} for i in range(20)]
TURNS = {
    "ENVIRONMENT_CLASS": f"{REPO}/tests/games.py:Echo",
    "CHAT_TEMPLATE": str(REPO / "docs" / "qwen3_turns.jinja"),
    "MAX_TURNS": "2",
}
NEEDS_ANSWERS = [  # examples, settings, whether they need answers
    (TEXTS, {"REWARD_FN": "{mine}:letters"}, False),
    (CHATS, {"REWARD_FN": "{mine}:maybe,reward_format,soft_overlong_penalty"}, False),
    (CHATS, {"REWARD_FN": "{mine}:letters", "ANSWER_COLUMN": "question"}, False),
    (CHATS, TURNS, False),
    (TEXTS, {"REWARD_FN": "{mine}:letters,{mine}:compares"}, True),
    (TEXTS, {"REWARD_FN": "{mine}:letters,exact_match", "REWARD_WEIGHTS": "1,0"}, True),
    (CHATS, TURNS | {"REWARD_FN": "reward_correct"}, True),
    (CHATS, {}, True),
]


@pytest.mark.parametrize("examples, env, needs", NEEDS_ANSWERS)
def test_only_a_reward_that_reads_answers_needs_them(
    tmp_path: Path, examples: list, env: dict[str, str], needs: bool
) -> None:
    mine, dataset = tmp_path / "mine.py", write_lines(tmp_path / "prompts.jsonl", examples)
    mine.write_text(FUNCTIONS)
    env = {name: value.format(mine=mine) for name, value in env.items()} | {"DATASET": dataset}
    if needs:
        line = "example 1 has no text in 'answer', but None; write it as text, or set ANS"
        assert f"{dataset} {line}" in mistake_of(**env)
    else:
        [prompt, *_] = set_up(Config.from_env(env)).train_prompts
        assert "answer" not in prompt.columns
        words = "ANSWER_COLUMN=ansver: no example of split 'train' has it; its columns are question"
        assert words in mistake_of(**env | {"ANSWER_COLUMN": "ansver"})


def asked(*messages: tuple[str, str]) -> list[dict]:
    chat = [{"role": role, "content": text} for role, text in messages]
    return [
        {"question": chat[:-1] + [chat[-1] | {"content": f"{i}?"}], "answer": "1"} for i in range(9)
    ]


BRIEF, FORM = ("system", "Be brief."), ("system", "Answer inside <answer> </answer>.")
ASKED, ASKED_FOR_TAGS = asked(("user", "")), asked(FORM, ("user", ""))
REASONED = asked((FORM[0], f"<reasoning> {FORM[1]}"), ("user", ""))
TEXT, BOTH = [{"question": "1?", "answer": "1"}] * 9, "reward_format and tag_count_reward"
REASONING = {"ANSWER_TAGS": "reasoning,answer"}
TAGS = [  # examples, settings, the functions that are named
    (ASKED, {}, BOTH),
    (asked(BRIEF, ("user", "")), {"SYSTEM_PROMPT": FORM[1]}, BOTH),
    (ASKED, {"REWARD_FN": "reward_correct,tag_count_reward"}, "tag_count_reward"),
    (TEXT, {"SYSTEM_PROMPT": "Be brief."}, BOTH),
    (ASKED_FOR_TAGS, {}, ""),
    (ASKED_FOR_TAGS, {"ANSWER_TAGS": "think,result"}, BOTH),
    (ASKED_FOR_TAGS, REASONING, BOTH),
    (REASONED, REASONING, ""),
    (TEXT, {"ANSWER_TAGS": "reasoning,result"}, ""),
    (ASKED, {"SYSTEM_PROMPT": FORM[1]}, ""),
    (asked(("user", "2?"), ("assistant", "<answer>2</answer>"), ("user", "")), {}, ""),
    (ASKED, {"REWARD_FN": "reward_correct"}, ""),
    (ASKED, {"REWARD_WEIGHTS": "1,0,0"}, ""),
    (TEXT, {}, ""),
]


@pytest.mark.parametrize("examples, env, names", TAGS)
def test_prompts_that_do_not_ask_for_the_tags_that_are_rewarded_get_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], examples: list, env: dict, names: str
) -> None:
    dataset = write_lines(tmp_path / "sums.jsonl", examples)
    lines = told(capsys, "do not ask for the tags", DATASET=dataset, **env)
    expected = f"note: 8 of 8 train prompts do not ask for the tags that {names}"
    assert [line.startswith(expected) for line in lines] == [True] * bool(names)


REPEATS = [  # train, test, settings, how many test questions are also in train
    (TEXTS, TEXTS[:8], {}, 8),
    (CHATS, [*CHATS[4:6], {"question": [{"role": "user", "content": "Another."}]}], {}, 2),
    ([{"question": "1?", "answer": "2"}], [{"question": "1?", "answer": "1"}], {}, 1),
    (TEXTS[:10], TEXTS[10:], {}, 0),
    ([{"question": "a"}], [{"question": "b"}] * 3, {}, 0),  # repeats of each other
    (TEXTS, TEXTS, {"EVAL_EVERY_STEPS": "0"}, 0),  # test is not read
    (TEXTS, TEXTS, {"STEPS": "0"}, 0),  # train is not read
    ([{"question": "Play.", "seed": 1}], [{"question": "Play.", "seed": 2}], TURNS, 0),
    ([{"question": "Play.", "seed": 1}], [{"question": "Play.", "seed": 1}], TURNS, 1),
]


@pytest.mark.parametrize("train, test, env, count", REPEATS)
def test_held_out_questions_of_a_folder_that_are_also_trained_on_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], train, test, env, count
) -> None:
    for split, examples in (("train", train), ("test", test)):
        write_lines(tmp_path / f"{split}.jsonl", [{"answer": "1"} | e for e in examples])
    env = {"DATASET": str(tmp_path), "EVAL_EVERY_STEPS": "1"} | env
    lines = told(capsys, "also in the training split", **env)
    share = f"{count} of {len(test)} held-out questions of {tmp_path} are also in the training spl"
    assert [line.startswith(share) for line in lines] == [True] * bool(count)


# ---- Errors of libraries, and of our own code ----------------------------------------------------


def test_an_error_of_a_library_is_one_line_with_what_it_reads_and_its_words() -> None:
    with pytest.raises(UserMistake) as error, reading("DATASET=a.json is not JSON"):
        json.loads("\n{")
    words = "Expecting property name enclosed in double quotes: line 2 column 2 (char 2)"
    assert str(error.value) == f"DATASET=a.json is not JSON: JSONDecodeError: {words}"


FUNCTIONS_OF_OURS = [
    *[(families, "ModelConfig"), (hf, "_tensor_shapes"), (hf, "read_text")],
    *[(data, "read_question_and_answer"), (chat, "writes_system_message")],
]


@pytest.mark.parametrize("module, name", FUNCTIONS_OF_OURS)
def test_an_error_of_our_own_code_keeps_its_traceback(monkeypatch, module, name) -> None:
    monkeypatch.setattr(module, name, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        set_up(Config.from_env(few() | {"CHAT_TEMPLATE": f"{REPO}/docs/chat_template.jinja"}))


# ---- Runs ----------------------------------------------------------------------------------------


def assert_ended(run: Result, words: str, *, leaves: bool = False) -> None:
    """The run has ended with exit code 2 and a line with these words, and left nothing but locks;
    leaves: it has made its files before it could find the mistake."""
    assert run.code == 2, run.errors
    last = run.errors.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last, run.errors
    assert "Traceback" not in run.errors
    left = [file for file in run.out.rglob("*") if file.is_file() and file.name != ".lock"]
    assert bool(left) == leaves


def test_a_mistake_ends_a_run_in_one_line_with_exit_code_2(tmp_path) -> None:
    run = run_as_user(tmp_path / "run", **few() | {"JAX_PLATFORMS": "rocm"})
    assert_ended(run, "JAX_PLATFORMS=rocm: no such device here")


@pytest.mark.parametrize("variable, words", LAUNCHERS)
def test_a_variable_of_a_launcher_without_the_others_is_a_mistake(
    monkeypatch, variable, words
) -> None:
    monkeypatch.setenv(*variable.split("="))
    refused(lambda: hosts.join_processes(1), words)


def test_a_bucket_that_is_not_there_is_a_mistake_before_a_run_leaves_anything(tmp_path) -> None:
    env = few() | {"CHECKPOINT_DIR": "nosuch://bucket"}
    run = run_here(tmp_path / "run", train_grpo, env)
    assert_ended(run, "CHECKPOINT_DIR=nosuch://bucket: ")


FAILS_AFTER = """
STEPS = []
def reward(completions, **columns):
    STEPS.append(1)
    return [1.0] * (1 if len(STEPS) > {steps} else len(completions))
"""


@pytest.mark.parametrize("steps, saved", [(0, []), (2, ["2"])])
def test_a_reward_that_fails_ends_a_run_which_first_saves_the_steps_before(
    tmp_path, steps, saved
) -> None:
    (tmp_path / "mine.py").write_text(FAILS_AFTER.format(steps=steps))
    env = few() | {"REWARD_FN": f"{tmp_path}/mine.py:reward", "STEPS": "4"}
    env |= {"EVAL_EVERY_STEPS": "0", "BATCH_SIZE": "2", "MAX_LENGTH_SAMPLE": "8"}
    run = run_here(tmp_path / "run", train_grpo, env)
    assert_ended(run, "16 rewards, not 1", leaves=True)
    summary = json.loads((run.out / "summary.json").read_text())
    assert summary["state"] == "failed" and "16 rewards, not 1" in summary["why"]
    assert [file.name for file in (run.out / "checkpoints").glob("[0-9]*")] == saved


# ---- Optional files ------------------------------------------------------------------------------

# Its text, and the error of its import. tests/test_optional.py deletes those of the project.
OPTIONAL_FILES = {
    "no_such_folder/deleted.py": (None, UserMistake),
    "rooms/needs_a_package.py": ("import no_such_package\n", ModuleNotFoundError),
    "rooms/needs_a_deleted_file.py": ("import rooms.deleted\n", ModuleNotFoundError),
    "fails_at_the_top.py": ("1 / 0\n", ZeroDivisionError),
}


@pytest.mark.parametrize("file", OPTIONAL_FILES)
def test_only_an_optional_file_that_is_missing_is_a_mistake_of_the_setting_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    text, kind = OPTIONAL_FILES[file]
    (tmp_path / "rooms").mkdir()
    if text:
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kind) as error:
        import_optional(file.removesuffix(".py").replace("/", "."), "ENVIRONMENT_CLASS=x")
    assert type(error.value) is kind
    line = f"ENVIRONMENT_CLASS=x needs {file}, which is not in this folder; "
    line += "restore it, or leave ENVIRONMENT_CLASS out"
    assert (str(error.value) == line) == (kind is UserMistake)
