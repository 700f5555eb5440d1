"""Claims about rewards.py: the reward of each form of completion, in what time, the totals, and
what REWARD_FN names."""

import functools
import math
import random
import re
import time
import warnings
from fractions import Fraction

import numpy as np
import pytest

import rewards
from config import TAG_READERS
from infra.mistakes import UserMistake
from loss import AdvantageConfig, group_advantages
from rewards import (
    BUILT_IN,
    built_in_function,
    load_reward_functions,
    overlong_penalty,
    parse_number,
    parse_reward_weights,
    repetition_penalty,
    reward_entries,
    total_rewards,
)

load = functools.partial(
    load_reward_functions, timeout_s=30, max_length=9, overlong_cache=2, workers={}
)
REWARDS = (*BUILT_IN, overlong_penalty(max_length=64, overlong_cache=8))
GSM8K = "She has 6*12=<<6*12=72>>72 clips.\n#### "


def form(answer: str, think: str = "I count 3 and 4.") -> str:
    return f"<think>{think}</think>\n<answer>{answer}</answer>"


CORRECT = [  # completion, reference as in the last line of a GSM8K answer, reward
    (form("72"), "72", 1.0),
    (form("73"), "72", 0.0),
    (form("72", think="Or 5?") + " 9", "72", 1.0),  # the tag counts, not the text's last number
    ("<answer>5</answer> no, <answer>72</answer>", "72", 1.0),  # the last tag
    ("<answer>72</answer> and <answer>5", "72", 1.0),  # the last closed tag
    ("<answer>72 clips", "72", 1.0),  # truncated: from the tag to the end
    ("72 of them, <answer>", "72", 0.0),
    ("72 <answer></answer>", "72", 0.0),  # an empty answer is no answer
    ("She has 3 + 69 = 72 clips.", "72", 1.0),
    ("72 clips, of which 3 are red", "72", 0.0),
    (form("1,2345"), "2345", 0.0),  # no thousands: no number
    (form("$1,234,567.50"), "1234567.5", 1.0),
    (form("-5"), "-5", 1.0),
    (form("-5"), "5", 0.0),
    (form("\N{MINUS SIGN}5"), "-5", 1.0),
    (form("-$5"), "-5", 1.0),
    (form("x = - 5"), "-5", 1.0),
    (form("10 - 5"), "5", 1.0),  # an operator between two numbers is no sign
    (form("so...72"), "72", 1.0),
    (form("3 / 4"), "0.75", 1.0),
    (form("1 1/2"), "1.5", 1.0),
    (form("take 5 10/2"), "5", 1.0),
    (form("1/0"), "1", 0.0),
    (form("50%"), "50", 1.0),
    (form("23+45=68"), "68", 1.0),
    (form("2.5E-1"), "0.25", 1.0),
    (r"\boxed{-\frac{3}{4}}", "-0.75", 1.0),
    (form("1e999999999"), "72", 0.0),
    (form("1e-999999999"), "0", 0.0),
    ("<think>3 + 69 = 72", "72", 0.0),  # a thought that is never closed
    ("<think>3 + 69\n<answer>72</answer>", "72", 0.0),
    ("<think>A</think> 72 <think>or 73", "72", 1.0),
    ("<think>A</think>\n<answer>72", "72", 1.0),
    (form("72") + "<think>73", "72", 1.0),
    (form("072"), "72", 1.0),
    (form("0072"), "072", 1.0),
]


@pytest.mark.parametrize("completion, reference, expected", CORRECT)
def test_the_completions_number_is_compared_exactly(completion, reference, expected):
    assert rewards.reward_correct([completion], answer=[GSM8K + reference]) == [expected]


def test_a_reference_needs_no_hashes_and_one_without_a_number_does_not_apply() -> None:
    answers = ["72", "so 3 and 72", 72, "no number", None, "72\n#### none", "3\n#### 5\n#### 72"]
    returned = rewards.reward_correct([form("72")] * 7, answer=answers, question=["?"] * 7)
    assert returned == [1.0, 1.0, 1.0, None, None, None, 1.0]


SPACE = "\N{NO-BREAK SPACE}"
READ = {  # text: its number, as Fraction reads it
    r"\dfrac{3}{-4}": "-3/4",
    r"-\frac{-3}{4}": "3/4",
    r"10-\frac{3}{4}": "3/4",  # an operator, as in 10-5
    r"\frac{1,500}{2}": "750",
    r"2\frac34": "11/4",
    "007": "7",  # an answer of AIME
    "000": "0",
    "00.5": "1/2",
    "-005": "-5",
    "$7 = 007$": "7",
    "5, or 007": "7",
    r"the sum is 5 \boxed{007}": "7",
    "5 + 2 is 7\n\n007": "7",
    "007/2": "7/2",
    "1\N{FRACTION SLASH}2": "1/2",
    "3 1\N{FRACTION SLASH}2": "7/2",
    "-1\N{FRACTION SLASH}4": "-1/4",
    "1\N{DIVISION SLASH}2": "1/2",
    "3 or 100,00": None,  # the last number cannot be read, and no other replaces it
    "100,00 or 3": "3",
    "1,234, 5": "5",
    "2.5 1/2": "1/2",
    r"72 cm^{2}": "72",
    "5^{th}": "5",
    f"1{SPACE}1/2": "3/2",
    "-¥5": "-5",
}
UNREAD = (
    "10 000;10, 000;10，000;10. 000;10\N{ACUTE ACCENT}000;3 007;1 000/3;10 007/8;10-007;007,000;"
    "1\N{FRACTION SLASH}0;10^3/4;0,500"
).split(";")


@pytest.mark.parametrize("text", [*READ, *UNREAD])
def test_what_a_person_reads_without_doubt_is_read_and_the_rest_is_no_number(text: str) -> None:
    expected = READ.get(text)
    for completion in (text, f"so {text}", f"<answer>{text}</answer>", text + " of them"):
        if not completion.startswith("so - "):  # a dash after a word is no sign
            assert rewards.extract_answer(completion) == (expected and Fraction(expected)), (
                completion
            )


FORMS = {  # of MATH: a number that is written in another form, and its value
    r"\frac{4}7": "4/7",
    r"8\frac{1}{3}": "25/3",
    "22,\\! 333,\\!400": "22333400",
    r"10\,000": "10000",
    "1'000": "1000",
    "1½": "3/2",
    "-½": "-1/2",
    "１２００．５": "1200.5",
    "－５": "-5",
    "१,२३४": "1234",
    "১৮": "18",
    "١٬٢٣٤٫٥": "1234.5",
    "\N{MATHEMATICAL BOLD DIGIT FOUR}2": "42",
    "4\N{ZERO WIDTH SPACE}2": "42",
    "-\N{RIGHT-TO-LEFT MARK}5": "-5",
    "1\N{WORD JOINER},000": "1000",
}
PARTS = (
    r"\frac 1210;5'3;10 500;\sqrt{10 - 5};5√2;2^{10};2¹⁰;(-3)^3;5x^2;x^2 - 3;3617_8;"
    r"312_{\text{five}};12 π;7!;7 choose 3;\log_2 9;0.\overline{36};0.(36);3+5;4 - i;3x;3 x;"
    r"3(x + 1);f(5);H2O;a/5;9:30 am;-(5);minus 5;\pm 5;[0,\infty);\{1, 3\};"
    r"\begin{pmatrix} 2 \\ -7 \\ 5 \end{pmatrix}"
).split(";")
ALONE = (  # the number 72 with what is written around a number that stands for itself
    r"72^\circ;72\,\mathrm{m/s}^2;72cm²;72^{\text{th}};72\%;\$72;72kg;72 p.m.;72 a day;72-year-old;"
    r"€72;US$72;USD72;RM72;+72;**Answer:** 72;is **72**.;**72 clips**;Answer - 72;(A) 72;"
    r"\text{(C)}\ 72;\boxed{\text{72}};\(72\);f(x)=72;2^3 \cdot 9 = 72;$12 \times 6 = 72$;"
    r"\approx 72;72 \quad \text{clips};\Rightarrow 72;x &= 72 \end{align*};It's 72;72 km/h;"
    r"72 (of all);72in;72 - a lot;72 i.e. six dozen;_72_;She has 72!;72…;72 \checkmark;答案是72。"
)


@pytest.mark.parametrize("text", [*FORMS, *PARTS])
def test_a_number_is_read_in_each_form_and_a_part_of_something_larger_is_none(text: str) -> None:
    number = Fraction(FORMS[text]) if text in FORMS else None
    for completion in (text, rf"\boxed{{{text}}}", f"The answer is ${text}$.", f"**{text}**"):
        assert parse_number(completion) == number, completion


@pytest.mark.parametrize("text", ALONE.split(";"))
def test_words_units_and_marks_around_a_number_do_not_hide_it(text: str) -> None:
    assert parse_number(text) == 72


def test_numbers_are_exact_fractions() -> None:
    assert parse_number("0.1") == Fraction(1, 10)
    assert parse_number("2 3/8 cups") == Fraction(19, 8)
    assert parse_number("12345678901234567890.5") == Fraction(24691357802469135781, 2)
    assert parse_number("1e99") == 10**99
    assert parse_number("1e100") is None
    assert parse_number("9" * 300) == 10**300 - 1
    assert parse_number("9" * 301) is None


MARKED = {  # completion: its marked answer
    "<answer>A</answer>": "A",
    r"<answer>A</answer> \boxed{B} <answer>C": "A",  # the last closed tag
    r"\boxed{A} or <answer>B": "A",  # no tag is closed
    r"\boxed{A}, but then \boxed{B}.": "B",
    r"\boxed{A}, but then \boxed{B": "A",
    r"We find that \boxed{42": None,
    r"\boxed{\frac{\sqrt{2}}{3}}": r"\frac{\sqrt{2}}{3}",
    r"\boxed{\left\{ 1 \right.} or {2}": r"\left\{ 1 \right.",  # \{ is no brace
    r"} {\boxed{\boxed{A}}": r"\boxed{A}",
    r"\boxed{}": "",
    "The answer is A.": None,
    r"<think>It is \boxed{A}": None,
    "<think>Or <answer>A</answer>": None,
    r"<answer>A</answer> <think>\boxed{B}": "A",
    r"<think>\boxed{A}</think> or <think>\boxed{B}": "A",
    "<think>Hm</think><answer>A</answer>": "A",
}


@pytest.mark.parametrize("completion", MARKED)
def test_the_marked_answer_is_that_of_the_last_closed_tag_or_else_of_the_last_closed_box(
    completion: str,
) -> None:
    assert rewards.marked_answer(completion) == MARKED[completion]


def test_exact_match_is_for_letters_and_words_and_gives_0_without_an_answer() -> None:
    right = ["<answer> b. </answer>", r"It is \boxed{B}.", "<answer>\nB</answer> not C"]
    wrong = ["B", "<answer>(C)</answer>", "<answer>B or C</answer>", r"\boxed{}", "<answer>B", ""]
    assert rewards.exact_match(right + wrong, answer=["B"] * 9) == [1.0] * 3 + [0.0] * 6
    assert rewards.exact_match(["Nothing.", form("B")], answer=[" .", ""]) == [None, None]
    words = [form("new  YORK."), form("New Orleans")]
    assert rewards.exact_match(words, answer=["New York"] * 2) == [1.0, 0.0]
    assert rewards.exact_match([form("Ｂ"), form("②")], answer=["B", "2"]) == [1.0, 0.0]
    unseen = [form("New\N{ZERO WIDTH SPACE} York\N{RIGHT-TO-LEFT MARK}"), form("B\N{SOFT HYPHEN}")]
    assert rewards.exact_match(unseen, answer=["New York", "B"]) == [1.0, 1.0]
    quotes = [form("don\N{RIGHT SINGLE QUOTATION MARK}t"), form("“B”"), form("dont")]
    assert rewards.exact_match(quotes, answer=["don't", "B", "don't"]) == [1.0, 1.0, 0.0]
    accents = [form("Cafe\u0301"), form("Café"), form("Cafe")]  # the first has two characters for é
    assert rewards.exact_match(accents, answer=["Café"] * 3) == [1.0, 1.0, 0.0]
    answers = [rewards.folded_answer(text) for text in (*words, "B", r"\boxed{}")]
    assert answers == ["newyork", "neworleans", None, None]


OPTIONS = (
    r"(B);**B**;$B$;\text{B};B) 42;B: 42;B. 42;(b);[B];`B`;B);(B).;B. Paris;(B) -5;**(B)** 42;{B};"
    r"**B.** 42;**B) 42**;$\textbf{(B)}$;\textbf{(B) } 42;\(B\);( B );（Ｂ）;Ｂ：42;B、巴黎;B．42;"
    "B) Plan A;(B) vitamin A;B) Both A and D;B) $A$"
).split(";")


@pytest.mark.parametrize("option", OPTIONS)
def test_the_letter_of_an_option_is_read_in_completions_and_right_answers(option: str) -> None:
    other = re.sub("[bBＢ]", "C", option)
    texts = [form("B"), form(option), form("C"), form(other.replace("textCf", "textbf"))]
    assert rewards.exact_match(texts, answer=[option] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert rewards.exact_match(texts, answer=["B"] * 4) == [1.0, 1.0, 0.0, 0.0]


NO_OPTIONS = {  # a right answer, and what is wrong for it
    "A": ["A*", "A+", "(A) or (B)", "A) or B", "A cat", "a, b", "f(A)", "A.M.", "A'", "(A) + 1"],
    "E. coli": ["E. faecium", "E: faecium", "coli"],
    "C: drive": ["C: folder"],
    "C++": ["C", "C#", "C+"],
    "J. S. Bach": ["J", "J. C. Bach"],
    "x": ["(x) + 1", "x: 5", "x) or y"],
    "U.S.": ["U", "U.K."],
}


@pytest.mark.parametrize("right", NO_OPTIONS)
def test_words_expressions_and_several_letters_are_no_option(right: str) -> None:
    texts = [form(text) for text in NO_OPTIONS[right]]
    assert rewards.exact_match(texts, answer=[right] * len(texts)) == [0.0] * len(texts)
    assert rewards.exact_match([form(right)], answer=[right]) == [1.0]


def test_maj_counts_the_letters_of_options_as_one_and_names_apart() -> None:
    texts = ["(B)", "B) 42", "B. 42", r"\text{B}", "E. coli", "E. faecium", "A*"]
    counted = [rewards.folded_answer(form(text)) for text in texts]
    assert counted == ["b", "b", "b", "b", "ecoli", "efaecium", "a*"]


FORMAT = [  # completion, reward_format, tag_count_reward
    (form("72"), 1.0, 1.0),
    (form("72", think="two\n\nlines"), 1.0, 1.0),
    (f"\n {form('72')}\n", 1.0, 1.0),
    (rewards.SYSTEM_PROMPT.partition("form:")[2], 1.0, 1.0),  # what it asks for is rewarded
    ("Sure: " + form("72"), 0.0, 1.0),
    (form("72") + " clips", 0.0, 1.0),
    ("<think>3</think>\n\n<answer>72</answer>", 0.0, 1.0),
    ("<answer>72</answer>\n<think>3</think>", 0.0, 1.0),
    (form("72", think=" "), 0.0, 1.0),
    (form("\n"), 0.0, 1.0),
    (form("72", think="<answer>3"), 0.0, 0.75),
    ("<think>3</think>\n<answer>72", 0.0, 0.75),
    ("<THINK>3</THINK>\n<ANSWER>72</ANSWER>", 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize("completion, all_right, tags", FORMAT)
def test_the_format_is_all_or_nothing_and_the_tags_count_a_quarter_each(
    completion, all_right, tags
):
    assert rewards.reward_format([completion], answer=["#### 72"]) == [all_right]
    assert rewards.tag_count_reward([completion], answer=["#### 72"]) == [tags]


@pytest.mark.parametrize(
    "names", ["reasoning answer", "think result", "reasoning solution", "answer think"]
)
def test_answer_tags_rename_the_tags_of_the_prompt_and_of_all_built_in_functions(names) -> None:
    thought, result = names = tuple(names.split())
    right = f"<{thought}>3 + 4 = 7, not 8</{thought}>\n<{result}>7</{result}>"
    asked = f"<{thought}>your reasoning</{thought}>\n<{result}>your number</{result}>"
    renamed = rewards.system_prompt(names)
    assert renamed.endswith(asked) and renamed.count("<") == 8
    functions = rewards.load_reward_functions(
        "reward_correct,exact_match,reward_format,tag_count_reward", 1, 9, 0, {}, "", names
    )
    swapped = f"<{result}>7</{result}>\n<{thought}>8</{thought}>"
    texts = [right, right + " 8", swapped, f"<{result}>7</{result}> 8"]
    expected = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0.5]]
    assert [function(texts, answer=["7"] * 4) for function in functions] == expected
    answers = [
        functions[0].extract_answer(text) for text in (right, "<think>7", "<think>7</think>8")
    ]
    assert answers == [7, None, 8 if thought != "answer" else 7]


def test_the_settings_know_which_built_in_functions_read_the_tags() -> None:
    texts = [form("7"), form("8"), form("7") + " 8"]
    renamed = [rewards.rename_tags(text, rewards.TAG_NAMES, ("plans", "result")) for text in texts]
    columns = {"answer": ["7"] * 3, "completion_ids": [[1, 2, 3]] * 3}
    names = [f.__name__ for f in BUILT_IN if f(texts, **columns) != f(renamed, **columns)]
    assert names == [*TAG_READERS]


REPEATED = ["<answer>", "</answer>", "</think>\n<answer>", "9", "1,", "-", "- ", "1/", "1 ", "1 1/"]
REPEATED += ["1,111,", ".", "1.", "1e", "^{", "= -", " ", r"\frac{1", "\N{MINUS SIGN}", SPACE]
REPEATED += ["<think>", "</think>", "1, 00", ", 00", "00 ", "(", "B)", "B) C ", "*B"]
REPEATED += ["'a", "a-", "=1", "½", r"\text{", "(1, ", r"\a_", "**", "**1", "1 999", "$"]
REPEATED += [r"\frac", r"\frac1", r"\frac{1,", "1^", "10^{1", "1^{1/", r"-\frac{-1}{-1}", "9^9"]
N = 250_000
LONG = {
    "closed brackets": rf"<answer>B{')' * N}</answer>",
    "spaced brackets": rf"<answer>(B{' )' * (N // 2)}.</answer>",
    "option with spaces": f"<answer>B){' C' * (N // 2)}</answer>",
    **{text: text * (N // len(text)) for text in REPEATED},
    "nested boxes": r"\boxed{" * (N // 10) + "}" * (N // 10),
    "digits space digits": "9" * (N // 2) + " " + "9" * (N // 2),
    "groups that end wrong": "1" + ",111" * (N // 4) + "1",
    "exponent": "1e" + "9" * N,
    "blank think": form(" " * (N // 2), think=" " * (N // 2)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_quarter_of_a_megabyte_of_anything_takes_linear_time(name: str) -> None:
    ids = [list(range(1000)) * (N // 4000)]  # as many tokens as such a text may have
    for _ in range(3):  # a garbage collection of all tests in this process may fall into a try
        start = time.thread_time()
        for function in REWARDS:
            assert math.isfinite(function([LONG[name]], answer=["#### 72"], completion_ids=ids)[0])
        seconds = time.thread_time() - start
        if not 0.5 <= seconds < 10:
            break
    assert seconds < 0.5, "a quadratic pattern takes minutes here"


def test_no_completion_raises() -> None:
    pieces = ["<think>", "</think>", "\n", "<answer>", "</answer>", "1", "0", "23", ",", ".", "-"]
    pieces += ["/", " ", "e", "^", "10", "$", "%", "=", "\\frac{1}{0}", "{", "}", "####", "é"]
    pieces += [SPACE, r"\frac", "000", "{,}", "^{", "-", "¥"]
    pieces += [r"\boxed{", "\\", "007", "\u2044", "B) ", "(B)", "*"]
    pieces += ["\ud800", "\x00", "\N{VULGAR FRACTION ONE HALF}", "\N{ARABIC-INDIC DIGIT FIVE}", "²"]
    pieces += ["nan", "inf", "1e999", "0x1F", "1_000", "9" * 400, "\u2028", "\t", "\r\n", "<answer"]
    draw = random.Random(0)
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 12))) for _ in range(20_000)]
    ids = [[draw.randrange(5) for _ in range(draw.randrange(20))] for _ in texts]
    for function in REWARDS:
        for value in function(texts, answer=texts[::-1], completion_ids=ids):
            assert value is None or math.isfinite(value)


def test_a_total_is_the_weighted_sum_of_what_applies() -> None:
    def odd(completions, **columns):
        return [None if text == "b" else 1 for text in completions]

    def rated(completions, answer, **columns):
        return [None if a is None else np.float32(a) for a in answer]

    columns = {"answer": [0.5, None, -2.0, None], "question": ["?"] * 4}
    functions, texts = [*map(built_in_function, (odd, rated))], ["a", "b", "c", "d"]
    total, function_rewards = total_rewards(texts, columns, functions, [2.0, 0.5], 1)
    assert total.dtype == function_rewards.dtype == np.float64
    np.testing.assert_array_equal(total, [2.25, np.nan, 1.0, 2.0])
    np.testing.assert_array_equal(
        function_rewards, [[1, 0.5], [np.nan] * 2, [1, -2.0], [1, np.nan]]
    )


TOTALS = [  # of groups of four: the scores of two functions, the weights, the totals
    # At least half of the group has a verdict: the others have no total that compares.
    ([1, 0, None, 1], [1, 1, 1, 1], [1, 0.5], [1.5, 0.5, None, 1.5]),
    ([1, 0, None, None], [0, 1, 1, 0], [1, 0.5], [1, 0.5, None, None]),
    # Fewer: the function is left out.
    ([1, None, None, None], [0, 1, 1, 0], [1, 0.5], [0, 0.5, 0.5, 0]),
    ([None] * 4, [0, 1, 1, 0], [1, 0.5], [0, 0.5, 0.5, 0]),
    # Both are incomplete.
    ([1, None, 0, 1], [1, 1, 1, None], [1, 1], [2, None, 1, None]),
    ([None, 1, None, None], [None, 1, 0, 1], [1, 1], [None, 1, 0, 1]),
    # A function of weight 0 only measures.
    ([1, 0, None, 1], [None, 1, 1, 1], [1, 0], [1, 0, None, 1]),
    ([None, 1, 1, 1], [0, 1, 0, 1], [0, 2], [0, 2, 0, 2]),
    # No function is left; one of weight 0 is none.
    ([1, None, None, None], [1, 1, 1, 1], [1, 0], [None] * 4),
    ([1, 0, None, 1], [1, 1, 1, 1], [0, 0], [0] * 4),
    ([1, None, None, None], [None] * 4, [1, 1], [None] * 4),
]


@pytest.mark.parametrize("first, second, weights, expected", TOTALS)
def test_a_completion_without_a_score_that_its_group_has_has_no_total(
    first: list, second: list, weights: list[float], expected: list
) -> None:
    """Beside a second group, with all scores."""

    def judge(completions, **columns):
        return [*first, 1, 0, 1, 0]

    def rated(completions, **columns):
        return [*second, 1, 1, 1, 1]

    totals, _ = total_rewards(["a"] * 8, {}, [*map(built_in_function, (judge, rated))], weights, 4)
    a, b = weights
    both = [a + b, b, a + b, b]
    np.testing.assert_array_equal(totals, np.array([*expected, *both], float))


def test_a_missing_verdict_is_no_wrong_answer_to_any_estimator() -> None:
    """Equal completions of which one has no verdict have no advantage; gdpo is that of TRL."""

    def judge(completions, **columns):
        return [1.0, 1.0, None, 0.0]

    functions = [*map(built_in_function, (judge, rewards.reward_format))]
    weights = (1.0, 0.2)
    totals, parts = total_rewards(["<think>"] * 4, {}, functions, weights)
    for name in ("grpo", "rloo", "reinforce", "reinforce++", "gdpo"):
        config = AdvantageConfig(name, weights=weights)
        advantages = group_advantages(totals, 4, config, parts)
        assert advantages[2] == 0 and advantages[0] == advantages[1] > 0 > advantages[3]


def test_the_default_rewards_are_the_three_built_in_ones() -> None:
    functions = load("")
    names = " ".join(function.name for function in functions)
    assert names == "reward_correct reward_format tag_count_reward"
    texts = [form("72"), form("71"), "72", "<think>"]
    total, function_rewards = total_rewards(
        texts, {"answer": ["#### 72"] * 4}, functions, [1.0, 0.5, 0.5]
    )
    assert total.tolist() == [2.0, 1.0, 1.0, 0.125]
    assert function_rewards.tolist() == [[1, 1, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0.25]]


@pytest.mark.parametrize(
    "returned, message",
    [
        ([1.0], "reward odd must return a list of 2 rewards, not 1"),
        ([1.0] * 3, "reward odd must return a list of 2 rewards, not 3"),
        (None, "reward odd must return a list of 2 rewards, not NoneType"),
        ([1.0, "1.0"], "reward odd, completion 1: '1.0' is neither a finite number nor None"),
        ([1.0, -1e200], r"reward odd, completion 1: -1e\+200 is beyond 1e\+30; scale the rewards"),
        ([np.float32(2e30), 1], "reward odd, completion 0: .*2e.30.* is beyond 1e.30; scale"),
        ([10**30 + 10**20, 1], "reward odd, completion 0: 1000.* is beyond 1e.30; scale"),
        (np.array([1.0, np.inf]), "reward odd, completion 1: .*inf.* is neither a finite number"),
    ],
)
def test_a_malformed_return_is_named(returned: object, message: str) -> None:
    def odd(completions, **columns):
        return returned

    with pytest.raises(UserMistake, match=message):
        total_rewards(["a", "b"], {}, [built_in_function(odd)], [1.0])


@pytest.mark.parametrize(
    "scores, weights, total",
    [
        ([1e30, 1e30], [1.0, 1.0], r"2e\+30"),
        ([1e30, 0], [1e10, 1.0], r"1e\+40"),
        ([-3.0, 1.0], [1e30, 1.0], r"-3e\+30"),
        ([1e30, 1.0], [1e300, 1.0], "inf"),
        ([1e30, -1e30], [1e300, 1e300], "nan"),
    ],
)
def test_a_total_beyond_the_bound_is_refused_though_its_rewards_are_within(
    scores: list[float], weights: list[float], total: str
) -> None:
    functions = [built_in_function(lambda completions, s=score, **_: [0.0, s]) for score in scores]
    line = (
        rf"^a total reward is {total}, beyond 1e\+30; scale the rewards, or lower REWARD_WEIGHTS$"
    )
    with pytest.raises(UserMistake, match=line), warnings.catch_warnings(action="error"):
        total_rewards(["a", "b"], {}, functions, weights)
    totals, _ = total_rewards(["a", "b"], {}, functions, [0.5, 0.0])
    assert totals.tolist() == [0.0, scores[0] / 2]


# ---- What REWARD_FN names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reward_weights, reward_fn, weights",
    [
        ((), "", (1.0, 0.5, 0.5)),
        ((), "reward_correct,mine.py:brevity", (1.0, 1.0)),
        ((0.5,), "reward_format", (0.5,)),
    ],
)
def test_each_reward_that_reward_fn_names_has_weight_1_by_default(
    reward_weights, reward_fn, weights
) -> None:
    names = [entry.rpartition(":")[2] for entry in reward_entries(reward_fn)]
    assert parse_reward_weights(reward_weights, reward_fn, names) == weights
    with pytest.raises(UserMistake, match=f"two rewards have the name {names[0]}; rename one"):
        parse_reward_weights(reward_weights, reward_fn, names * 2)


def test_an_unknown_name_is_refused_with_all_known_names() -> None:
    names = [function.__name__ for function in REWARDS]
    with pytest.raises(UserMistake) as error:
        load("overlong_penalty")
    message = f"REWARD_FN: 'overlong_penalty' is not file.py:name, nor one of {names}"
    assert str(error.value) == message


# ---- The penalties, on numbers of TRL 1.16 and at their edges ------------------------------------


def overlong(lengths: list[int], max_length: int, overlong_cache: int) -> rewards.Rewards:
    function = overlong_penalty(max_length, overlong_cache)
    return function([""] * len(lengths), completion_ids=[[7] * n for n in lengths], answer=["1"])


def repetition(completion_ids: list[list[int]]) -> rewards.Rewards:
    texts = [""] * len(completion_ids)
    return repetition_penalty(texts, completion_ids=completion_ids, answer=["1"])


def test_the_overlong_penalty_falls_linearly_over_the_last_tokens_as_in_trl() -> None:
    lengths = [1, 50, 79, 80, 81, 90, 99, 100, 101, 200]
    expected = [0.0, 0.0, 0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0, -1.0]
    assert overlong(lengths, 100, 20) == pytest.approx(expected)
    for cache in (0, 1):  # only a completion of the full length is penalized
        assert overlong([0, 8, 9, 10, 11], 10, cache) == [0, 0, 0, -1, -1]


def test_the_repetition_penalty_is_the_share_of_repeated_ngrams_as_in_trl() -> None:
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1, 2], [7], [1, 2, 3, 1, 2, 3, 4]]
    trl_at_most_half = [0.0, -1 / 3, -0.25, 0.0, -0.1]  # TRL with max_penalty -0.5
    assert [r / 2 for r in repetition(ids)] == pytest.approx(trl_at_most_half)
    assert repetition([[], [4], [4, 4, 4], [4, 4, 4, 4]]) == [0, 0, 0, -0.5]
    assert repetition([[1, 2, 3, 2, 1]]) == [0]  # (1, 2, 3) is not (3, 2, 1)
