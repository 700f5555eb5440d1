"""Rows of an update: prompts and completions end to end, so that little padding is computed.

First in a row come its prompts without their last tokens, then its completions, each fed with the
last token of its prompt first. A completion attends to its prompt and to itself. A prompt stands
once in a row, however many of its completions follow. All rows of an update have the same widths,
which follow from its batch alone. They are on a coarse grid, so that few programs are compiled.

A row of S = 4 + C = 8 places with two prompts, `a b c` and `p q r`, and three completions:
`x y z` of the first prompt, `u v` and `w` of the second. `.` is padding.

    place       0 1 2 3   4 5 6  7 8  9  10 11
    ids         a b p q   c x y  r u  r  .  .       what is fed
    positions   0 1 0 1   2 3 4  2 3  2  0  0       in the sequence
    prompt      0 0 1 1   0 0 0  1 1  1 -1 -1       which prompt of the row
    start       0 0 2 2   4 4 4  7 7  9 10 11       where its prompt or completion begins
    targets               x y z  u v  w  .  .       the token behind each that is fed
    places                0 1 2  3 4  5             of each completion's tokens, from S on

A line of the mask is a token that is fed, an x in it a key that this token sees:

     0  a       x                                   a prompt's token sees the earlier tokens of its
     1  b       x x                                 prompt
     2  p           x
     3  q           x x
     4  c       x x       x                         a completion's token sees its prompt, and what
     5  x       x x       x x                       is fed of its completion so far
     6  y       x x       x x x
     7  r           x x          x
     8  u           x x          x x
     9  r           x x               x             no other completion, also of the same prompt

Dimensions: B sequences of a batch, K completions for each prompt, X rows of a micro-step over all
devices, each with S places for tokens of prompts, C for tokens of completions and Q for sequences;
X*Q places for sequences; T tokens of the longest completion, padded; U ids of a support.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from infra.sizes import bucket_length, prompt_width

# Adding a micro-step's gradient costs about as much as the matmuls of this number of tokens.
MICRO_STEP_TOKENS = 256
# Between two powers of two C has GRID values, and S half of GRID, so that widths repeat.
GRID = 4
RESULTS_PER_TOKEN = 8  # elements of arrays [X*Q, T], at most, for each token of the widest rows
# The longest rows are taken among those that cost at most this share more than the cheapest ones:
# their widths repeat more often, and a program has to be compiled for each.
SLACK = 0.05


class Batch(NamedTuple):
    """The sequences of a step, or of one of its updates, complete on the host of every process: all
    that the loss, the metrics and the samples read. A prompt's K sequences are adjacent."""

    prompts: list[Any]  # [P] data.Prompt
    completion_ids: np.ndarray  # [B, T] int32, right-padded
    # [B, T] int32, 1 on the tokens that count. The others are padding, tokens that the policy has
    # not drawn, or the tokens of a sequence that the loss leaves out.
    completion_mask: np.ndarray
    lengths: np.ndarray  # [B] int32 tokens, stop tokens and tokens that do not count included
    sampling_logps: np.ndarray  # [B, T] float32 nats
    computed_tokens: np.ndarray | None = None  # [B] int32, that decoding computed for the sequence
    drawn_mask: np.ndarray | None = None  # [B, T] int32, 1 on the tokens that the policy has drawn
    stopped: np.ndarray | None = None  # [B] bool: a stop token ended it; it was not cut off
    rewards: np.ndarray | None = None  # [B] float64, weighted total; NaN: no function applies
    per_function: np.ndarray | None = None  # [B, functions] float64, NaN: it does not apply
    advantages: np.ndarray | None = None  # [B] float64
    old_logps: np.ndarray | None = None  # [B, T] float32 nats
    ref_logps: np.ndarray | None = None  # [B, T] float32 nats
    top_mask: np.ndarray | None = None  # [B, T] int32, 1 where the policy learns
    support: np.ndarray | None = None  # [B, T, U] int32, the tokens that could be drawn; -1: none
    cut_tokens: np.ndarray | None = None  # [B] int32, tokens whose support lost ids

    def completions_per_prompt(self) -> int:
        """K."""
        return len(self.lengths) // len(self.prompts)

    def prompt_of(self, sequence: int) -> int:
        """The number of the sequence's prompt."""
        return sequence * len(self.prompts) // len(self.lengths)

    def prompt_lengths(self) -> np.ndarray:
        """[B] int: the tokens of each sequence's prompt."""
        of_prompts = [len(prompt.ids) for prompt in self.prompts]
        return np.repeat(of_prompts, self.completions_per_prompt())

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that there are, by name."""
        return {name: x for name, x in self._asdict().items() if isinstance(x, np.ndarray)}

    def select_groups(self, index: np.ndarray) -> "Batch":
        """The sequences of the prompts with these numbers, in their order."""
        K = self.completions_per_prompt()
        sequences = (index[:, None] * K + np.arange(K)).reshape(-1)
        arrays = {name: x[sequences] for name, x in self.arrays().items()}
        return Batch(prompts=[self.prompts[i] for i in index], **arrays)

    @staticmethod
    def concatenate(batches: "Sequence[Batch]") -> "Batch":
        """The sequences of all batches, one batch after the other."""
        arrays = [batch.arrays() for batch in batches]
        joined = {name: np.concatenate([x[name] for x in arrays]) for name in arrays[0]}
        return Batch([prompt for batch in batches for prompt in batch.prompts], **joined)

    def trim(self, T: int) -> "Batch":
        """The batch with T places for tokens; no completion is longer."""
        names = "completion_ids completion_mask drawn_mask sampling_logps support".split()
        arrays = self.arrays()
        return self._replace(**{name: arrays[name][:, :T] for name in names if name in arrays})


class MicroBatch(NamedTuple):
    """The rows of one micro-step: NumPy arrays of this process, or arrays on all devices."""

    ids: Any  # [X, S+C] int32, like positions, prompt and start; the picture above explains these
    positions: Any
    prompt: Any  # -1: padding
    start: Any
    targets: Any  # [X, C] int32
    places: Any  # [X, Q, T] int32, from 0 on: where among the C places a sequence's tokens are
    sequences: Any  # [X*Q] int32, the number of each sequence in its batch; -1: no sequence
    completion_mask: Any  # [X*Q, T] int32, 1 on the tokens that count; 0 if there is no sequence
    sampling_logps: Any  # [X*Q, T] float32 nats
    advantages: Any  # [X*Q] float32
    old_logps: Any = None  # [X*Q, T] float32 nats; None: those of now, so that each ratio is 1
    ref_logps: Any = None  # [X*Q, T] float32 nats; None: no reference
    top_mask: Any = None  # [X*Q, T] int32, 1 where the policy learns; None: everywhere
    # [X, C, U] int32, the tokens that could be drawn, -1 in unused places; log-probabilities are
    # relative to them. None: to the complete vocabulary.
    support: Any = None


class Widths(NamedTuple):
    """The sizes of all rows of an update."""

    rows: int  # of a device in a micro-step
    S: int  # places for prompts
    C: int  # places for completions
    Q: int  # places for sequences
    T: int  # tokens of the longest completion, padded


class Limits(NamedTuple):
    """What the rows of a run must keep to, and what their computation costs."""

    shards: int  # of a micro-step: each holds the rows of one device, or of devices that share them
    sequences: int  # of a shard if rows are padded, which sets the most tokens of a shard
    completions: int  # K: of each prompt
    max_length_sample: int  # tokens: MAX_LENGTH_SAMPLE
    longest_prompt: int  # S: padded, without the last token; reset may make a prompt longer
    shortest_prompt: int  # the fewest tokens to which prompts are padded: GLOBAL_LENGTH
    pack: bool  # False: each completion has the width of the longest one
    unit: int  # widths are multiples of it
    row_tokens: int  # the most tokens of a row
    matmul_keys: float  # the number of keys to which attention costs as much as a token's matmuls

    def completion_width(self, longest: int) -> int:
        """T: the padded tokens of completions of up to `longest` tokens. In packed rows it costs
        little, and programs depend on it, so that it has only a few values."""
        if not self.pack:
            return min(bucket_length(longest), self.max_length_sample)
        T = self.max_length_sample
        while T > 1 and -(-T // 2) >= longest:
            T = -(-T // 2)
        return T


def widest(limits: Limits) -> Widths:
    """The widths of padded rows of the run's longest prompts and completions."""
    return padded_widths(limits, limits.longest_prompt, limits.max_length_sample)


def padded_widths(limits: Limits, S: int, T: int) -> Widths:
    """The widths of rows of one prompt with S tokens, and as many of its completions with T tokens
    as the rows of all devices can have."""
    share = math.gcd(limits.completions, limits.sequences)
    S, C = (-(-n // limits.unit) * limits.unit for n in (S, share * T))
    return Widths(limits.sequences // share, S, C, power_of_two(share), T)


def plan_rows(
    batch: Batch, sequences: Sequence[int], limits: Limits
) -> tuple[list[list[list[int]]], Widths]:
    """The rows of each micro-step with these sequences of the batch, those of a device one after
    the other, and their widths. A row lists its sequences, those of a prompt one after the other.

    sequences: their numbers, in ascending order.
    No device has more tokens in a micro-step than with padded rows of the run's longest prompts and
    completions.
    """
    share = math.gcd(limits.completions, limits.sequences)
    groups = [[*group] for _, group in itertools.groupby(sequences, batch.prompt_of)]
    rows = [group[i : i + share] for group in groups for i in range(0, len(group), share)]
    longest = int(batch.prompt_lengths().max())
    S = prompt_width(longest, limits.shortest_prompt) - 1
    if longest > limits.longest_prompt + 1:  # by the text of an environment
        limits = limits._replace(longest_prompt=S)
    widths = padded_widths(limits, S, batch.completion_ids.shape[1])
    if limits.pack and rows:
        candidates = [(rows, widths), *packed_rows(batch, groups, limits)]
        costs = [cost(limits, *candidate) for candidate in candidates]
        cheap = [i for i, x in enumerate(costs) if x <= (1 + SLACK) * min(costs)]
        rows, widths = max((candidates[i] for i in cheap), key=lambda plan: (plan[1].C, plan[1].S))
    of_step = limits.shards * widths.rows
    rows = rows + [[]] * (-len(rows) % of_step)
    return [rows[i : i + of_step] for i in range(0, len(rows), of_step)], widths


def cost(limits: Limits, rows: list[list[int]], widths: Widths) -> float:
    """What the rows cost a device, in the attention of a token to one key."""
    count, S, C, _, T = widths
    keys = S**2 + C * (S + T)
    tokens = count * (S + C) + MICRO_STEP_TOKENS
    micro_steps = math.ceil(len(rows) / (limits.shards * count))
    return micro_steps * (tokens * limits.matmul_keys + count * keys)


def packed_rows(
    batch: Batch, groups: list[list[int]], limits: Limits
) -> Iterator[tuple[list[list[int]], Widths]]:
    """Packed rows of each width on the grid, one row of a device in a micro-step.

    A device has no more tokens than the widest rows give it, arrays [X*Q, T] that are not much
    larger, and no row with too many tokens.
    """
    lengths, T, most = batch.lengths.tolist(), batch.completion_ids.shape[1], widest(limits)
    groups = [sorted(group, key=lambda i: -lengths[i]) for group in groups]
    groups.sort(key=lambda group: -sum(lengths[i] for i in group))  # those with most tokens first
    prompt_tokens = [len(prompt.ids) - 1 for prompt in batch.prompts]
    tokens = most.rows * (most.S + most.C)
    Q = max(RESULTS_PER_TOKEN * tokens // T, 1)
    Q = min(2 ** (Q.bit_length() - 1), power_of_two(len(lengths)))
    tokens = min(tokens, limits.row_tokens)
    C = round_up(max(lengths[group[0]] for group in groups), GRID, limits.unit)
    while C + limits.longest_prompt <= tokens:
        rows = fill_rows(batch, lengths, groups, Widths(1, tokens - C, C, Q, T))
        S = max(sum(prompt_tokens[p] for p in prompts_of(batch, row)) for row in rows)
        S = min(round_up(S, GRID // 2, limits.unit), tokens - C)
        yield rows, Widths(1, S, C, Q, T)
        if len(rows) <= limits.shards:  # a single micro-step holds them all
            break
        C = round_up(C + 1, GRID, limits.unit)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 2 ** math.ceil(math.log2(max(n, 1)))


def round_up(n: int, steps: int, unit: int = 1) -> int:
    """The smallest number of the grid that is at least `n`. Between two powers of two the grid has
    `steps` numbers, or fewer, since all of them are multiples of `unit`."""
    step = max(2 ** (math.ceil(math.log2(max(n, 1))) - 1) // steps, unit)
    return max(math.ceil(n / step) * step, unit)


def prompts_of(batch: Batch, row: Sequence[int]) -> list[int]:
    """The prompts of a row's sequences, each once, in the order in which they stand in the row."""
    return sorted({batch.prompt_of(i) for i in row})


def fill_rows(
    batch: Batch, lengths: list[int], groups: list[list[int]], most: Widths
) -> list[list[int]]:
    """Rows with all groups that are no wider than `most`, by first-fit decreasing.

    lengths: [B] of the batch. groups: of the longest first, and so their sequences. A group, or
    each of its sequences if an empty row is too small for the group, comes into the first row that
    has room for it.
    """
    rows: list[list[int]] = []
    room: list[list[int]] = []  # of each row: for prompts, for completions, and its last prompt
    for members in groups:
        number, tokens = batch.prompt_of(members[0]), sum(lengths[i] for i in members)
        prompt = len(batch.prompts[number].ids) - 1
        fits = tokens <= most.C and len(members) <= most.Q
        for part in [members] if fits else [[i] for i in members]:
            C = sum(lengths[i] for i in part)
            for row, free in zip(rows, room, strict=True):
                S = 0 if free[2] == number else prompt
                if S <= free[0] and C <= free[1] and len(row) + len(part) <= most.Q:
                    break
            else:
                row, free, S = [], [most.S, most.C, number], prompt
                rows.append(row)
                room.append(free)
            row += part
            free[:] = free[0] - S, free[1] - C, number
    return rows


def pack(batch: Batch, rows: Sequence[Sequence[int]], widths: Widths, pad_id: int) -> MicroBatch:
    """These rows in NumPy arrays."""
    (_, S, C, Q, T), X = widths, len(rows)
    ids, positions = np.full((X, S + C), pad_id, np.int32), np.zeros((X, S + C), np.int32)
    prompt = np.full((X, S + C), -1, np.int32)
    start = np.tile(np.arange(S + C, dtype=np.int32), (X, 1))  # padding begins at itself
    targets, places = np.full((X, C), pad_id, np.int32), np.zeros((X, Q, T), np.int32)
    sequences, support = np.full((X, Q), -1, np.int32), None
    if batch.support is not None:
        support = np.full((X, C, batch.support.shape[2]), -1, np.int32)

    def write(x: int, at: int, tokens: Sequence[int], position: int, number: int) -> int:
        span = slice(at, at + len(tokens))
        ids[x, span], prompt[x, span], start[x, span] = tokens, number, at
        positions[x, span] = np.arange(position, position + len(tokens))
        return at + len(tokens)

    lengths = batch.lengths.tolist()
    for x, row in enumerate(rows):
        at, prompts = 0, prompts_of(batch, row)
        for number, p in enumerate(prompts):
            at = write(x, at, batch.prompts[p].ids[:-1], 0, number)
        at = S
        sequences[x, : len(row)] = row
        for j, i in enumerate(row):
            p, drawn = batch.prompt_of(i), batch.completion_ids[i, : lengths[i]]
            span = slice(at - S, at - S + lengths[i])
            targets[x, span] = drawn
            places[x, j, : lengths[i]] = np.arange(span.start, span.stop)
            if support is not None:
                support[x, span] = batch.support[i, : lengths[i]]
            *_, last_id = prompt_ids = batch.prompts[p].ids
            inputs = [last_id, *drawn[:-1].tolist()]
            at = write(x, at, inputs, len(prompt_ids) - 1, prompts.index(p))
    index = sequences.reshape(-1)  # [X*Q]
    used = index >= 0
    optional = {name: getattr(batch, name) for name in ("old_logps", "ref_logps", "top_mask")}
    return MicroBatch(
        *(ids, positions, prompt, start, targets, places),
        sequences=index,
        completion_mask=batch.completion_mask[index] * used[:, None].astype(np.int32),
        sampling_logps=batch.sampling_logps[index],
        advantages=np.where(used, batch.advantages[index], 0).astype(np.float32),
        support=support,
        **{name: x[index] for name, x in optional.items() if x is not None},
    )
