"""The collectives of a compiled program, read from the text of its optimized HLO.

The loops of a TPU program do not state their trips, which is how often the body runs. The condition
of most loops compares a counter with a constant, which gives the number of trips. A loop that may
also stop early, such as decoding, has no such number: None.
"""

import math
import re
from typing import NamedTuple

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# Other types have their bits in their names: bf16, f32, s8, f8e4m3fn.
BITS = {"pred": 8, "s4": 4, "u4": 4}
SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
INSTRUCTION = re.compile(rf"= (.*?) ({KINDS})(-start)?\(")


class Collective(NamedTuple):
    """A collective instruction of a program."""

    kind: str
    shape: str  # of the result, such as "bf16[2048,16]"
    sent_bytes: float  # bytes that a device sends each time, in a ring
    loops: tuple[int | None, ...]  # trips of each loop around it, the outermost loop first

    @property
    def times(self) -> int:
        """How often the instruction runs; a loop without a number counts once."""
        return math.prod(n or 1 for n in self.loops)


def collectives(hlo: str) -> list[Collective]:
    """Every collective in the text of compiled.as_text(), in the order of the text."""
    computations = dict(_computations(hlo))
    loops = _loops(computations)
    found = []
    for name, lines in computations.items():
        for line in lines:
            if match := INSTRUCTION.search(line):
                result, kind, start = match.groups()
                if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"  # a fusion that keeps a part of its all-reduce
                    found.append(_collective(kind, result, _group_size(line), 1, loops[name]))
                    continue
                # The tuple of a start lists the operands first; that of an all-reduce has none.
                shapes = SHAPE.findall(result)
                if start and kind != "all-reduce":
                    operands = len(
                        re.findall(r"%", line.partition(f"{kind}-start(")[2].split(")")[0])
                    )
                    result = " ".join("{}[{}]".format(*x) for x in shapes[operands : 2 * operands])
                group = _group_size(line)
                parts = group if kind == "reduce-scatter" else 1
                found.append(_collective(kind, result, group, parts, loops[name]))
    return found


def _collective(
    kind: str, result: str, group: int, parts: int, loops: tuple[int | None, ...]
) -> Collective:
    """The Collective of an instruction whose result is a part of an array of `parts` parts."""
    shapes = SHAPE.findall(result)
    size = parts * sum(_bytes(*shape) for shape in shapes)
    per_byte = {"all-reduce": 2 * (group - 1) / group, "collective-permute": 1}
    sent = size * per_byte.get(kind, (group - 1) / group)
    return Collective(kind, " ".join(f"{t}[{dims}]" for t, dims in shapes), sent, loops)


def _bytes(dtype: str, dims: str) -> float:
    digits = re.search(r"\d+", dtype)
    bits = BITS.get(dtype) or int(digits.group() if digits else 8)
    return math.prod(int(n) for n in dims.split(",") if n) * bits / 8


def _group_size(line: str) -> int:
    """The devices of a group, from {{0,1},{2,3}}, [4,2]<=[8] or mesh[...] {'axis_0'}."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match.group(1).split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match.group(1))
    if match := re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match.group(2)))
    assert "replica_groups" not in line, f"unknown form of replica_groups: {line}"
    return 2  # a permutation has pairs of devices instead of groups


def _computations(hlo: str) -> list[tuple[str, list[str]]]:
    """The name and the lines of every computation."""
    found, lines = [], []
    for line in hlo.splitlines():
        if match := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            lines = []
            found.append((match.group(1), lines))
        lines.append(line)
    return found


def _loops(computations: dict[str, list[str]]) -> dict[str, tuple[int | None, ...]]:
    """Computation -> the numbers of trips of the loops around it, the outermost loop first."""
    callers = {}  # computation -> its caller, and (trips,) if it is the body of a loop, else ()
    for name, lines in computations.items():
        for line in lines:
            trips: tuple[int | None, ...] = ()
            if match := re.search(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)", line):
                condition, body = match.groups()
                trips = (_trips(computations[condition], computations[body]),)
            for called in re.findall(r"(?:body|condition|calls|to_apply)=%([\w.\-]+)", line):
                callers[called] = (name, trips)

    def around(name: str) -> tuple[int | None, ...]:
        if name not in callers:
            return ()
        caller, trips = callers[name]
        return around(caller) + trips

    return {name: around(name) for name in computations}


def _trips(condition: list[str], body: list[str]) -> int | None:
    """The trips of a loop that counts from 0 by a constant up to a constant, else None."""
    root = next(line for line in condition if "ROOT" in line)
    match = re.search(r" compare\(%([\w.\-]+), %([\w.\-]+)\), direction=LT", root)
    if not match:
        return None
    counter, limit = (
        next((x for x in condition if f"%{name} =" in x), "") for name in match.groups()
    )
    end, index = re.search(r"constant\((\d+)\)", limit), re.search(r"index=(\d+)", counter)
    if not end or not index:
        return None
    root = next(line for line in body if "ROOT" in line)
    names = re.findall(r"%([\w.\-]+)", root.partition(" tuple(")[2].split(")")[0])
    if int(index.group(1)) >= len(names):
        return None
    added = next((x for x in body if f"%{names[int(index.group(1))]} =" in x), "")
    steps = [
        int(value.group(1))
        for name in re.findall(r"%([\w.\-]+)", added.partition(" add(")[2].split(")")[0])
        for line in body
        if f"%{name} =" in line and (value := re.search(r" constant\((\d+)\)", line))
    ]
    return math.ceil(int(end.group(1)) / (steps[0] if steps else 1))
