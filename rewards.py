"""The answer format that the prompt asks for, and the rewards of completions.

A reward function is `fn(completions, **columns)`. completions: the texts. columns: the tokens of
the completions, `completion_ids`, and each column of the dataset (`answer` among them), as lists of
the same length. It returns a list with one number per completion, or None where the function does
not apply. REWARD_FN may name the functions of this file, and with file.py:name a function of any
file, which a reward worker runs.

Dimensions: `completions` of one call, `functions` of the run.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any
from unicodedata import normalize

import numpy as np

from infra.mistakes import UserMistake
from infra.reward_worker import LOADING_S, RewardWorker, get_worker

SYSTEM_PROMPT = """\
Reason step by step inside <think> </think>. Then, on the next line, write only the final number \
inside <answer> </answer>. Use exactly this form:
<think>your reasoning</think>
<answer>your number</answer>"""

TAG_NAMES = ("think", "answer")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
Rewards = list[float | None]  # a reward per completion; None: the function does not apply

_MAX_NUMBER = 300  # the characters of the longest number that parse_number reads
_WINDOW = 4096  # characters up to the last digit that parse_number reads
_AROUND = 64  # characters on either side of a number in which _PART is searched

# Full-width digits, letters and -./ as texts in Chinese have them: １２ and Ｂ.
_TO_ASCII: dict[int, int | str | None] = {
    code: code - 0xFEE0
    for first, last in ("－９", "ＡＺ", "ａｚ")
    for code in range(ord(first), ord(last) + 1)
}
# Digits of other scripts (१२) and bold ones, Arabic's separators, and characters without a width,
# such as U+200B, which a person does not see.
_OTHER_DIGITS = map(chr, (*range(0x660, 0xFF10), *range(0x1D7CE, 0x1D800)))
_TO_ASCII |= {ord(x): str(int(x)) for x in _OTHER_DIGITS if x.isdecimal()}
_TO_ASCII |= {0x66B: ".", 0x66C: ","}
_UNSEEN = (range(0x200B, 0x2010), range(0x202A, 0x202F), range(0x2060, 0x2070))
_TO_ASCII |= dict.fromkeys((0xAD, 0xFEFF, *(code for codes in _UNSEEN for code in codes)))
_TO_ASCII |= str.maketrans("‘’“”", "''\"\"")  # typographic quotes, as in don’t
# Minus sign, en dash, spaces that keep a number and its unit in one line, the slashes of
# fractions (1⁄2), and ½ as \frac12.
_FRACTIONS = "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_PLAIN = str.maketrans(
    dict(zip("\u2212\u2013\u00a0\u202f\u2009\u2044\u2215■", [*"--   //", ""], strict=True))
    | {x: rf"\frac{normalize('NFKC', x)}".replace("\u2044", "") for x in _FRACTIONS}
)
# No two repeats of these patterns and of _NUMBER can match the same character. A failed match gives
# up at once, and the time is linear in the length of any text. _PART sees a few characters only.
_SPELLINGS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<=[0-9])(?:\{,\}|,?\\[,!][ ]?|'(?=[0-9]{3}))(?=[0-9])", ","),  # 10\,000, 1'000
        (r"\\(?:text|math|mbox)[a-z]*\{([^{}]*)\}?", r" \1 "),
        (r"\^[ ]?\{?[ ]?(?:\\circ(?![A-Za-z])|(?:st|nd|rd|th)(?![a-z]))(?:[ ]?\})?", ""),  # 5^{th}
        (r"\\(?:approx|to|[Rr]ightarrow|implies|therefore)(?![A-Za-z])", "="),
        (r"\\(?:boxed|left|right|displaystyle|q?quad|rm|degree|checkmark)(?![A-Za-z])", " "),
        (r"\\end\{align\*?\}", " "),
        (r"\\[,:;! ]|~", " "),
        (r"\\([$%{}])", r"\1"),
        (r"(?<![\w}])_+([^_\s{}]+)_+(?![\w{])", r"\1"),  # _5_ in Markdown
    )
]
_LATEX_FRACTION = re.compile(
    r"([0-9]?)-?\\[cdt]?frac ?(\{ ?-?[0-9.,]+ ?\}|[0-9]) ?(\{ ?-?[0-9.,]+ ?\}|[0-9])(?![0-9])"
)

# These patterns match a whole token, such as 100,00 or 10 000; _VALUE decides if it is a number.
# 00 after a separator ends a longer token, such as 10, 000; the 007 of AIME stands alone.
_TERM = (
    r"(?:(?<![\w.])\.)?[0-9]+(?:[.,][0-9]+(?:\.{3}|…)?|[ ][0-9]{3}(?![0-9/])"
    r"|[ ,.'`´，、{}-]{1,4}(?<!\{)00[0-9]*)*(?:[eE][-+]?[0-9]+)?"
)
_NUMBER = re.compile(
    rf"""
    \^[ ]?\{{?[-+]?[0-9]+                                # a power, as in 72 cm^2, is no answer
    | (?P<minus>(?:(?<![0-9A-Za-z)\]}}%])-               # -5 in "-5", 5 in "10-5" and "GPT-5"
      | (?:^|(?<=[=:($\[{{])[ ]?)-[ ])[$£¥\u20a0-\u20bf]?)?  # -5 in "- 5", 5 in "10 - 5"
      (?P<number>{_TERM})
      (?:(?:[ ](?P<top>[0-9]+)/|[ ]?/[ ]?)(?P<bottom>{_TERM}))?  # "1 1/2" or "1/2"
    """,
    re.VERBOSE,
)
_VALUE = re.compile(
    r"(?:[0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?"
)
# A number (■) inside a larger expression is not an answer.
_PART = re.compile(
    r"""
    \\[A-Za-z](?:[^\s=]*[ ]?[({\[]*|[^\s=]*\{[^{}]*)■      # \sqrt{■}, \log_2 ■, \sqrt{3 - ■}
    | [_√×·⋅÷][ ]?[({]?■                                 # 3617_■, 5√■, 3 × ■
    | [\w)}](?:[+*]+|[ ][+*x]+[ ])■                      # 3+■, 2**■, 3 x ■
    | [\w)\]}.-][({\[]+■                                 # f(■), sqrt(■), (3)(■), 0.(■), -(■)
    | [0-9][':]■ | (?:[A-Za-z)}]|\^[0-9]+)/[ ]?■         # 5'■, 9:■, a/■, 10^3/■
    | (?<![A-Z]{2})(?<!\bR)[A-Za-z]■                     # H■O, but not USD■, Rs■
    | (?:[)}\]]|\^\{?\w+\}?|\b[A-Za-z]|[0-9][A-Za-z])[ ]?-[ ]?■     # x^2 - ■, x - ■, 4x-■
    | [({\[][^(){}\[\]]*,[ ]?■[ ]?[)}\]]                 # (2, ■)
    | \b(?:base|choose|minus|mod|negative|plus|times)[ ]■
    | (?<![A-Za-z][ ])■! | ■[(√π¹²³⁰-⁹₀-₉] | ■[ )}\]]*[\^_]  # ■!, ■(x + 1), (■)^3, ■_8
    | ■,?[ ]?\\[A-Za-z]{2} | ■[ ]?[×·⋅÷π]                # ■\pi, (■,\infty), ■ × 3
    | ■[ ]?[-+*/][ ]?(?:(?!a[ ])[a-cijknp-rt-z](?![A-Za-z])|[(\\])      # ■ + x, ■/a, ■ - (x + 1)
    | ■[ ][inxyz](?![A-Za-z']|\.[a-z])                   # ■ x
    | ■(?:[a-cijknp-rt-z]|[abnxyz]{2}|pi)(?![A-Za-z])    # ■x, ■ab, but not ■m, ■kg
    | ■[ ](?:choose|mod|pi|and[ ]a[ ]half)\b
    """,
    re.VERBOSE,
)

# The letter of an option, alone or before its text: (B), **B**, $B$, B) 42, B. Paris. Not A* or
# C++, no expression such as (a) + 1, and not two letters, as in (B) or (C).
_OPTION = re.compile(
    r"""
    ([\s(\[{（*_$"'`]+)? (?P<letter>([A-Ja-j])|[A-Za-z]) (?(1)[*_$"'`]*+) (?:
      (?(1)(?:\s?[)\]}）*_$"'`])*+) [.:)\]。：）]?\s*
    | (?(3)|(?!)) (?:[)\]}）] | (?P<mark>[:：、]|\.(?![A-Za-z])))
      (?!\s*or\b|.*[\s(*$][A-Z](?:[):]|\.\s)) [)\]}）*_$\s]*+ (?![+/=^<>,]|-\s)
      (?:(?(mark)(?P<words>[^\W\d_].*)) | .+)
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_FONT = re.compile(r"\\(?:text|math|mbox|boxed)[a-z]*|\\")  # \text in \text{B}

_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)  # \{ and \} are printed, and match \\.


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """A reward function as a run calls it, and what the run has to know about it."""

    name: str
    call: Callable[..., Rewards]  # gets the completions and {column: values}
    reads_answer: bool = False  # it needs the column `answer`
    extract_answer: Callable[[str], Any] | None = None  # the answer in a text, for maj@K
    source: str = ""  # file.py:name of a user's function, for errors
    prefetch: Callable[..., None] | None = None  # of a user's file
    # Only reward_model has these three methods of Scorer in extras/scorer.py.
    prepare: Callable[..., None] | None = None
    fingerprint: Callable[[], dict[str, str]] | None = None
    take_metrics: Callable[[int | None], dict[str, float]] | None = None

    def __call__(self, completions: list[str], /, **columns: list) -> Rewards:
        return self.call(completions, **columns)


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of the last number in `text`, or None.

    It reads 1,234 and .5 and 5. and -$5 and 3/4 and 1 1/2 and 2e3 and LaTeX fractions. It ignores
    units, currencies and the percent sign (50% is 50, as GSM8K writes it). It returns None for a
    text without a number, for a zero denominator, for numbers of absurd length, and for a last
    number that is in doubt, such as 100,00, or a part of something larger, such as 10^3 and 2\pi.
    """
    text = text.strip().translate(_TO_ASCII)
    last = max(map(text.rfind, "0123456789" + _FRACTIONS))
    text = text[max(0, last - _WINDOW) : last + _AROUND].translate(_PLAIN)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    text = re.sub(" +", " ", _LATEX_FRACTION.sub(_with_slash, text))
    numbers = [match for match in _NUMBER.finditer(text) if match["number"]]
    if not numbers:
        return None
    match = numbers[-1]
    start, end = match.span()
    if _PART.search(f"{text[max(0, start - _AROUND) : start]}■{text[end : end + _AROUND]}"):
        return None
    number, top, bottom = (_value(match[name] or "1") for name in ("number", "top", "bottom"))
    if number is None or top is None or bottom is None or bottom == 0:
        return None
    value = number / bottom
    if match["top"]:
        # "1 1/2" is a mixed number. "5 10/2" and "2.5 1/2" are two numbers, and the last counts.
        if top >= bottom or number.denominator != 1:
            return top / bottom
        value = number + top / bottom
    return -value if match["minus"] else value


def _with_slash(fraction: re.Match) -> str:
    r"""-3/4 for -\frac{3}{4}, \frac{-3}{4} and \frac{3}{-4}, apart from a digit before."""
    digit, top, bottom = (part.strip("{- }") for part in fraction.groups())
    sign = "-" if fraction[0].count("-") % 2 else " " if digit else ""
    return f"{digit}{sign}{top}/{bottom}"


def _value(term: str) -> Fraction | None:
    """The value of 1,234.5 or 2e3; None for 100,00, for 10 000 and for numbers of absurd
    length."""
    is_number = len(term) <= _MAX_NUMBER and _VALUE.fullmatch(term)
    return Fraction(term.replace(",", "")) if is_number else None


def extract_answer(text: str) -> Fraction | None:
    """The number that a completion gives as its answer, or None.

    The answer is the last number in the last closed <answer>. If no <answer> is closed (a truncated
    completion), it is the last number after the last <answer>. If there is no <answer> at all, it
    is the last number of the text. An <answer> without a number is never replaced by other numbers.
    What a thought says that is never closed is no answer.
    """
    text = without_open_thought(text)
    closed = _closed_answer(text)
    return parse_number(text.rpartition("<answer>")[2] if closed is None else closed)


def without_open_thought(text: str) -> str:
    """The text up to the first <think> that no </think> follows."""
    before, end, after = text.rpartition("</think>")
    return before + end + after.partition("<think>")[0]


def _closed_answer(text: str) -> str | None:
    """The text in the last closed <answer>, or None."""
    _, opened, answer = text.rpartition("</answer>")[0].rpartition("<answer>")
    return answer.partition("</answer>")[0] if opened else None


def marked_answer(text: str) -> str | None:
    r"""The text in the last closed <answer>, else in the last closed \boxed{}, or None. What a
    thought says that is never closed is no answer."""
    text = without_open_thought(text)
    answer = _closed_answer(text)
    if answer is not None:
        return answer
    starts, start, end = [], 0, 0  # starts: for each open brace that of \boxed's text, or 0
    for brace in _BRACES.finditer(text):
        if brace[0] in (r"\boxed{", "{"):
            starts.append(brace.end() if brace[0] != "{" else 0)
        elif brace[0] == "}" and starts and (closed := starts.pop()):
            start, end = closed, brace.start()
    return text[start:end] if start else None


def rename_tags(text: str, old: Sequence[str], new: Sequence[str]) -> str:
    """The text with the tags of the names `old` under the names `new`. Tags that have a new name
    already get an old one, so that renaming them back restores the text."""
    freed = [name for name in new if name not in old]
    taken = [name for name in old if name not in new]
    renamed = dict(zip([*old, *freed], [*new, *taken], strict=True))
    tag = rf"(?<=<)(/?)({'|'.join(map(re.escape, renamed))})(?=>)"
    return re.sub(tag, lambda found: found[1] + renamed[found[2]], text)


def system_prompt(names: Sequence[str]) -> str:
    """SYSTEM_PROMPT with the tags of ANSWER_TAGS, `names`."""
    return rename_tags(SYSTEM_PROMPT, TAG_NAMES, names)


def with_tags(function: RewardFunction, names: Sequence[str]) -> RewardFunction:
    """A function of this file that reads the tags of ANSWER_TAGS, `names`, as <think> and <answer>.
    A <think> is still a thought of the model, which is no answer before it is closed."""
    if tuple(names) == TAG_NAMES:
        return function

    def read(text: str) -> str:
        return rename_tags(without_open_thought(text), names, TAG_NAMES)

    @functools.wraps(function.call)
    def call(completions: list[str], **columns: list) -> Rewards:
        return function([read(text) for text in completions], **columns)

    extract = function.extract_answer
    return dataclasses.replace(
        function, call=call, extract_answer=extract and (lambda text: extract(read(text)))
    )


def reference_number(answer: object) -> Fraction | None:
    """The number of a right answer: the last number after the last ####, as in GSM8K, or
    without #### the last number of the text."""
    return parse_number(str(answer).rpartition("####")[2])


def reward_correct(completions: list[str], answer: list[str], **columns: list) -> Rewards:
    """Gives 1.0 to a completion whose answer equals the right answer, else 0.0.

    answer: the right answers, see reference_number. Without a number there the reward is None.
    """
    rewards: Rewards = []
    for completion, right in zip(completions, answer, strict=True):
        expected = reference_number(right)
        rewards.append(None if expected is None else float(extract_answer(completion) == expected))
    return rewards


def exact_match(completions: list[str], answer: list[str], **columns: list) -> Rewards:
    r"""Gives 1.0 to a completion whose marked answer is the right answer, else 0.0. It is for words
    and letters: case, width (Ｂ), white space and a final dot do not count, nor what is around or
    after the letter of an option, as in **B**, \text{(B)} and B) 42."""
    rewards: Rewards = []
    for completion, right in zip(completions, answer, strict=True):
        found, text = _folded(marked_answer(completion))
        expected, expected_text = _folded(right)
        is_right = found == expected and (text == expected_text or not text or not expected_text)
        rewards.append(float(is_right) if expected else None)
    return rewards


def _folded(answer: str | None) -> tuple[str, str]:
    """The answer without what exact_match ignores, and "". If it is the letter of an option before
    words, as in B. Paris, which may be a name as in B. Pascal, the second text is these words."""
    text = normalize("NFC", answer or "").translate(_TO_ASCII)
    option = _OPTION.fullmatch(_FONT.sub("", text).strip())
    text, after = (option["letter"], option["words"] or "") if option else (text, "")
    words, after = ("".join(part.split()).casefold() for part in (text, after))
    return words.removesuffix(".").removesuffix("。"), after.removesuffix(".")


def folded_answer(text: str) -> str | None:
    """The answer of a completion as exact_match compares it, or None."""
    return "".join(_folded(marked_answer(text))) or None


def reward_format(completions: list[str], **columns: list) -> Rewards:
    """Gives 1.0 to a completion of the form that SYSTEM_PROMPT asks for, else 0.0.

    The form is <think>...</think>, a newline, <answer>...</answer>, with nothing but white space
    before and after. Each tag occurs exactly once, and neither part is blank. Both parts may have
    many lines. The content of the answer does not matter.
    """
    rewards: Rewards = []
    for completion in completions:
        think, _, answer = completion.strip().partition("</think>\n<answer>")
        framed = think.startswith("<think>") and answer.endswith("</answer>")
        filled = bool(think[len("<think>") :].strip() and answer[: -len("</answer>")].strip())
        once = all(completion.count(tag) == 1 for tag in TAGS)
        rewards.append(float(framed and filled and once))
    return rewards


def tag_count_reward(completions: list[str], **columns: list) -> Rewards:
    """Gives 0.25 for each of the four tags that occurs exactly once in the completion."""
    return [0.25 * sum(text.count(tag) == 1 for tag in TAGS) for text in completions]


def repetition_penalty(
    completions: list[str], completion_ids: list[list[int]], **columns: list
) -> Rewards:
    """Gives -(repeated / all) of the groups of three adjacent tokens, a number from 0 down to -1.

    Source: arXiv 2502.03373 section 4.2.
    """
    rewards: Rewards = []
    for ids in completion_ids:
        triples = [*zip(ids, ids[1:], ids[2:], strict=False)]
        rewards.append(len(set(triples)) / len(triples) - 1 if triples else 0.0)
    return rewards


def overlong_penalty(max_length: int, overlong_cache: int) -> Callable[..., Rewards]:
    """soft_overlong_penalty: 0 up to max_length - overlong_cache tokens, then it falls
    linearly to -1.

    max_length: tokens of the longest possible completion. Source: DAPO, arXiv 2503.14476 eq. 13.
    """

    def soft_overlong_penalty(
        completions: list[str], completion_ids: list[list[int]], **columns: list
    ) -> Rewards:
        left = [max_length - len(ids) for ids in completion_ids]
        return [max(min(tokens / max(overlong_cache, 1) - 1, 0.0), -1.0) for tokens in left]

    return soft_overlong_penalty


LARGEST_REWARD = 1e30  # squares of differences are finite in float64, advantages in float32
# The functions that REWARD_FN may name, in addition to soft_overlong_penalty.
BUILT_IN = (reward_correct, exact_match, reward_format, tag_count_reward, repetition_penalty)
EXTRACT_ANSWER = {reward_correct: extract_answer, exact_match: folded_answer}  # for maj@K
# The functions of a run without REWARD_FN, and their weights if REWARD_WEIGHTS is empty.
DEFAULTS = {"reward_correct": 1.0, "reward_format": 0.5, "tag_count_reward": 0.5}


def total_rewards(
    completions: list[str],
    columns: dict[str, list],
    functions: Sequence[RewardFunction],
    weights: Sequence[float],
    completions_per_prompt: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The total rewards [completions] and the rewards of each function [completions,
    functions], both float64.

    columns: lists with a value for each completion. weights: [functions]. completions_per_prompt:
    consecutive completions are a group; None: all of them are. A reward is NaN where the function
    does not apply. A total is the weighted sum over the functions with a reward for at least half
    of the group; functions of weight 0 only measure. It is NaN where no such function applies, or
    where one of them does not: it could not be compared with the other totals. TRL adds what there
    is, so that a completion without a verdict counts like a wrong one.
    Raises UserMistake if a returned list is wrong, or a total too large.
    """
    function_rewards = np.full((len(completions), len(functions)), np.nan)
    # reward_model comes last: on several processes it waits until all of them have called it.
    order = sorted(enumerate(functions), key=lambda pair: pair[1].name == "reward_model")
    for column, function in order:
        returned = function(completions, **columns)
        function_rewards[:, column] = _as_floats(function, returned, len(completions))
    applies, K = ~np.isnan(function_rewards), completions_per_prompt or len(completions)
    groups = applies.reshape(len(completions) // K, K, len(functions))
    counts = (2 * groups.sum(axis=1) >= K).repeat(K, axis=0)  # [completions, functions]
    weighted = np.asarray(weights, float)  # [functions]
    is_incomplete = (counts & ~applies & (weighted != 0)).any(axis=1)  # [completions]
    applies &= counts
    has_total = (applies & ((weighted != 0) | ~weighted.any())).any(axis=1) & ~is_incomplete
    with np.errstate(over="ignore", invalid="ignore"):
        totals = np.where(applies, function_rewards * weighted, 0.0).sum(axis=1)
    if (is_beyond := has_total & ~(abs(totals) <= LARGEST_REWARD)).any():
        reason = f"beyond {LARGEST_REWARD:g}; scale the rewards, or lower REWARD_WEIGHTS"
        raise UserMistake(f"a total reward is {totals[is_beyond][0]:g}, {reason}")
    return np.where(has_total, totals, np.nan), function_rewards


def reward_entries(reward_fn: str) -> list[str]:
    """The entries of REWARD_FN, each a function or file.py:name; without REWARD_FN, the
    names in DEFAULTS."""
    return [entry.strip() for entry in reward_fn.split(",")] if reward_fn else list(DEFAULTS)


def parse_reward_weights(
    reward_weights: tuple[float, ...], reward_fn: str, names: Sequence[str]
) -> tuple[float, ...]:
    """REWARD_WEIGHTS; if it is empty, 1 for each function, and without REWARD_FN the
    weights of DEFAULTS. names: of the functions. Raises UserMistake if the number of weights is
    wrong, or if two functions have the same name."""
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserMistake(f"REWARD_FN: two rewards have the name {repeated[0]}; rename one")
    defaults = {} if reward_fn else DEFAULTS
    weights = reward_weights or tuple(defaults.get(name, 1.0) for name in names)
    if len(weights) != len(names):
        raise UserMistake(
            f"REWARD_WEIGHTS={','.join(map(str, weights))} has {len(weights)} numbers; "
            f"give {len(names)}, one each for {', '.join(names)}"
        )
    return weights


def _as_floats(function: RewardFunction, returned: object, count: int) -> list[float]:
    """Checks the rewards that `function` returned for `count` completions; None becomes NaN."""
    name = function.source or function.name
    expected = f"reward {name} must return a list of {count} rewards, not"
    if not isinstance(returned, list | tuple | np.ndarray):
        raise UserMistake(f"{expected} {type(returned).__name__}")
    if len(returned) != count:
        raise UserMistake(f"{expected} {len(returned)}")
    for i, value in enumerate(returned):
        finite = isinstance(value, int | float | np.number | np.bool_) and -np.inf < value < np.inf
        if value is not None and not (finite and abs(value) <= LARGEST_REWARD):
            wrong = f"is beyond {LARGEST_REWARD:g}; scale the rewards"
            wrong = wrong if finite else "is neither a finite number nor None"
            raise UserMistake(f"reward {name}, completion {i}: {value!r:.80} {wrong}")
    return [np.nan if value is None else float(value) for value in returned]


def load_reward_functions(
    reward_fn: str,
    timeout_s: float,
    max_length: int,
    overlong_cache: int,
    workers: dict[str, RewardWorker],
    dataset: str = "",
    answer_tags: Sequence[str] = TAG_NAMES,
    reward_model: RewardFunction | None = None,
) -> list[RewardFunction]:
    """The functions that REWARD_FN names, in its order; without names those of DEFAULTS.

    reward_fn: names separated by commas, each of a function of this file or file.py:name.
    timeout_s: REWARD_TIMEOUT_S, the time limit of each call to a function of a file. max_length,
    overlong_cache: tokens, see overlong_penalty; 0: a fifth of max_length. workers: {file: its
    worker}, to which those of further files are added. dataset: DATASET, see load_reward_function.
    answer_tags: see with_tags. reward_model: None if it is not among the names.
    Raises UserMistake for an unknown name, a missing file, or a file that does not load.
    """
    entries = reward_entries(reward_fn)
    penalty = overlong_penalty(max_length, overlong_cache or max_length // 5)
    built_in = [built_in_function(function) for function in (*BUILT_IN, penalty)]
    known = {function.name: with_tags(function, answer_tags) for function in built_in}
    known |= {"reward_model": reward_model} if reward_model else {}
    for entry in entries:
        file, _, name = entry.rpartition(":")
        if entry not in known and not (file.endswith(".py") and name.isidentifier()):
            raise UserMistake(f"REWARD_FN: {entry!r} is not file.py:name, nor one of {[*known]}")
    return [
        known.get(entry)
        or load_reward_function(get_worker("REWARD_FN", entry, timeout_s, workers), entry, dataset)
        for entry in entries
    ]


def built_in_function(function: Callable[..., Rewards]) -> RewardFunction:
    reads_answer = "answer" in inspect.signature(function).parameters
    extract = EXTRACT_ANSWER.get(function)
    return RewardFunction(function.__name__, function, reads_answer, extract)


def load_reward_function(worker: RewardWorker, source: str, dataset: str = "") -> RewardFunction:
    """The reward function of a user's file, "file.py:name", once the worker has loaded the file.
    The function and its loading raise UserMistake. dataset: the data_source of verl's functions,
    for data without this column."""
    name, label = source.rpartition(":")[2], f"REWARD_FN {source}"
    file_label = label.removesuffix(name)
    found = worker.ask(label, "find", name, more_s=LOADING_S)
    seconds, has_answers, reads_answer, has_prefetch = found

    def call(completions: list[str], /, **columns: list) -> Rewards:
        """The rewards of the completions. columns: lists of the same length of JSON values."""
        more_s = seconds * len(completions)
        return worker.ask(label, "call", name, completions, columns, dataset, more_s=more_s)

    def prefetch(completions: list[str], /, **columns: list) -> None:
        """Lets the file begin what rewards will need."""
        worker.ask(prefetch.__name__, "call", "prefetch", completions, columns)

    prefetch.__name__ = f"{file_label}prefetch"
    extract = functools.partial(worker.ask, f"{file_label}extract_answer", "extract_answer")
    return RewardFunction(
        name,
        call,
        reads_answer,
        extract_answer=extract if has_answers else None,
        source=source,
        prefetch=prefetch if has_prefetch else None,
    )
