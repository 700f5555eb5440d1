"""A backend that draws the turns that a test gives it, and the messages between turns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from runs import REPO
from tokenizers import Tokenizer

from sampling import Completions

TINY, GAMES = REPO / "tiny", REPO / "tests" / "games.py"
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
END = 2  # the tiny model's stop token, <|im_end|>


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


class Script:
    """Draws the given turns of each sequence instead of a model, as far as there is room."""

    def __init__(self, turns: list[list[str]], T: int) -> None:
        self.turns, self.T = [[ids_of(text) for text in of_one] for of_one in turns], T
        self.asked: list[list[tuple[list[int], int, int]]] = []  # of each pass

    def generate(
        self,
        prompt_ids: np.ndarray,
        prompt_mask: np.ndarray,
        sequence_ids: np.ndarray,
        key: Any,
        sampling: Any,
        earlier: np.ndarray | None = None,
    ) -> Completions:
        b, T = len(sequence_ids), self.T
        earlier = np.zeros(b, np.int32) if earlier is None else earlier
        places = np.arange(b) * len(prompt_ids) // b
        prompts = [prompt_ids[i][prompt_mask[i] > 0].tolist() for i in places]
        triples = zip(prompts, sequence_ids.tolist(), earlier.tolist(), strict=True)
        self.asked.append([*triples])
        ids, mask = np.full((b, T), END, np.int32), np.zeros((b, T), np.int32)
        for i, (_, number, count) in enumerate(self.asked[-1]):
            if count < T:
                drawn = self.turns[number].pop(0)[: T - count]
                ids[i, : len(drawn)], mask[i, : len(drawn)] = drawn, 1
        logps = np.float32(-ids / 1000 * mask)
        support = np.where(mask[:, :, None] > 0, ids[:, :, None] + [0, 1], -1).astype(np.int32)
        lengths, sevens = mask.sum(axis=1).astype(np.int32), np.full(b, 7, np.int32)
        return Completions(sequence_ids, ids, mask, lengths, logps, sevens, support, lengths // 2)


def parts_of(ids: Sequence[int], drawn: Sequence[int]) -> list[tuple[bool, list[int]]]:
    """The turns and the messages of a completion, each with whether the model drew it."""
    starts = np.flatnonzero(np.diff(drawn)) + 1
    parts = zip(np.split(drawn, starts), np.split(ids, starts), strict=True)
    return [(bool(is_drawn[0]), part.tolist()) for is_drawn, part in parts]


def user(text: str) -> str:
    """A message between two turns, as the tiny model's chat template writes it."""
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def answers(*texts: str) -> str:
    """The message with the answers to the calls of a turn, as Qwen3's template writes it."""
    return user("\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts))
