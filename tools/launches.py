"""How often the host launches a kernel for a program on a GPU, and how often the GPU waits for it,
from the program's optimized HLO."""

import re

# Instructions without a kernel. Those of fusions are in computations of their own.
WITHOUT = (
    "parameter constant tuple get-tuple-element bitcast after-all copy-done async-done".split()
)
CALLED = r"(?:body|to_apply|calls)=%?([\w.\-]+)"


def count_launches(hlo: str, iterations: int = 1) -> tuple[int, int]:
    """The kernels of an execution, and its waits: one before each iteration of a loop whose number
    of iterations the compiler does not know. iterations: the number that such a loop has."""
    computations: dict[str, list[tuple[str, str]]] = {}
    for line in hlo.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = computations.setdefault("ENTRY" if match[1] else match[2], [])
        elif match := re.match(r"\s+(?:ROOT )?%?\S+ = .*? ([a-z][\w\-]*)\((.*)", line):
            body.append((match[1], match[2]))

    def count(name: str) -> tuple[int, int]:
        kernels, waits = 0, 0
        for instruction, rest in computations[name]:
            times = 1
            if instruction == "while":
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
                times = int(known[1]) if known else iterations
                waits += 0 if known else iterations
            if instruction in ("while", "call", "async-start"):
                for called in re.findall(CALLED, rest):
                    of_body = count(called)
                    kernels, waits = kernels + times * of_body[0], waits + times * of_body[1]
            elif instruction not in WITHOUT:
                kernels += 1
        return kernels, waits

    return count("ENTRY")
