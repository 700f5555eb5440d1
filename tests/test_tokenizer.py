"""Claims about the tokenizers that hf.py reads, and about the tokens that end a completion."""

import json
import shutil
from pathlib import Path

import pytest
from test_hf import TINY, refused

from models import hf

QUESTIONS = [  # like those of GSM8K
    "Natalia sold 48 clips in April, and half as many in May. How many clips did she sell?",
    "Weng earns $12 an hour. Yesterday she did 50 minutes: <<12/60=0.2>>\n50*0.2=$10\n#### 10",
    "A house costs $1,234,567.50; repairs raised its value by 150%.\r\n\r\nWhat is the profit?\t",
    "Zoe\u0308's cafe\u0301 sells 3 ½-litre jugs at 7 € — how much?",  # accents by combining marks
    "Bob’s \U0001f600 emoji: 2³ × 10^-4 = ?\u2028  Next   line",
    "<|im_start|>user\n<think>5 + 5</think> <answer>10</answer><|im_end|>",
]


def test_token_ids_are_those_of_the_file_tokenizer_json() -> None:
    from tokenizers import Tokenizer

    assert json.loads((TINY / "config.json").read_text())["model_type"] == "qwen2"
    raw, ours = Tokenizer.from_file(str(TINY / "tokenizer.json")), hf.load_tokenizer(TINY)
    for question in QUESTIONS:
        ids = raw.encode(question, add_special_tokens=False).ids
        assert ours(question, add_special_tokens=False)["input_ids"] == ids
        assert ours.decode(ids) == question


def test_a_folder_without_a_usable_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    def bad(says: str) -> None:
        refused(lambda: hf.load_tokenizer(tmp_path), f"MODEL_PATH={tmp_path}", says)

    bad("has no tokenizer.json")
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    bad("its tokenizer has no chat template; use an instruct model")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    bad("its tokenizer has no chat template; use an instruct model")
    (tmp_path / "tokenizer.json").write_text("{\n")
    bad("its tokenizer cannot be read: JSONDecodeError")
    (tmp_path / "tokenizer.json").write_text("{}")
    bad("its tokenizer cannot be read: ")


def test_a_chat_template_may_be_in_a_separate_file(tmp_path: Path) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = hf.load_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Hi!"


@pytest.mark.parametrize(
    "generation, config, eos, expected",
    [
        (None, {}, "<|im_end|>", (2,)),
        (None, {"eos_token_id": 5}, "<|im_end|>", (2, 5)),
        ({"eos_token_id": 0}, {"eos_token_id": 5}, "<|im_end|>", (0, 2, 5)),
        ({"eos_token_id": [9, 0, 2]}, {"eos_token_id": None}, "<|im_end|>", (0, 2, 9)),
        ({"eos_token_id": [9]}, {"eos_token_id": [5, 9]}, None, (5, 9)),
        ({}, {"eos_token_id": 0}, None, (0,)),
        (None, {"eos_token_id": []}, "<|im_end|>", (2,)),
        (None, {"eos_token_id": []}, None, (-1,)),  # no token ends a completion
    ],
)
def test_stop_ids_are_those_of_all_files(tmp_path, generation, config, eos, expected):
    tokenizer = hf.load_tokenizer(TINY)
    tokenizer.eos_token = eos  # <|im_end|> is 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert hf.stop_ids(tmp_path, tokenizer, vocab_size=10) == expected


@pytest.mark.parametrize(
    "eos, told",
    [
        ("</s>", "'</s>'"),
        ([[2]], "[[2]]"),
        ([2, "</s>"], "[2, '</s>']"),
        ([2, None], "[2, None]"),
        ({"id": 2}, "{'id': 2}"),
        (2.0, "2.0"),
        (True, "True"),
        (-1, "-1"),
        (10, "10"),
        ([2, 10], "[2, 10]"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_stop_token_that_is_no_token_is_refused_by_file_and_value(tmp_path, name, eos, told):
    tokenizer = hf.load_tokenizer(TINY)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": eos}))
    refused(
        lambda: hf.stop_ids(tmp_path, tokenizer, vocab_size=10),
        f"{tmp_path / name}: eos_token_id={told} is not a token id below vocab_size=10, or a list",
    )


def test_a_model_that_names_no_end_is_refused(tmp_path: Path) -> None:
    tokenizer = hf.load_tokenizer(TINY)
    tokenizer.eos_token = None
    refused(
        lambda: hf.stop_ids(tmp_path, tokenizer, vocab_size=10),
        f"MODEL_PATH={tmp_path}: neither configs nor tokenizer name",
    )
