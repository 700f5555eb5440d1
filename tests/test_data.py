"""Claims about data.py and chat.py: which examples, in which order, as which tokens."""

import datetime
import hashlib
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mistakes import mistake_of, refused
from runs import REPO, environment
from tokenizers.processors import TemplateProcessing

from chat import (
    ChatFormat,
    check_chat_format,
    check_messages,
    end_of_turn_id,
    open_think_tag,
    read_prefix_messages,
)
from data import (
    Prompt,
    batch_indices,
    build_prompts,
    drop_long_prompts,
    load_examples,
    print_uneven_head,
)
from fingerprint import json_digest
from model import hf
from rewards import reward_correct


def examples_of(n: int, first: int = 0) -> list[dict[str, str]]:
    return [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(first, n)]


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def tokenizer_of(template: object = None) -> Any:
    """The tokenizer in tiny/, with this chat template instead of its own."""
    tokenizer = hf.load_tokenizer(REPO / "tiny")
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def format_of(tokenizer: object, system_prompt: str, tools: list = ()) -> ChatFormat:
    return ChatFormat(tokenizer, [system(system_prompt)], tools=tools)


def lines_of(examples: list) -> bytes:
    return "".join(json.dumps(e) + "\n" for e in examples).encode()


def write(file: Path, examples: list) -> Path:
    """Writes the examples in the format that the file's name asks for."""
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(examples), file)
    else:
        is_json = file.suffix == ".json"
        file.write_bytes(json.dumps(examples).encode() if is_json else lines_of(examples))
    return file


LINES = lines_of(examples_of(3))

# ---- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_one_file_holds_out_its_last_tenth(tmp_path: Path, suffix: str) -> None:
    file = str(write(tmp_path / f"sums{suffix}", examples_of(30)))
    assert load_examples(file, "main", "train") == examples_of(27)
    assert load_examples(file, "main", "test") == examples_of(30, first=27)
    for examples, held_out in ((2, 1), (14, 1), (16, 2)):  # rounded, but at least one
        short = str(write(tmp_path / f"short{examples}{suffix}", examples_of(examples)))
        expected = examples_of(examples, first=examples - held_out)
        assert load_examples(short, "", "test") == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_folder_has_a_file_for_each_split(tmp_path: Path, suffix: str) -> None:
    # Older versions of datasets put a hash behind the number of a shard.
    write(tmp_path / f"train-00000-of-00002-a09b74b3ef9c3b56{suffix}", examples_of(3))
    write(tmp_path / f"train-00001-of-00002{suffix}", examples_of(5, first=3))
    write(tmp_path / f"test{suffix}", examples_of(7, first=5))
    (tmp_path / "README.md").write_text("train")
    for other in ("trained.jsonl", "train-old.jsonl", "test-1-of-2.jsonl", "test.csv"):
        (tmp_path / other).write_text("another file")
    assert load_examples(str(tmp_path), "main", "train") == examples_of(5)
    assert load_examples(str(tmp_path), "main", "test") == examples_of(7, first=5)
    write(tmp_path / f"empty{suffix}", [])
    refused(lambda: load_examples(str(tmp_path), "", "empty"), "has no examples in split 'empty'")
    write(tmp_path / f"dev{suffix}", examples_of(5) * 2)  # repeats stay, as they are written
    assert load_examples(str(tmp_path), "main", "dev") == examples_of(5) * 2


def test_held_out_questions_that_stand_in_train_are_left_out_and_a_line_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A question counts by itself, since data often have several solutions of one question."""
    test = [
        {"question": "What is 3 + 1?", "answer": "four"},  # in train, with another text
        {"question": "What is 99 + 1?", "answer": "100"},
        {"question": "What is 99 + 1?", "answer": "100"},
        {"question": "What is 99 + 1?", "answer": "#### 100"},
    ]
    file = str(write(tmp_path / "sums.jsonl", examples_of(36) + test))
    assert load_examples(file, "", "train") == examples_of(36)
    assert capsys.readouterr().out == ""
    assert load_examples(file, "", "test") == [test[1], test[3]]
    message = f"left out 2 of 4 held-out questions of {file}: they repeat train or each other\n"
    assert capsys.readouterr().out == message


NUMBERS = {x: x for x in ("-1", "0.1", "12345678901234567890123")} | {"1E+22": "1e+22"}


@pytest.mark.parametrize("number, text", NUMBERS.items())
def test_an_answer_that_is_a_number_of_json_is_its_text(tmp_path, number, text) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"problem": "?", "target": {number}, "answer": true}}\n' * 2)
    (example,) = load_examples(str(file), "", "train", "problem", "target")
    assert (example["answer"], example["target"]) == (text, json.loads(number))
    assert reward_correct([f"<answer>{number}</answer>"], [example["answer"]]) == [1.0]


def test_question_and_answer_may_stand_in_columns_of_other_names(tmp_path: Path) -> None:
    examples = [{"problem": f"{i} + 1?", "target": str(i + 1), "answer": "why"} for i in range(4)]
    file = str(write(tmp_path / "a.jsonl", examples))
    loaded = load_examples(file, "", "train", "problem", "target")
    added = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(3)]
    assert loaded == [e | texts for e, texts in zip(examples, added, strict=False)]


SEPARATED = {"question": "a\u2028b\x85c", "answer": "é\u2029"}
TEXT_FILES = {  # content, and the examples of train
    "crlf": (lines_of(examples_of(10)).replace(b"\n", b"\r\n"), examples_of(9)),
    "byte order mark": (b"\xef\xbb\xbf" + lines_of(examples_of(10)), examples_of(9)),
    "no last newline": (lines_of(examples_of(10)).rstrip(b"\n"), examples_of(9)),
    "empty lines": (LINES + b"\n  \n" + lines_of(examples_of(10, first=3)) + b"\n", examples_of(9)),
    "separators": (f"{json.dumps(SEPARATED, ensure_ascii=False)}\n".encode() * 2, [SEPARATED]),
}


@pytest.mark.parametrize("content, examples", TEXT_FILES.values(), ids=TEXT_FILES)
def test_line_ends_and_marks_of_editors_are_no_text_and_unicode_line_separators_are(
    tmp_path: Path, content: bytes, examples: list
) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_bytes(content)
    assert load_examples(str(file), "", "train") == examples


def test_a_column_that_another_replaces_is_named_unless_both_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = [
        {"problem": f"{i}+2?", "question": "see problem", "answer": "By adding.", "final": i + 2}
        for i in range(20)
    ]
    nested = [{**row, "reward_model": {"ground_truth": "7"}} for row in rows]
    asked = [
        {**row, "prompt": [user(row["question"])], "answer": str(row["final"])} for row in rows
    ]
    for examples, question, answer, names in (
        (rows, "problem", "final", ["question", "answer"]),
        (rows, "question", "final", ["answer"]),
        (nested, "question", "reward_model.ground_truth", ["answer"]),
        (rows, "problem", None, ["question"]),
        (asked, "prompt", "final", []),
        (rows, "question", "answer", []),
    ):
        file = str(write(tmp_path / "sums.jsonl", examples))
        columns = {"question": question, "answer": answer}
        load_examples(file, "", "train", question, answer, needs_answers=False)
        begun, told = "left out column", capsys.readouterr().out.splitlines()
        given = [
            f"{name!r} of split 'train': {name.upper()}_COLUMN={columns[name]}" for name in names
        ]
        assert told == [f"{begun} {each} replaces it" for each in given]


@pytest.mark.parametrize(
    "rows, column, answers",
    [
        ([{}], "answer", ["absent"] * 3),
        ([{"answer": None}, {"answer": " "}, {"answer": ""}], "answer", [None, " ", ""]),
        ([{"answer": [1]}], "answer", [[1]] * 3),
        ([{"answer": 5}, {"other": 1}], "answer", ["5", None, "5"]),
        ([{"answer": "why", "final": 5}, {"answer": "why"}], "final", ["5", None, "5"]),
        ([{"answer": "4"}, {"answer": ["4", "four"]}], "answer", ["4", ["4", "four"], "4"]),
        ([{"answer": {"a": None}}, {"answer": 7}], "answer", [{"a": None}, "7", {"a": None}]),
        ([{"final": "yes"}, {"final": False}, {"final": " "}], "final", ["yes", False, None]),
        ([{"x": {"y": []}}, {"x": {"y": "1"}}, {"x": 1}], "x.y", [[], "1", None]),
        ([{"a": {"b": "3", "c": {"d": 4}}, "answer": "1"}], "a.c.d", ["4"] * 3),
        ([{"a.b": "2", "a": {"b": "3"}, "answer": "1"}], "a.b", ["2"] * 3),  # a column's name
    ],
)
def test_examples_without_answers_are_data_if_nothing_needs_answers(
    tmp_path: Path, rows: list, column: str, answers: list
) -> None:
    """And an answer that is there is a text, as for functions that need one."""
    rows = [{"question": f"{i}?"} | rows[i % len(rows)] for i in range(20)]
    file = str(write(tmp_path / "a.jsonl", rows))
    names = ("question", column)
    examples = load_examples(file, "", "train", *names, needs_answers=False)
    assert [e.get("answer", "absent") for e in examples[:3]] == answers
    assert len({tuple(e) for e in examples}) == 1, "every example has every column"
    texts = [isinstance(x, str) and x not in ("absent", " ", "") for x in answers]
    if not all(texts):
        number = 1 + texts.index(False)
        words = f"a.jsonl example {number} has no text in '{column}'"
        refused(lambda: load_examples(file, "", "train", *names), words)


def test_a_column_that_json_cannot_hold_is_left_out_and_named_once(tmp_path, capsys) -> None:
    """A reward function of a file receives the columns as JSON. QUESTION_COLUMN and ANSWER_COLUMN
    may not name such a column."""
    examples = [{**e, "level": 3, "extra": None} for e in examples_of(20)]
    examples[4]["extra"] = {"image": [b"png"]}
    file = str(write(tmp_path / "a.parquet", examples))
    kept = [{**e, "level": 3} for e in examples_of(20)]
    assert load_examples(file, "", "train") == kept[:18]
    why = "Object of type bytes is not JSON serializable"
    assert capsys.readouterr().out == f"left out column 'extra' of split 'train': {why}\n"
    assert load_examples(file, "", "test") == kept[18:], "train and test have the same columns"
    for names in (("extra", "answer"), ("question", "extra")):
        message = "a.parquet example 1 has no text in 'extra', but None; write it as text"
        refused(lambda names=names: load_examples(file, "", "train", *names), message)


def test_a_hub_that_cannot_be_reached_is_one_line_error_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)
    for folder in ("datasets.config.HF_DATASETS_CACHE", "huggingface_hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(folder, str(tmp_path))
    for name, configuration in (("nobody/nothing-here", ""), ("openai/gsm8k", "main")):
        line = f"DATASET={name}: no such file or folder", f"(DATASET_CONFIG={configuration}): "
        refused(lambda name=name: load_examples(name, "", "train"), *line)


# ---- Files that cannot be read as settings say ---------------------------------------------------

MIXED = lines_of([{"question": text, "answer": "2"} for text in ([user("1?")], "[1] is?")])
BAD_DATA = [  # a file's name, its content, words of the line
    (
        "a.jsonl",
        LINES + b'{"question": }\n',
        "a.jsonl line 4 is not JSON: JSONDecodeError: Expecti",
    ),
    ("a.jsonl", LINES + b"\n\nyes\n", "a.jsonl line 6 is not JSON"),
    ("a.jsonl", LINES.decode().encode("utf-16"), "a.jsonl cannot be read: Unicode"),
    (
        "a.jsonl",
        LINES + b'\n["q"]\n',
        'a.jsonl line 5 is not a JSON object such as {"q...but ["q"]',
    ),
    ("a.json", b'[{"question": "q", "answer": "a"}, 5]', "a.json example 2 is not a JSON object"),
    ("a.jsonl", b'{"question": "q", "answer": 1e999}', " has no text in 'answer', but inf; "),
    ("a.jsonl", LINES * 9999 + b"\xff", f"decode byte 0xff in position {len(LINES * 9999)}: "),
    ("a.jsonl", b'{"question": 5, "answer": "a"}', " has no text in 'question', but 5; write it"),
    ("a.jsonl", b"", "a.jsonl has too few examples (0); a single file needs at least 2"),
    ("a.jsonl", lines_of(examples_of(1)), "a.jsonl has too few examples (1); a single file needs"),
    ("a.json", b'[\n{"question": "q"},\n{]', "a.json is not JSON: JSONDecodeError: Expecting pro"),
    ("a.json", b'{"question": "q", "answer": "a"}', "a.json is not a JSON list of examples"),
    ("a.parquet", LINES, "a.parquet cannot be read: ArrowInvalid"),
    ("a.jsonl", MIXED, "train': some questions are texts and others lists of messages; write all"),
    ("a.csv", b"question,answer\n", "a.csv is not a .jsonl, .json or .parquet file"),
]
PARTS = [  # files of the split train that do not belong together
    "train.jsonl train.parquet",
    "train-00000-of-00001.json train.json",
    "train-00000-of-00001.json train-00000-of-00002.json train-00001-of-00002.json",
    "train-00000-of-00003.json train-00002-of-00003.json",
    "train-00001-of-00002.parquet",
    "train-00001-of-00001.json",
    "train-00000-of-00002.json train-00000-of-00002-a09b74b3ef9c3b56.json",
    "train-00000-of-00002.json train-00003-of-00002.json",
    "train-00000-of-00002.json train-00001-of-00002.jsonl",
]
FIRST = lines_of([{"prompt": [user("1?")], "answer": "1"}])
SECOND = "a.jsonl example 2, column 'prompt': "
NO_PROMPTS = [
    ([user("2?"), assistant("4")], f"{SECOND}the last message must be the user's question, not {{"),
    ([user(" ")], f"{SECOND}the last ...not {{'role': 'user', 'content': ' '}}"),
    ([user("2?"), "4"], SECOND + 'message 2 is \'4\', and not {"role": "user", '),
    ([{"role": "user"}], f"{SECOND}message 1 is {{'role': 'user'}}, and not"),
    ([user("2?"), user("") | {"content": None}], f"{SECOND}message 2 is {{'role': 'user', 'cont"),
    ([], "a.jsonl example 2 has no text in 'prompt', but []"),
]
PARTED = lines_of([{"question": "1+1?", "a.b": "2", "a": {"b": "3", "c": {"d": 4}}}])
COLUMNS = "ANSWER_COLUMN to one of its columns, question, a.b, a"
REPEATS, LATIN_1 = json.dumps(examples_of(5) * 8).encode(), "Zoë".encode("latin-1")
# Settings of which the first names the file, its content, and words of the line with "..." between.
MISTAKES = [
    *((f"DATASET={name}", content, words) for name, content, words in BAD_DATA),
    ("DATASET=a.jsonl TRAIN_SPLIT=dev", LINES, "DATASET=a.jsonl has no split 'dev'"),
    ("DATASET=a.json TRAIN_SPLIT=test", REPEATS, "has no examples in split 'test'; its last tenth"),
    ("SYSTEM_PROMPT=a.txt", LATIN_1, "SYSTEM_PROMPT=a.txt cannot be read: UnicodeDecodeError: "),
    ("SYSTEM_PROMPT=a.json", b"[", "SYSTEM_PROMPT=a.json is not JSON: JSONDecodeError"),
    ("SYSTEM_PROMPT=a.json", b"{}", "SYSTEM_PROMPT=a.json is not a JSON list of messages"),
    ("SYSTEM_PROMPT=a.json", b'["Add."]', "SYSTEM_PROMPT=a.json...message 1 is 'Add.', and not"),
    ("SYSTEM_PROMPT=a.json", json.dumps([user("1?")]).encode(), "the last message is the user's"),
    ("CHAT_TEMPLATE=a.jinja", LATIN_1, "CHAT_TEMPLATE=a.jinja cannot be read: UnicodeDecodeError:"),
]
MISTAKES += [
    (f"DATASET=a.jsonl ANSWER_COLUMN={name}", PARTED, f"no text in '{name}', but...{COLUMNS}")
    for name in ("a.x", "question.b", "a.c.d.e", "a.c")
]
MISTAKES += [
    ("DATASET=a.jsonl QUESTION_COLUMN=prompt", FIRST + lines_of([{"prompt": prompt}]), words)
    for prompt, words in NO_PROMPTS
]


@pytest.mark.parametrize("settings, content, words", MISTAKES, ids=[row[-1] for row in MISTAKES])
def test_a_file_that_cannot_be_read_as_the_settings_say_is_refused_by_name_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, content: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = environment(settings)
    file, *_ = given.values()
    Path(file).write_bytes(content)
    line = mistake_of(**given)
    assert all(part in line for part in (file, *words.split("...")))


@pytest.mark.parametrize("files", PARTS)
def test_a_split_that_is_there_twice_or_in_part_is_refused_by_name(
    tmp_path: Path, files: str
) -> None:
    for name in files.split():
        (tmp_path / name).write_bytes(LINES)
    names = ", ".join(sorted(files.split()))
    line = f"DATASET={tmp_path}: split 'train' is in {names}: a shard is missing, or the split"
    assert line in mistake_of(DATASET=str(tmp_path))
    line = f"DATASET={tmp_path} has no file for split 'dev'; it has {names}"
    assert line in mistake_of(DATASET=str(tmp_path), TRAIN_SPLIT="dev")


# ---- The examples of a step ----------------------------------------------------------------------


def test_a_step_may_end_one_epoch_and_begin_the_next() -> None:
    seen = np.concatenate([batch_indices(7, 5, step, seed=0) for step in range(7)])
    for epoch in range(5):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == [0, 1, 2, 3, 4, 5, 6]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    by_2 = np.concatenate([batch_indices(10, 2, step, seed=4) for step in range(10)])
    backwards = [batch_indices(10, 5, step, seed=4) for step in (3, 2, 1, 0)]
    assert by_2.tolist() == np.concatenate(backwards[::-1]).tolist()
    orders = {tuple(batch_indices(10, 10, epoch, seed)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


# ---- Texts that are files ------------------------------------------------------------------------


def test_a_system_prompt_is_a_text_unless_it_is_a_file_or_a_word_that_ends_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("and/or", "</think>", "Read it in notes.txt", "c.py", ""):
        assert read_prefix_messages(text) == ([system(text)] if text else [])
    (tmp_path / "and").mkdir()
    (tmp_path / "and" / "or").write_text("Think.")
    assert read_prefix_messages("and/or") == [system("Think.")]


def test_texts_of_files_are_read_as_utf_8_without_a_byte_order_mark(tmp_path: Path) -> None:
    prompt, template = tmp_path / "a.txt", tmp_path / "a.jinja"
    prompt.write_bytes("\ufeffThink é.\r\n".encode())
    assert read_prefix_messages(str(prompt)) == [system("Think é.\n")]
    template.write_bytes("\ufeff{{ messages[1].content }}".encode())
    tokenizer = hf.load_tokenizer(REPO / "tiny", str(template))
    assert tokenizer.chat_template == "{{ messages[1].content }}"


# ---- Prompts -------------------------------------------------------------------------------------

SYSTEM = "Think first.\nAnswer in <answer></answer>."
EXAMPLES = [
    {"question": "Weng earns $12 an hour; 50 minutes = ?", "answer": "#### 10"},
    {"question": "Zoe\u0301 <|im_end|> has 1,234\u2028 clips.\n\nHow many?", "answer": "1,234"},
    {"question": "2+2?", "answer": "#### 4"},
]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_prompts_are_the_tokens_of_the_chat_template_and_batches_do_not_change_their_fingerprint(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr("data.TOKENIZED_AT_ONCE", batch)
    tokenizer = tokenizer_of()
    prompts = build_prompts(EXAMPLES, format_of(tokenizer, SYSTEM))
    for prompt, example in zip(prompts, EXAMPLES, strict=True):
        expected = tokenizer.apply_chat_template(
            [system(SYSTEM), user(example["question"])],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert prompt.ids == expected and prompt.columns == example
    assert tokenizer.decode(prompts[2].ids) == (
        "<|im_start|>system\nThink first.\nAnswer in <answer></answer>.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert json_digest(prompt[:2] for prompt in prompts) == "85c92d728858"


@pytest.mark.parametrize(
    "values, digest",
    [
        ([], "4f53cda18c2b"),
        ([[1, 2], "\u00e9", Path("a")], "1b6ad616b98a"),
        ([{"a": None, "b": [1.5]}], "d449ff943254"),
    ],
)
def test_a_digest_of_values_one_by_one_is_that_of_their_list_as_json(values, digest) -> None:
    text = json.dumps(values, default=str).encode()
    assert json_digest(iter(values)) == digest == hashlib.sha256(text).hexdigest()[:12]


def test_memory_grows_with_the_tokens_alone(tmp_path: Path) -> None:
    """A list of ints that share no objects takes 40 bytes a token, and the tokenizer 100 while it
    works. The first thousand examples fill what is used again for the others."""
    code = """if True:
        import resource, sys
        from pathlib import Path
        import data
        from chat import ChatFormat
        from fingerprint import json_digest
        from model import hf
        chat_format = ChatFormat(hf.load_tokenizer(Path("tiny")), [])
        for file in sys.argv[1:]:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            prompts = data.build_prompts(data.load_examples(file, "", "train"), chat_format)
            json_digest(prompts)
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        growth *= 1 if sys.platform == "darwin" else 1024  # bytes on macOS, else KiB
        print(growth / sum(len(prompt.ids) for prompt in prompts))
    """
    words, files = "".join(f" {i} apples and pears" for i in range(20)), []
    for count in (1000, 5000):
        examples = [{"question": f"{i}{words}", "answer": "1"} for i in range(count)]
        files.append(str(write(tmp_path / f"{count}.jsonl", examples)))
    # The peak of a process begins with that of its parent, so a shell starts it, and not pytest.
    command = ["sh", "-c", '"$0" "$@"; exit $?', sys.executable, "-c", code, *files]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    bytes_per_token = float(subprocess.check_output(command, cwd=REPO, text=True, env=env))
    assert bytes_per_token < 23, "16 to 18; the ids take 8, and the texts and the files the others"


def test_a_terminal_shows_how_many_prompts_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("infra.log.BAR_DELAY_S", 0)
    build_prompts(EXAMPLES, format_of(tokenizer_of(), SYSTEM))
    assert "tokenizing:   0%" in terminal.getvalue() and "0/3" in terminal.getvalue()


# ---- Message lists -------------------------------------------------------------------------------


def prompts_of(file: Path, system_prompt: str, *columns: str) -> list[list[int]]:
    """The token ids of the prompts of the split train of a file."""
    messages = read_prefix_messages(system_prompt)
    chat_format = ChatFormat(tokenizer_of(), messages, [system("By default.")])
    prompts = build_prompts(load_examples(str(file), "", "train", *columns), chat_format)
    return [prompt.ids for prompt in prompts]


def test_a_dataset_has_the_same_tokens_as_texts_as_messages_or_their_json_and_in_dapo_s_columns(
    tmp_path: Path,
) -> None:
    plain = write(tmp_path / "plain.jsonl", examples_of(20))
    chats = [
        # Arrow adds the key `name` to the message that lacks it.
        {"prompt": [system("Think.") | {"name": "s"}, user(e["question"])], "answer": e["answer"]}
        for e in examples_of(20)
    ]
    messages = write(tmp_path / "messages.parquet", chats)
    texts = [chat | {"prompt": json.dumps(chat["prompt"])} for chat in chats]
    dapo = [
        {
            "data_source": "sums",
            "prompt": [user(e["question"])],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
        }
        for i, e in enumerate(examples_of(20))
    ]
    dapo_file = write(tmp_path / "dapo.parquet", dapo)
    expected = prompts_of(plain, "Think.")
    for file in (messages, write(tmp_path / "texts.jsonl", texts)):
        assert prompts_of(file, "", "prompt", "answer") == expected
    columns = ("prompt", "reward_model.ground_truth")
    assert prompts_of(dapo_file, "Think.", *columns) == expected
    [example, *_] = load_examples(str(dapo_file), "", "train", *columns)
    assert (example["question"], example["answer"]) == ("What is 0 + 1?", "1")
    assert example["prompts"] == [user("What is 0 + 1?")]


def test_calls_of_tools_are_read_as_templates_take_them_from_parquet_and_from_openai_s_form(
    tmp_path: Path,
) -> None:
    """Arrow gives each call the arguments of the others, too; a time is no value of JSON."""
    calls = [{"name": "add", "arguments": {"x": 1}}, {"name": "say", "arguments": {"text": "hi"}}]
    texts = [call | {"arguments": json.dumps(call["arguments"])} for call in calls]
    for name, written in (("a.parquet", calls), ("b.parquet", texts)):
        asked = assistant(None) | {"tool_calls": [{"function": call} for call in written]}
        messages = [user("Add 1."), asked, user("And now?")]
        times = [message | {"time": datetime.datetime(2026, 1, 2)} for message in messages]
        file = write(tmp_path / name, [{"question": times, "answer": "1"}] * 20)
        [example, *_] = load_examples(str(file), "", "train")
        time, call = {"time": "2026-01-02 00:00:00"}, [{"function": call} for call in calls]
        assert example["prompts"][1] == assistant("") | time | {"tool_calls": call}


SYSTEM_CASES = [  # SYSTEM_PROMPT's messages, the question, and the messages that are rendered
    ([], "2+2?", [system("By default."), user("2+2?")]),
    ([], [user("2+2?")], [user("2+2?")]),
    ([], [system("Data."), user("2+2?")], [system("Data."), user("2+2?")]),
    ([system("Set.")], [user("2+2?")], [system("Set."), user("2+2?")]),
    ([system("Set.")], [system("Data."), user("2+2?")], [system("Data."), user("2+2?")]),
    (
        [system("Set."), user("1+1?"), assistant("2")],
        [system("Data."), user("3?"), assistant("3"), user("2+2?")],
        [system("Data."), *(user("1+1?"), assistant("2"))]
        + [user("3?"), assistant("3"), user("2+2?")],
    ),
]


@pytest.mark.parametrize("prefix_messages, question, rendered", SYSTEM_CASES)
def test_a_system_message_of_the_data_wins_and_messages_get_no_default_one(
    prefix_messages: list, question: object, rendered: list
) -> None:
    chat_format = ChatFormat(tokenizer_of(), prefix_messages, [system("By default.")])
    example = {"question": "2+2?"} | ({"prompts": question} if isinstance(question, list) else {})
    assert chat_format.messages_of(example) == rendered


def test_without_a_system_role_the_system_message_stands_in_front_of_the_first_question():
    tokenizer = tokenizer_of(
        "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}"
    )
    prefix_messages = [system("Set."), user("1+1?"), assistant("2")]
    examples = [{"question": "2+2?"}, {"question": "5?", "prompts": [system("Data."), user("5?")]}]
    prompts = build_prompts(examples, ChatFormat(tokenizer, prefix_messages))
    texts = ["Set.\n\n1+1?|2|2+2?|", "Data.\n\n1+1?|2|5?|"]
    assert [tokenizer.decode(prompt.ids) for prompt in prompts] == texts


def test_messages_of_a_file_stand_in_front_of_a_question_as_worked_examples(tmp_path):
    file = tmp_path / "examples.json"
    messages = [system("Add."), user("1+1?"), assistant("2")]
    file.write_text(json.dumps(messages))
    assert read_prefix_messages(str(file)) == messages


# It treats enable_thinking as the template of Qwen3 does, and has a tag of transformers.
THINKS = (
    "{%- for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}"
    "{{- '\\n' }}{% endfor %}{%- if add_generation_prompt %}{{- 'assistant: ' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    "{%- if effort is defined and effort not in ['low', 'high'] %}"
    "{{- raise_exception('no such effort') }}{%- endif %}"
)


OFF = {"enable_thinking": False}, "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("kwargs, end", [({}, ""), ({"enable_thinking": True}, ""), OFF])
def test_arguments_of_the_template_turn_thinking_on_and_off(kwargs: dict, end: str) -> None:
    chat_format = ChatFormat(tokenizer_of(THINKS), [], kwargs=kwargs)
    check_chat_format(chat_format, math.inf)
    [prompt] = build_prompts([{"question": "2+2?"}], chat_format)
    assert chat_format.tokenizer.decode(prompt.ids) == f"user: 2+2?\nassistant: {end}"


# Templates of models that see images may take the parts of a list alone.
IN_PARTS = "{% for m in messages %}{% for x in m.content %}{{ x.text }}{% endfor %}{% endfor %}"
UNREAD = ("enable_thinkng", "content", "messages", "tools", "range", "bos_token")
NOT_READ = "the chat template does not use {!r}, or every run sets it; it uses effort, enable_th"
BAD_TEMPLATES = [  # a template, CHAT_TEMPLATE_KWARGS, words of the line
    (IN_PARTS, {}, "MODEL_PATH (or CHAT_TEMPLATE): its chat template does not render the text of"),
    (
        THINKS,
        {"effort": "most"},
        'fails on messages of user and CHAT_TEMPLATE_KWARGS={"effort": "most"}: TemplateError: no',
    ),
    *((THINKS, {name: False}, f"KWARGS: {NOT_READ.format(name)}") for name in UNREAD),
]


@pytest.mark.parametrize("template, kwargs, words", BAD_TEMPLATES)
def test_a_template_that_writes_no_texts_or_does_not_take_an_argument_is_refused(
    template: str, kwargs: dict[str, object], words: str
) -> None:
    chat_format = ChatFormat(tokenizer_of(template), [], kwargs=kwargs)
    refused(lambda: check_chat_format(chat_format, math.inf), words)


# ---- Chat templates ------------------------------------------------------------------------------

TOOL = {"type": "function"}
USER = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}>"
NAMED = {"default": "plain {{ messages[0].content }}", "tool_use": "{{ tools | length }} tools"}
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + USER
TEMPLATES = [  # a template, the tools, and the prompt of "2+2?" with the system prompt "Think."
    # The same date every day. Llama 3.2 prints it like this.
    (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}"
        "{% endif %}Today: {{ date_string }}",
        [],
        "Today: 26 Jul 2024",
    ),
    ("{% set today = strftime_now('%Y-%m-%d') %}\n{{ today }}", [], "2024-07-26"),  # Mistral 3
    ("\n{{ strftime_now('%A %-d.%-m.%y, %H:%M') }}", [], "\nFriday 26.7.24, 00:00"),
    # Without a system message the system prompt stands before the question.
    (USER, [], "Think.\n\n2+2?>"),
    (NO_SYSTEM, [], "Think.\n\n2+2?>"),
    ("{{ messages[-1].content }}>", [], "Think.\n\n2+2?>"),
    ("Be good. {{ messages[-1].content }}>", [], "Be good. Think.\n\n2+2?>"),
    # SmolLM3's takes switches such as /think out of a system message.
    ("{{ messages[0].content.replace('ink', '') if messages[1] }}" + USER, [], "Think.\n\n2+2?>"),
    # Of named templates tools get the one for tools. Llama's asks whether there are any.
    (NAMED, [], "plain Think."),
    (NAMED, [TOOL], "1 tools"),
    ("{{ 'none' if tools is none else tools | length }}", [], "none"),
    ("{{ 'none' if tools is none else tools | length }}", [TOOL], "1"),
]


@pytest.mark.parametrize("template, tools, text", TEMPLATES)
def test_a_prompt_is_what_the_template_writes(template: object, tools: list, text: str) -> None:
    tokenizer = tokenizer_of(template)
    (prompt,) = build_prompts(EXAMPLES[2:], format_of(tokenizer, "Think.", tools))
    assert tokenizer.decode(prompt.ids) == text


def test_named_templates_without_a_default_are_refused() -> None:
    tokenizer = tokenizer_of({"rag": "{{ messages[0].content }}"})
    words = "MODEL_PATH (or CHAT_TEMPLATE): its chat template fails on messages of user: ValueError"
    chat_format = format_of(tokenizer, "Think.")
    refused(lambda: build_prompts(EXAMPLES[2:], chat_format), words, "multiple", "rag")


# </answer> is an added token that is not special.
ENDS = {"\n<|im_start|>": 1, "<|endoftext|><|im_end|>": 0, "</answer>": 557, "\n\n### Human:": None}


@pytest.mark.parametrize("end, expected", ENDS.items())
def test_the_token_behind_an_answer_is_found_by_writing_one(end: str, expected: int | None) -> None:
    tokenizer = tokenizer_of(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
        f"{{{{ {end!r} }}}}{{% endif %}}{{% endfor %}}{{{{ '<think>' if add_generation_prompt }}}}"
    )
    assert end_of_turn_id(ChatFormat(tokenizer, [])) == expected
    tokenizer.chat_template = "{% if messages[1:] %}{{ raise_exception('no') }}{% endif %}"
    assert end_of_turn_id(ChatFormat(tokenizer, [])) is None  # it takes no answers


def test_a_template_that_writes_the_bos_token_as_gemma_s_does_gives_it_once() -> None:
    """Its tokenizer would add the token to any text, and its template has no role of a system."""
    tokenizer = tokenizer_of()
    tokenizer.bos_token = bos = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 1)]
    )
    tokenizer.chat_template = "{{ bos_token }}user\n{{ messages[-1].content + '\\nmodel\\n' }}"
    assert tokenizer("2")["input_ids"][0] == 1, "the tokenizer adds it by itself"
    (prompt,) = build_prompts(EXAMPLES[2:], format_of(tokenizer, "Think first."))
    assert tokenizer.decode(prompt.ids) == "<|im_start|>user\nThink first.\n\n2+2?\nmodel\n"
    assert prompt.ids.count(1) == 1


def test_a_template_without_the_bos_token_that_the_tokenizer_adds_gets_a_note(capsys) -> None:
    tokenizer = tokenizer_of()
    tokenizer.bos_token = bos = "<|endoftext|>"
    check_chat_format(ChatFormat(tokenizer, []), math.inf)
    assert capsys.readouterr().out == "", "this tokenizer does not add it"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 0)]
    )
    check_chat_format(ChatFormat(tokenizer, []), math.inf)
    note = "note: the tokenizer puts <|endoftext|> before a text, and the chat template does"
    way = "if the model needs it, begin CHAT_TEMPLATE with {{ bos_token }}"
    assert capsys.readouterr().out == f"{note} not; {way}\n"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    check_chat_format(ChatFormat(tokenizer, []), math.inf)
    assert capsys.readouterr().out == ""


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
WITH_OPENING = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BY_HEADERS = (
    "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content }}\n{% endfor %}"
)
# [INST] ... [/INST], as of Llama 2 and Mistral.
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
EMPTY_THOUGHT = WITH_OPENING.replace(
    "{{ m.content }}", "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}"
)
HEADERS = [  # a template, and what it writes before an answer that a prompt lacks
    (CHATML, "<|im_start|>assistant"),
    (CHATML + "{% if add_generation_prompt %}<|im_start|>{% endif %}", "assistant"),
    (BY_HEADERS, "A:"),
    (BY_HEADERS + "{% if add_generation_prompt %}B: {% endif %}", "A:"),
    (WITH_OPENING, ""),
    (CHATML + "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}", ""),
    (
        BY_HEADERS.replace("\n{%", "\n{{ 'A: ' if m.role == 'user' }}{%").replace(
            "'A: ' }}", "'' }}"
        ),
        "",
    ),
    (INST, ""),
    (EMPTY_THOUGHT, ""),
    (EMPTY_THOUGHT + "{% if add_generation_prompt %}<think>\n{% endif %}", ""),
    (WITH_OPENING + "{% if add_generation_prompt %}<think>\n{% endif %}", ""),
    (WITH_OPENING.replace("{{ m.content }}", "[THINK][/THINK]{{ m.content }}"), ""),
    ("{% if messages[1:] %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}", ""),
    ("{{ messages[0].content }}", ""),
]


@pytest.mark.parametrize("template, header", HEADERS)
def test_a_template_whose_prompts_lack_the_header_of_answers_is_refused(
    template: str, header: str
) -> None:
    """The policy would have to sample it, and supervised training would train on it."""
    tokenizer = tokenizer_of(template)
    chat_format = ChatFormat(tokenizer, [])
    if not header:
        check_chat_format(chat_format, math.inf)
        return
    words = f"template writes {header!r} before an answer, but not after a prompt; set CHAT"
    refused(lambda: check_chat_format(chat_format, math.inf), "MODEL_PATH (or CHAT", words)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
QWEN3 = (REPO / "docs" / "qwen3_turns.jinja").read_text(encoding="utf-8")
BY_ROLE = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant') %}{{ m.role }}: "
    "{{ m.content | trim }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    "template, messages, line",
    [
        # vLLM names the thoughts of a model `reasoning`, and templates read `reasoning_content`.
        (QWEN3, {"reasoning_content": "2 and 2", "name": ""}, ""),
        (BY_ROLE, {"reasoning": "4", "loss": 1, "id": 7}, "assistant.loss, assistant.reasoning"),
        (QWEN3, {"tool_calls": [CALL]}, ""),
        (BY_ROLE, {"tool_calls": [CALL]}, "assistant.tool_calls; set CHAT_TEMPLATE"),
        (QWEN3, {"role": "developer"}, ""),
        (BY_ROLE, {"role": "developer"}, "developer.content; set CHAT_TEMPLATE"),
    ],
)
def test_what_the_chat_template_leaves_out_of_messages_is_named_or_refused(
    template: str, messages: dict, line: str, capsys: pytest.CaptureFixture
) -> None:
    example = {"prompts": [user("2+2?")], "completions": ([assistant(" 4") | messages], "a place")}
    chat_format = ChatFormat(tokenizer_of(template), [])
    if ";" in line:
        refused(lambda: check_messages([example], chat_format, "train"), "leaves out " + line)
        return
    check_messages([example, {"question": "2+2?"}], chat_format, "train")
    note = f"note: in the train split the chat template leaves out {line}\n"
    assert capsys.readouterr().out == (note if line else "")


def test_a_text_beside_a_call_may_be_left_out_alone_and_is_named(capsys) -> None:
    tokenizer = tokenizer_of(
        "{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}{{ m.tool_calls }}"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    answers = [assistant("4"), assistant("4") | {"tool_calls": [CALL]}]
    examples = [{"prompts": [user("2+2?")], "completions": ([x], "a place")} for x in answers]
    for order in (examples, examples[::-1]):
        check_messages(order, ChatFormat(tokenizer, []), "train")
        note = "note: in the train split the chat template leaves out some assistant.content\n"
        assert capsys.readouterr().out == note
    line = "in the train split the chat template leaves out assistant.content; set CHAT_TEMPLATE"
    refused(lambda: check_messages(examples[1:], ChatFormat(tokenizer, []), "train"), line)


def test_texts_that_a_chat_template_has_written_already_are_counted(capsys) -> None:
    """Also those of tools and of users' further turns. The policy may write such tokens itself."""
    chat_format = ChatFormat(tokenizer_of(), [])
    turn, special = user("2+2?"), assistant("<|im_start|>")
    [rendered] = chat_format.render([[turn]])
    chats = [turn, user(rendered)], [turn, turn | {"role": "tool"}]
    examples = [
        {"question": rendered},
        {"question": "2+2?", "prompts": chats[0][::-1]},
        {"question": "2+2?", "prompts": [turn], "completions": (chats[0], "a place")},
        {"question": "2+2?", "prompts": [turn], "completions": ([special, *chats[1]], "a place")},
        EXAMPLES[0],
    ]
    check_messages(examples, chat_format, "test")
    note = "note: 3 of 5 test examples contain special tokens; give plain text that no chat"
    assert capsys.readouterr().out == f"{note} template has rendered\n"


def test_only_a_think_tag_that_is_left_open_belongs_to_the_completion() -> None:
    tokenizer, opened = tokenizer_of(), "<think>\n\n"
    template = tokenizer.chat_template
    for end in (opened, "<think>\n\n</think>\n\n", "<think> Well,", ""):
        tokenizer.chat_template = template + f"{{{{ {end!r} }}}}"
        (prompt,) = build_prompts(EXAMPLES[2:], format_of(tokenizer, "Think in <think>."))
        assert open_think_tag(prompt.ids, tokenizer) == (opened if end == opened else ""), end


def test_a_chat_template_of_a_file_serves_a_model_that_has_none(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((REPO / "tiny" / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refused(lambda: hf.load_tokenizer(tmp_path), "no chat template", "CHAT_TEMPLATE")
    for folder in (tmp_path, REPO / "tiny"):  # It replaces the tokenizer's template.
        tokenizer = hf.load_tokenizer(folder, str(REPO / "docs" / "chat_template.jinja"))
        (prompt,) = build_prompts(EXAMPLES[2:], format_of(tokenizer, "Think first."))
        assert tokenizer.decode(prompt.ids) == "System: Think first.\n\nUser: 2+2?\n\nAssistant:"


def test_prompts_that_are_too_long_are_skipped(capsys: pytest.CaptureFixture) -> None:
    prompts = [Prompt(list(range(n)), {"question": str(n)}) for n in (5, 3, 7, 4)]
    lengths = [len(prompt.ids) for prompt in prompts]
    assert drop_long_prompts(prompts, lengths, 0, "train") == prompts
    assert drop_long_prompts(prompts, lengths, 7, "train") == prompts
    assert capsys.readouterr().out == ""
    assert drop_long_prompts(prompts, lengths, 4, "train") == [prompts[1], prompts[3]]
    message = "skipped 2 of 4 train prompts: longer than MAX_PROMPT_LENGTH=4 tokens\n"
    assert capsys.readouterr().out == message


@pytest.mark.parametrize(
    "subjects, limit, note",
    [
        (["algebra"] * 30 + ["geometry"] * 20 + ["number theory"] * 20, 30, "1 of the 3 values"),
        (["algebra"] * 36 + ["geometry"] * 34, 30, ""),  # most are as the first ones
        (["algebra", "geometry"] * 35, 30, ""),
        (["algebra"] * 20 + ["geometry"] * 50, 0, ""),  # all are taken
        (["algebra"] * 19 + ["geometry"] * 51, 19, ""),  # so few may lack a value by chance
        ([str(i) for i in range(70)], 30, ""),  # each has its own
        ([3] * 30 + [4] * 40, 30, "1 of the 2 values"),
        ([[3]] * 30 + [[4]] * 40, 30, ""),
    ],
)
def test_a_split_that_is_sorted_so_that_evaluations_see_a_part_of_it_gets_a_line(
    subjects: list, limit: int, note: str, capsys: pytest.CaptureFixture
) -> None:
    examples = [{"question": f"{i}+{i}?", "subject": x} for i, x in enumerate(subjects)]
    print_uneven_head([Prompt([1], example) for example in examples], limit, "test")
    head = f"note: the first {limit} of 70 test examples (EVAL_PROMPTS) have {note} of column"
    line = f"{head} 'subject'; shuffle them, or set EVAL_PROMPTS=0\n"
    assert capsys.readouterr().out == (line if note else "")


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "environments"])
def test_a_column_with_the_name_of_another_argument_of_rewards_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    file = write(tmp_path / "mine.jsonl", [{name: f"{i} + 1?", "answer": f"{i}"} for i in range(9)])
    examples = load_examples(str(file), "", "train", question=name)
    assert examples[0] == {"question": "0 + 1?", "answer": "0"}
    message = f"left out column {name!r} of split 'train': rewards have an argument of this name"
    assert capsys.readouterr().out == message + "\n"


def test_every_example_has_every_column(tmp_path: Path) -> None:
    example = {"question": "1 + 1?", "answer": "#### 2"}
    file = write(tmp_path / "mine.jsonl", [example, {**example, "level": 3}, example])
    assert [e["level"] for e in load_examples(str(file), "", "train")] == [None, 3]
