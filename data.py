"""Examples of GSM8K or of any dataset with questions and answers, and their prompts as token ids.

The examples of a round of sampling follow from the seed, the number of the round, P and the number
of examples; see `batch_indices`.

Dimensions: P prompts of a training step.
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chat import ChatFormat, Example, Message, checked_chats, read_messages
from infra.log import progress_bar
from infra.mistakes import UserMistake, reading
from infra.settings import read_text

SUFFIXES = (".jsonl", ".json", ".parquet")
# DATASET_CONFIG, if it is empty, of hub datasets with several configurations and no default.
HUB_CONFIGS = {"openai/gsm8k": "main"}
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "environments", "trainer_state")
TOKENIZED_AT_ONCE = 1000  # examples; each needs about 40 kB while it is tokenized
HELD_OUT = 0.1  # fraction of a single file that is held out for evaluation
OBJECT = 'JSON object such as {"question": "1 + 1?", "answer": "2"}'


class Prompt(NamedTuple):
    """The prompt of an example as token ids, with the example."""

    ids: list[int]  # tokens of the chat template, up to where the assistant begins to speak
    columns: Example  # see load_examples
    # Only demonstrations (train_sft.py) have these; their ids end before the first trained token.
    completion_ids: Sequence[int] = ()
    completion_mask: Sequence[int] = ()  # 1 on the tokens to train on, 0 on those between the turns
    source: str = ""  # the file and the number of the example


# ---- Examples ------------------------------------------------------------------------------------


def load_examples(
    dataset: str,
    config: str,
    split: str,
    question: str = "question",
    answer: str | None = "answer",
    completion: str | None = None,
    needs_answers: bool = True,
) -> list[Example]:
    """The examples of one split of a local file, a local folder or a hub dataset.

    A folder has a file or shards for each split (train.jsonl, test-00000-of-00001.parquet). A
    single file has two splits: "train" is all examples before the last tenth, "test" the examples
    of this tenth whose question is not in "train", without repeats.
    config: of a hub dataset; "": HUB_CONFIGS, else the dataset's only or default configuration.
    question, answer: names of the columns that hold the question and the answer, see find_column.
    Each example also has these two texts as `question` and `answer`. If its question is a list of
    messages, the example has the list as `prompts`, and `question` is the text of the last message.
    completion: not None for train_sft.py, see read_completion. Each example then has its result as
    `completions`, a name that no column keeps.
    needs_answers: False: examples without a text in the answer's column are no mistake.
    It keeps the columns that JSON can hold, as reward workers get them, and prints the others.
    Raises UserMistake if a file is missing or cannot be read, or if an example lacks a text.
    """
    path = Path(dataset)
    # Any other name can only be the id of a dataset on the hub.
    is_path = path.exists() or path.suffix in SUFFIXES or dataset.startswith(("/", "~", "."))
    one_file = is_path and not path.is_dir()
    if one_file:
        contents = {dataset: _read_file(path)}
    elif is_path:
        contents = {str(file): _read_file(file) for file in _split_files(path, split)}
    else:
        contents = {f"DATASET={dataset}:{split}": _read_hub(dataset, config, split)}
    examples, texts, names = [], [], (question, answer, completion)
    for file, items in contents.items():
        for number, item in enumerate(items, start=1):
            examples.append(item)
            source = f"{file} example {number}"
            texts.append(read_question_and_answer(source, item, *names, needs_answers))
    if 0 < sum("prompts" in example_texts for example_texts in texts) < len(texts):
        reason = "some questions are texts and others lists of messages; write all in the same form"
        raise UserMistake(f"DATASET={dataset}, split {split!r}: {reason}")
    if not needs_answers and answer is not None and answer != "answer":
        if all(find_column(example, answer) is None for example in examples):
            known = ", ".join(dict.fromkeys(name for example in examples for name in example))
            reason = f"no example of split {split!r} has it; its columns are {known}"
            raise UserMistake(f"DATASET={dataset}, ANSWER_COLUMN={answer}: {reason}")
    if answer is not None and any("answer" in example_texts for example_texts in texts):
        for example, example_texts in zip(examples, texts, strict=True):
            if "answer" not in example_texts:
                value = json.loads(json.dumps(find_column(example, answer), default=str))
                # Texts are blank here, and numbers are not finite.
                example_texts["answer"] = None if isinstance(value, str | float) else value
    columns = kept_columns(examples, texts, {"question": question, "answer": answer}, split)
    examples = [
        {name: example.get(name) for name in columns} | texts_of_example
        for example, texts_of_example in zip(examples, texts, strict=True)
    ]
    if one_file:
        if split not in ("train", "test"):
            reason = "a single file has train, and its last tenth as test"
            raise UserMistake(f"DATASET={dataset} has no split {split!r}; {reason}")
        test_size = max(1, round(HELD_OUT * len(examples)))
        train, test = examples[:-test_size], examples[-test_size:]
        unseen = _unseen(test, train)
        if split == "test" and len(unseen) < len(test):
            left_out = f"left out {len(test) - len(unseen)} of {len(test)} held-out questions"
            print(f"{left_out} of {dataset}: they repeat train or each other", flush=True)
        examples = train if split == "train" else unseen
    if not examples:
        if not one_file:
            raise UserMistake(f"DATASET={dataset} has no examples in split {split!r}")
        reason = f"too few examples ({len(texts)}); a single file needs at least 2"
        if len(texts) > 1:
            reason = "no examples in split 'test'; its last tenth only repeats questions of train"
        raise UserMistake(f"DATASET={dataset} has {reason}; a folder may have a file of each split")
    return examples


def _unseen(test: list[Example], train: list[Example]) -> list[Example]:
    """The examples of test whose question is not in train, without repeats."""

    def key_of(e: Example) -> str:
        # Of `completions` the messages count, and not the source.
        return json.dumps((e.get("prompts") or e["question"], *e.get("completions", ())[:1]))

    prompts = [key_of(e) for e in test]
    seen, pairs = {*prompts}.intersection(map(key_of, train)), zip(prompts, test, strict=True)
    unseen = {(prompt, repr(e.get("answer"))): e for prompt, e in pairs if prompt not in seen}
    return [*unseen.values()]


def kept_columns(
    examples: list[Example], texts: list[Example], named: dict[str, str | None], split: str
) -> list[str]:
    """The columns that rewards can receive. Prints the others, and those that a column which a
    setting names replaces by its texts. named: {"question": QUESTION_COLUMN, ...}."""
    # Rewards receive the columns as lists, so every example needs every column of the split.
    columns = dict.fromkeys(name for example in examples for name in example)
    for name in [*columns]:
        reason: object = "rewards have an argument of this name" if name in REWARD_ARGUMENTS else ""
        try:
            for example in examples:
                json.dumps(example.get(name))
        except TypeError as error:
            reason = error
        if reason:
            del columns[name]
        elif named.get(name, name) not in (None, name):
            pairs = zip(examples, texts, strict=True)
            if any(e.get(name) != texts_of_e.get(name, e.get(name)) for e, texts_of_e in pairs):
                reason = f"{name.upper()}_COLUMN={named[name]} replaces it"
        if reason:
            print(f"left out column {name!r} of split {split!r}: {reason}", flush=True)
    return [*columns]


def read_question_and_answer(
    source: str,
    columns: Mapping[str, Any],
    question: str,
    answer: str | None,
    completion: str | None = None,
    needs_answers: bool = True,
) -> Example:
    """The `question`, the `answer` and, if the question is a list of messages, the
    `prompts` of an example. An answer that is a number becomes its text.

    source: of the example, for the error. question, answer, completion: names of columns, see
    find_column; None: it is not read. Raises UserMistake if a text is missing; if not
    needs_answers, an answer that is no text is left out.
    """
    texts: Example = {}
    if completion is not None:
        columns, texts["completions"] = read_completion(source, columns, question, completion)
    for name, column in (("question", question), ("answer", answer)):
        if column is None:
            continue
        value = find_column(columns, column)
        if name == "question" and (messages := as_messages(value)):
            texts |= read_question(messages, f"{source}, column {column!r}")
            continue
        value = number_to_text(value) if name == "answer" else value
        if not isinstance(value, str) or not value.strip():
            if name == "answer" and not needs_answers:
                continue
            raise UserMistake(
                f"{source} has no text in {column!r}, but {value!r:.80}; write it as text, or set "
                f"{name.upper()}_COLUMN to one of its columns, {', '.join(columns)}"
            )
        texts[name] = value
    return texts


def read_completion(
    source: str, columns: Mapping[str, Any], question: str, completion: str
) -> tuple[Mapping[str, Any], tuple[list[Message], str]]:
    """The columns with only the messages of the question, and a pair: the messages that
    follow it, up to the last one of the assistant, and the source, for errors.

    completion: the column of a text or of messages. "": the question's column has conversations,
    and the assistant's first answer to the user begins what follows. Raises UserMistake without it.
    """
    column = completion or question
    value = find_column(columns, column)
    messages = as_messages(value) or []
    if completion and not messages and value not in (None, ""):
        messages = [{"role": "assistant", "content": number_to_text(value)}]
    messages = read_messages(messages, f"{source}, column {column!r}")
    roles = [message["role"] for message in messages]
    turns = [i for i, role in enumerate(roles) if role == "assistant"]
    if not completion:
        turns = [i for i in turns if "user" in roles[:i]]
    if not turns:
        raise UserMistake(
            f"{source} has no answer of the assistant in {column!r}, but {value!r:.80}; set "
            f"QUESTION_COLUMN to a column of conversations, or COMPLETION_COLUMN to one of "
            f"completions; its columns are {', '.join(columns)}"
        )
    first = 0 if completion else turns[0]
    if not completion:
        columns = {**columns, column: messages[:first]}
    return columns, (messages[first : turns[-1] + 1], source)


def number_to_text(value: object) -> object:
    """A finite number as its text, and any other value as it is."""
    is_number = (type(value) is int or type(value) is float) and -math.inf < value < math.inf
    return json.dumps(value) if is_number else value


def find_column(columns: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a part of it: reward_model.ground_truth is the value at
    ground_truth of the column reward_model, if no column has this name. None if it is missing."""
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def as_messages(value: object) -> list | None:
    """The value if it is a list, or the list if it is a text of JSON with a list of
    messages; else None."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            parsed = json.loads(value)
            return parsed if all(isinstance(x, dict) and "role" in x for x in parsed) else None
    return value if isinstance(value, list) else None


def read_question(value: list, source: str) -> Example:
    """A list of messages as the `prompts` and the `question` of an example. Raises
    UserMistake if it is no such list, or if its last message is not a question of the user."""
    messages = read_messages(value, source)
    last = messages[-1]
    if last["role"] != "user" or not last["content"].strip():
        reason = f"the last message must be the user's question, not {last!r:.80}"
        raise UserMistake(f"{source}: {reason}; drop the messages after the question")
    return {"question": last["content"], "prompts": messages}


def append_to_question(example: Example, text: str) -> Example:
    """The example with the text after its question and its last message."""
    longer = example | {"question": example["question"] + text}
    if example.get("prompts"):
        *earlier, last = example["prompts"]
        longer["prompts"] = [*earlier, last | {"content": last["content"] + text}]
    return longer


def _split_files(folder: Path, split: str) -> list[Path]:
    """SPLIT.ext, or all shards SPLIT-00000-of-0000N.ext; other files do not count. Raises
    UserMistake if the folder has no such file, or if they are not N files of one format."""
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    # Older versions of datasets append a hash to the number.
    name = re.compile(rf"{re.escape(split)}(?:-(\d{{5}})-of-(\d{{5}})(-[0-9a-f]{{16}})?)?")
    matches = {file: match for file in files if (match := name.fullmatch(file.stem))}
    if not matches:
        names = ", ".join(file.name for file in files) or "no .jsonl, .json or .parquet"
        raise UserMistake(f"DATASET={folder} has no file for split {split!r}; it has {names}")
    formats = {(file.suffix, int(match[2] or 1)) for file, match in matches.items()}
    numbers = sorted(int(match[1] or 0) for match in matches.values())
    if len(formats) > 1 or numbers != [*range(max(count for _, count in formats))]:
        names = ", ".join(file.name for file in matches)
        reason = "a shard is missing, or the split is there twice"
        raise UserMistake(f"DATASET={folder}: split {split!r} is in {names:.400}: {reason}")
    return [*matches]


def _read_hub(dataset: str, config: str, split: str) -> list[Example]:
    import datasets  # slow to import, and only needed for the hub

    name = config or HUB_CONFIGS.get(dataset, "")
    mistake = f"DATASET={dataset}: no such file or folder, and the hub says (DATASET_CONFIG={name})"
    with reading(mistake):
        return datasets.load_dataset(dataset, name or None, split=split).to_list()


def _read_file(file: Path) -> list[Example]:
    """The examples of a file. Empty lines of a .jsonl file are left out."""
    if not file.is_file():
        raise UserMistake(f"DATASET={file}: this file or folder does not exist")
    if file.suffix not in SUFFIXES:
        raise UserMistake(f"DATASET={file} is not a .jsonl, .json or .parquet file")
    if file.suffix == ".parquet":
        import pyarrow.parquet  # a requirement of datasets

        with reading(f"{file} cannot be read"):
            return pyarrow.parquet.read_table(file).to_pylist()
    if file.suffix == ".json":
        text = read_text(file)
        with reading(f"{file} is not JSON"):
            items = json.loads(text)
        if not isinstance(items, list):
            raise UserMistake(
                f"{file} is not a JSON list of examples; if each line is an example, name it .jsonl"
            )
        named = {f"example {number}": item for number, item in enumerate(items, start=1)}
    else:
        named = {}
        for number, line in enumerate(_read_lines(file), start=1):
            if line.strip():
                with reading(f"{file} line {number} is not JSON"):
                    named[f"line {number}"] = json.loads(line)
    for name, item in named.items():
        if not isinstance(item, dict):
            raise UserMistake(f"{file} {name} is not a {OBJECT}, but {json.dumps(item):.80}")
    return [*named.values()]


def _read_lines(file: Path) -> Iterator[str]:
    """Yields the lines of a file, as read_text decodes them. Raises UserMistake."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            yield from (line.removesuffix("\n") for line in lines)  # splitlines splits at U+2028
    except (OSError, UnicodeDecodeError):
        read_text(file)  # the position in its error is that in the file, and not in a part of it
        raise


# ---- Prompts -------------------------------------------------------------------------------------


def build_prompts(
    examples: list[Example], chat_format: ChatFormat, vocab_size: float = math.inf
) -> list[Prompt]:
    """The prompt of each example, made by the chat template.

    vocab_size: rows of the model's embedding.
    Raises UserMistake if a text is not Unicode, if the template fails, or if a token has no row.
    """
    prompts: list[Prompt] = []
    with progress_bar("tokenizing", len(examples), "prompts") as bar:
        for start in range(0, len(examples), TOKENIZED_AT_ONCE):
            batch = examples[start : start + TOKENIZED_AT_ONCE]
            chats = checked_chats([chat_format.messages_of(x) for x in batch], chat_format)
            ids = tokenize(chat_format.render(chats), chat_format, vocab_size)
            prompts += map(Prompt, ids, batch)
            bar.update(len(batch))
    return prompts


def tokenize(texts: list[str], chat_format: ChatFormat, vocab_size: float) -> list[list[int]]:
    """The ids of each text. Raises UserMistake if the model has no row for one."""
    tokenizer = chat_format.tokenizer
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    largest = max((max(text_ids, default=0) for text_ids in ids), default=0)
    if largest >= vocab_size:
        reason = f"a text has the token {tokenizer.decode([largest])!r} ({largest})"
        raise UserMistake(f"{reason}, for which the model has no embedding; remove it")
    for text_ids in ids:
        text_ids[:] = map(_shared_int, text_ids)
    return ids


@functools.cache
def _shared_int(token_id: int) -> int:
    """One object for all equal ids: a token then takes 8 bytes of a list, and not 40."""
    return token_id


def drop_long_prompts(
    prompts: list[Prompt], lengths: list[int], limit: int, split: str, part: str = "prompt"
) -> list[Prompt]:
    """The prompts of at most `limit` tokens (0: no limit). Prints how many are longer.
    lengths: the tokens of each prompt or completion. split, part: names in messages; part:
    "prompt" or "completion". Raises UserMistake if no prompt is left."""
    if not limit:
        return prompts
    setting = f"{'MAX_PROMPT_LENGTH' if part == 'prompt' else 'MAX_LENGTH_SAMPLE'}={limit}"
    kept = [p for p, length in zip(prompts, lengths, strict=True) if length <= limit]
    if not kept:
        reason = f"every {split} {part} is longer; the shortest has {min(lengths)} tokens"
        raise UserMistake(f"{setting}: {reason}")
    if len(kept) < len(prompts):
        skipped = f"{len(prompts) - len(kept)} of {len(prompts)} {split} {part}s"
        print(f"skipped {skipped}: longer than {setting} tokens", flush=True)
    return kept


def print_repeats(
    train: list[Prompt], held_out: list[Prompt], dataset: str, all_columns_count: bool
) -> None:
    """Prints how many held-out questions are also trained on. all_columns_count: a question is the
    same only if its other columns are."""

    def key(prompt: Prompt) -> tuple:
        columns = prompt.columns
        question = columns if all_columns_count else columns.get("prompts") or columns["question"]
        return json.dumps(question), *prompt.completion_ids  # the completion of a demonstration

    repeats = {*map(key, held_out)}.intersection(map(key, train))
    if count := sum(key(prompt) in repeats for prompt in held_out):
        share = f"{count} of {len(held_out)} held-out questions of {dataset}"
        print(f"{share} are also in the training split: their results are no test", flush=True)


def print_uneven_head(prompts: list[Prompt], limit: int, split: str) -> None:
    """Prints a line about each column of which the first `limit` examples, those of an evaluation
    (0: all), lack the values of most others, as in a split that is sorted by it. A column with more
    than limit / 10 values does not count."""
    for name in prompts[0].columns if limit and prompts else ():
        values = [prompt.columns.get(name) for prompt in prompts]
        if all(isinstance(value, str | int) for value in values):
            distinct, seen = {*values}, {*values[:limit]}
            missing = sum(value not in seen for value in values)
            if 10 * len(distinct) <= limit and 2 * missing >= len(values):
                reason = f"have {len(seen)} of the {len(distinct)} values of column {name!r}"
                first = f"the first {limit} of {len(values)} {split} examples (EVAL_PROMPTS)"
                print(f"note: {first} {reason}; shuffle them, or set EVAL_PROMPTS=0", flush=True)


def pad_prompts(prompts: list[list[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """prompt_ids and prompt_mask, both [len(prompts), width] int32, padded on the left.

    prompts: the token ids of each prompt. The mask is 1 on the tokens of the prompt, 0 on padding.
    """
    prompt_ids = np.full((len(prompts), width), pad_id, np.int32)  # [prompts, width]
    prompt_mask = np.zeros((len(prompts), width), np.int32)  # [prompts, width]
    for i, ids in enumerate(prompts):
        prompt_ids[i, width - len(ids) :] = ids
        prompt_mask[i, width - len(ids) :] = 1
    return prompt_ids, prompt_mask


# ---- The examples of a step ----------------------------------------------------------------------


def batch_indices(
    num_examples: int, prompts_per_step: int, round_number: int, seed: int
) -> np.ndarray:
    """[P] int64, the indices of the examples of a round of sampling, counted from 0.

    Each epoch visits every example once, in an order that depends only on (seed, epoch). A round
    may begin in one epoch and end in the next.
    """
    positions = round_number * prompts_per_step + np.arange(prompts_per_step)  # [P]
    epochs, offsets = np.divmod(positions, num_examples)  # [P], [P]
    pairs = zip(epochs, offsets, strict=True)
    return np.array([_order(num_examples, seed, epoch)[offset] for epoch, offset in pairs])


@functools.lru_cache(maxsize=2)
def _order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, int(epoch))).permutation(num_examples)
