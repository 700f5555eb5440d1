"""A game of several turns, guessing a number: ENVIRONMENT_CLASS=recipes/guess.py:Guess."""

import re


class Guess:
    """Has a number in mind, and answers each guess with "higher" or "lower"."""

    def reset(self, answer: str, **columns: object) -> None:
        """Begins a game. The number is the answer of the dataset's example."""
        self.number, self.won = int(answer), False

    def reply(self, text: str) -> str | None:
        """Answers a turn of the model: its guess is the last number in the text."""
        numbers = re.findall(r"\d{1,9}", text)
        if not numbers:
            return "Say a number."
        guess = int(numbers[-1])
        self.won = guess == self.number
        if self.won:
            return None
        return "higher" if guess < self.number else "lower"

    def get_reward(self) -> float:
        """1 for a number that was found within MAX_TURNS, else 0."""
        return float(self.won)
