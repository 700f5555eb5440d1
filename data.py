"""GSM8K, or any JSONL of question/answer -> prompt token ids.

Which questions a step sees is a pure function of (seed, step): see `batch_indices`.
P: prompts of a step.
"""

import functools
import itertools
import json
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# A chat template may print today's date, by the function strftime_now or as date_string. A prompt
# must not change at midnight, so every template gets the date that Llama 3.2's falls back to.
# transformers passes text alone to a template; therefore the function is a macro in front of it.
DATE = datetime(2024, 7, 26)
_DIRECTIVES = "%a %A %b %B %d %-d %H %I %j %m %-m %M %p %S %y %Y".split()
_REPLACED = [f"replace('{d}', '{DATE.strftime(d)}')" for d in _DIRECTIVES]
STRFTIME_NOW = "{% macro strftime_now(format) %}{{ " + " | ".join(["format", *_REPLACED])
STRFTIME_NOW += " }}{% endmacro +%}"
_TAIL = 16  # tokens at a prompt's end, more than a tag and the white space after it have
SUFFIXES = (".jsonl", ".json", ".parquet")
HELD_OUT = 0.1  # of a dataset that is one file, for evaluation


class Prompt(NamedTuple):
    ids: list[int]  # through the chat template, up to where the assistant speaks
    columns: dict[str, Any]  # the dataset's row; `question` and `answer` (GSM8K's form) are texts


# ---- Rows ----------------------------------------------------------------------------------------


def load_rows(
    dataset: str, dataset_config: str, split: str, question: str = "question",
    answer: str = "answer",
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of one split of a local file, a local folder or a hub id.

    A folder has one file a split (train.jsonl, test-00000-of-00001.parquet). A single file has two
    splits: "test" is the last tenth of its rows, "train" all rows before it.
    question, answer: the columns with these texts; each row has them as `question` and `answer`
    too, beside all of its columns.
    Raises ValueError for what is not there, not JSON, or lacks text in one of the two columns.
    """
    path = Path(dataset)
    one_file = path.is_file() or (path.suffix in SUFFIXES and not path.is_dir())
    if one_file:
        placed = _read_file(path)
    elif path.is_dir():
        placed = itertools.chain.from_iterable(map(_read_file, _split_files(path, split)))
    elif dataset.startswith(("/", "~", "./", "../")):  # no id of the hub begins like this
        raise ValueError(f"DATASET={dataset}: this file or folder does not exist")
    else:
        placed = _read_hub(dataset, dataset_config, split)
    wanted = {"question": question, "answer": answer}
    rows = [_checked(place, row, wanted) for place, row in placed]
    # Rewards get the columns as lists, so every row has every column of the split.
    columns = dict.fromkeys(name for row in rows for name in row)
    for taken in {"completions", "completion_ids"} & set(columns):  # what rewards are given
        raise ValueError(f"DATASET={dataset}: a column may not be called {taken}; rename it")
    rows = [{name: row.get(name) for name in columns} for row in rows]
    if one_file:
        if len(rows) < 2:
            raise ValueError(f"DATASET={dataset} needs 2 rows, to hold one out; it has {len(rows)}")
        if split not in ("train", "test"):
            raise ValueError(
                f"DATASET={dataset} has no split {split!r}: the splits of a single file are train "
                f"and test, its last tenth; set TRAIN_SPLIT and EVAL_SPLIT to these"
            )
        held_out = max(1, round(HELD_OUT * len(rows)))
        rows = rows[:-held_out] if split == "train" else rows[-held_out:]
    if not rows:
        raise ValueError(f"DATASET={dataset} has no rows in split {split!r}")
    return rows


def _checked(place: str, row: Any, wanted: dict[str, str]) -> dict[str, Any]:
    """The row with its `question` and `answer`. wanted: the columns that hold them."""
    columns = row if isinstance(row, dict) else {}
    for name, column in wanted.items():
        text = columns.get(column)
        if not isinstance(text, str) or not text.strip():
            hint = f"; set {name.upper()}_COLUMN to one of its columns, {', '.join(columns)}"
            hint = hint if columns and column not in columns else ""
            raise ValueError(f"{place} has no text in {column!r}{hint}")
    return columns | {name: columns[column] for name, column in wanted.items()}


def _split_files(folder: Path, split: str) -> list[Path]:
    files = sorted(f for f in folder.iterdir() if f.suffix in SUFFIXES)
    chosen = [f for f in files if f.stem == split or f.stem.startswith(f"{split}-")]
    if not chosen:
        there = ", ".join(f.name for f in files) or "no .jsonl, .json or .parquet"
        raise ValueError(f"DATASET={folder} has no file of split {split!r}; it has {there}")
    return chosen


def _read_hub(dataset: str, dataset_config: str, split: str) -> Iterator[tuple[str, Any]]:
    import datasets  # heavy, and only for the hub

    try:
        rows = datasets.load_dataset(dataset, dataset_config or None, split=split).to_list()
    except Exception as error:  # datasets', the hub's and a proxy's have no common base
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"DATASET={dataset}: no such local file or folder, and the hub says: {reason}"
        ) from None
    yield from _numbered(f"DATASET={dataset}:{split}", rows)


def _numbered(source: Any, rows: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{source} row {number}", row) for number, row in enumerate(rows, start=1))


def _read_file(file: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of each row of a file."""
    if not file.is_file():
        raise ValueError(f"DATASET={file}: no such file")
    if file.suffix == ".parquet":
        import pyarrow.parquet  # comes with datasets

        try:
            rows = pyarrow.parquet.read_table(file).to_pylist()
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is not a whole parquet file: {error}") from None
        yield from _numbered(file, rows)
        return
    try:
        text = file.read_text(encoding="utf-8-sig")  # Windows editors put a byte order mark first
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{file} line {line} is not UTF-8 text") from None
    if file.suffix == ".json":
        rows = _parse(text, file, 1)
        if not isinstance(rows, list):
            raise ValueError(f"{file} is not a JSON list of rows; one row a line is a .jsonl")
        yield from _numbered(file, rows)
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 is text
        if line.strip():
            yield f"{file} line {number}", _parse(line, file, number)


def _parse(text: str, file: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{file} line {line} is not JSON: {error.msg}") from None


# ---- Prompts -------------------------------------------------------------------------------------


def text_of(setting: str) -> str:
    """SYSTEM_PROMPT's text: of the file it names, or itself.

    Raises ValueError for a file that is not there, or is no UTF-8 text.
    """
    if not os.path.isfile(setting):
        if re.fullmatch(r"\S+\.(txt|md)|\S*/\S+", setting):
            raise ValueError(f"SYSTEM_PROMPT={setting}: no such file")
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"SYSTEM_PROMPT={setting} is not UTF-8 text") from None


def build_prompts(rows: list[dict[str, Any]], tokenizer: Any, system_prompt: str) -> list[Prompt]:
    """Each row's question through the tokenizer's chat template, tokenized; today is DATE."""
    chats = [
        [{"role": "system", "content": system_prompt}, {"role": "user", "content": row["question"]}]
        for row in rows
    ]
    try:
        texts = tokenizer.apply_chat_template(
            chats, tokenize=False, add_generation_prompt=True, date_string=f"{DATE:%d %b %Y}",
            chat_template=STRFTIME_NOW + tokenizer.get_chat_template(),
        )  # fmt: skip
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"MODEL_PATH (or CHAT_TEMPLATE): its chat template fails on a system and a user "
            f"message: {error}"
        ) from None
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [Prompt(i, row) for i, row in zip(ids, rows, strict=True)]


def opened_tag(prompt: Prompt, tokenizer: Any) -> str:
    """The <think> that the chat template opens at the prompt's end for the assistant, with the
    white space after it; "" where the template opens none.

    The sampled completion then lacks this tag, but rewards have to see it.
    """
    found = re.search(r"<think>\s*\Z", tokenizer.decode(prompt.ids[-_TAIL:]))
    return found[0] if found else ""


def fit_prompts(prompts: list[Prompt], limit: int, too_long: str, what: str) -> list[Prompt]:
    """The prompts of at most `limit` tokens (0 = all). too_long: "skip", which says how many it
    skips, or "error".

    Raises ValueError when one is too long and may not be skipped, and when none is left.
    """
    if not limit:
        return prompts
    kept = [p for p in prompts if len(p.ids) <= limit]
    if len(kept) < len(prompts) and too_long == "error":
        worst = max(len(p.ids) for p in prompts)
        raise ValueError(
            f"MAX_PROMPT_LENGTH={limit}: {len(prompts) - len(kept)} {what} prompts are longer, up "
            f"to {worst} tokens; raise it or set PROMPT_TOO_LONG=skip"
        )
    if not kept:
        shortest = min(len(p.ids) for p in prompts)
        raise ValueError(
            f"MAX_PROMPT_LENGTH={limit}: every {what} prompt is longer; the shortest has {shortest}"
        )
    if len(kept) < len(prompts):
        skipped = f"{len(prompts) - len(kept)} of {len(prompts)} {what} prompts"
        print(f"skipped {skipped}: longer than MAX_PROMPT_LENGTH={limit} tokens", flush=True)
    return kept


def batch_indices(num_rows: int, prompts_per_step: int, step: int, seed: int) -> np.ndarray:
    """[P] int64: the rows that step `step` (from 0) sees. Every epoch visits every row once, in
    an order that depends on (seed, epoch) alone; a step may begin one epoch and end in the next."""
    places = np.arange(step * prompts_per_step, (step + 1) * prompts_per_step)
    epochs, offsets = np.divmod(places, num_rows)
    return np.array([_order(num_rows, seed, e)[o] for e, o in zip(epochs, offsets, strict=True)])


@functools.lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, int(epoch))).permutation(num_rows)
