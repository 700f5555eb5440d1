"""A game for test_trl_turns.py: the model sees coins in boxes and moves them, until all boxes have
the same number. The class keeps what it was called with, and a reward function writes it down."""

import json
from pathlib import Path


class Boxes:
    def reset(self, coins: list[int], **columns: object) -> str:
        self.coins, self.calls = list(coins), []
        return f" There are {len(coins)} boxes."

    def look(self, box: int) -> str:
        """Counts the coins in a box.

        Args:
            box: The number of the box.
        """
        self.calls.append(["look", box])
        return f"{self.coins[box]} coins"

    def move(self, source: int, target: int, number: int = 1) -> str:
        """Moves coins from one box to another.

        Args:
            source: The number of the box that loses coins.
            target: The number of the box that gets them.
            number: The number of coins.
        """
        self.calls.append(["move", source, target, number])
        if not 0 <= number <= self.coins[source]:
            raise ValueError(f"box {source} has {self.coins[source]} coins")
        self.coins[source] -= number
        self.coins[target] += number
        return f"{self.coins[target]} coins are in box {target} now"

    def get_reward(self) -> float:
        return float(len(set(self.coins)) == 1)


def write_calls(
    completions: list, environments: list[Boxes], calls_file: list[str], **columns: list
) -> list[None]:
    """Writes the calls of each environment into the file that the dataset names."""
    Path(calls_file[0]).write_text(json.dumps([each.calls for each in environments]))
    return [None] * len(environments)
