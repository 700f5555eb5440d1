"""Environments of tests, which name this file in ENVIRONMENT_CLASS."""

import random
import re
import threading
import zlib

import numpy as np


class Higher:
    """The policy guesses the number of the answer, and hears on which side of its guess it lies."""

    def reset(self, answer: str, **columns: str) -> None:
        self.number, self.guess = int(answer.rpartition("#### ")[2]), None

    def reply(self, text: str) -> str | None:
        guesses = re.findall(r"\d+", text)
        if not guesses:
            return "Say a number."
        self.guess = int(guesses[-1])
        if self.guess == self.number:
            return None
        return "It is higher." if self.guess < self.number else "It is lower."

    def get_reward(self) -> float:
        return float(self.guess == self.number)


class Echo:
    """What it says, when it ends and what it rewards follow from all that it has heard. Its prompts
    are longer than all questions of the tiny dataset."""

    def reset(self, question: str, **columns: str) -> str:
        self.heard = [question]
        return " Think well." * 3 + f" Code {random.randrange(100)}."

    def code(self) -> int:
        return zlib.crc32("|".join(self.heard).encode())

    def reply(self, text: str) -> str | None:
        self.heard.append(text)
        return None if self.code() % 4 == 0 else f"{len(self.heard)} and {self.code() % 1000}."

    def get_reward(self) -> float:
        return self.code() % 2


class Waits:
    """Its tool waits for the tools of 62 other completions."""

    concurrent = True
    all_of_63 = threading.Barrier(63)

    def reset(self, **columns: str) -> None:
        self.heard = 0

    def look_up(self, number: int) -> int:
        """Doubles a number.

        Args:
            number: the number
        """
        Waits.all_of_63.wait(timeout=5)  # It ends only if all of them wait at the same time.
        self.heard = number
        return 2 * number

    def get_reward(self) -> float:
        return float(self.heard)


class Dice:
    """All that it says is random, by both generators."""

    def reset(self, **columns: str) -> str:
        return Dice.reply(self, "")

    def reply(self, text: str) -> str | None:
        return f" {random.randrange(10**6)} {np.random.randint(10**6)}"

    def get_reward(self) -> float:
        return random.random() + np.random.random()


class Chance(Dice):
    """Chance ends its episodes, and rewards them."""

    def reply(self, text: str) -> str | None:
        return None if np.random.random() < 0.3 else super().reply(text)

    def get_reward(self) -> float:
        return random.randrange(2)


class Calculator:
    """Four tools: `add` keeps a sum, `roll` is random, and `run` may do anything."""

    def reset(self, **columns: str) -> None:
        self.sum = 0

    def add(self, number: int) -> str:
        """Adds a number to the sum.

        Args:
            number: What is added.
        """
        self.sum += number
        return f"The sum is {self.sum}."

    def divide(self, dividend: float, divisor: float) -> float:
        """Divides a number by another.

        Args:
            dividend: What is divided.
            divisor: By what it is divided.
        """
        return dividend / divisor

    def roll(self) -> str:
        """Rolls dice."""
        return Dice.reply(self, "")

    def run(self, code: str) -> None:
        """Executes Python code.

        Args:
            code: What is executed.
        """
        exec(code)

    def get_reward(self) -> float:
        return self.sum


class Typed(Calculator):
    """Its tool shows which values its arguments have."""

    def show(
        self,
        text: str = "",
        whole: int = 0,
        real: float = 0.0,
        switch: bool = False,
        several: list[str] = (),
        maybe: int | None = 0,
        numbers: list[int] | None = None,
        table: dict[str, list[float]] | list[int] | None = None,
    ) -> str:
        """Shows its arguments.

        Args:
            text: A text.
            whole: A whole number.
            real: A number.
            switch: A switch.
            several: Texts.
            maybe: A whole number or nothing.
            numbers: Whole numbers.
            table: Numbers by names, or whole numbers.
        """
        if numbers or table:
            return repr(numbers or table)
        return repr((text, whole, real, switch, several, maybe))


class Counter(Higher):
    """It counts its episodes."""

    episodes = 0

    def reset(self, **columns: str) -> None:
        self.episodes += 1

    def get_reward(self) -> float:
        return self.episodes


def texts_heard(completions: list[str], environments: list[Echo], **columns: list) -> list[float]:
    """How many texts each environment has heard; the question is one of them."""
    return [len(environment.heard) for environment in environments]
