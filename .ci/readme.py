"""Do README and results say what happens? Runs their commands and compares the tables.

    python .ci/readme.py             every bash block of README.md and docs/results.md as it
                                     stands, in a new environment; hours, and NCL_DATA
    python .ci/readme.py --tables    only commands that print a table, of runs that are there
    python .ci/readme.py README.md   only that page

A table belongs to the bash block before it in its section, whose output must contain it: the same
names, and every figure within twice its spread (of the larger, if both have one), or within 2 % if
it has none.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
SPREAD = re.compile(rf"(?:\(|± )({NUMBER.pattern})")
PAGES = ("README.md", "docs/results.md")
PRINTS = ("python evals/table.py", "python evals/claims.py --preset small --show", "cat ")


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Every bash block of a page, with the lines of the first table after it in its section."""
    marks = [*re.finditer(r"^```bash\n(.*?)^```$", text, re.M | re.S)]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    pairs = []
    for mark, end in zip(marks, ends, strict=True):
        section = re.split(r"^#", text[mark.end() : end], maxsplit=1, flags=re.M)[0]
        after = re.search(r"(?:^\|.*\n)+", section, re.M)
        pairs.append((mark[1], after[0].splitlines() if after else []))
    return pairs


def difference(shown: list[str], printed: list[str]) -> str | None:
    """The first row of a table that is not what was printed, and what was."""
    start = next((n for n, line in enumerate(printed) if same(shown[0], line)), None)
    if start is None:
        return f"no table headed {shown[0]}"
    for mine, theirs in zip(shown, printed[start : start + len(shown)], strict=False):
        if not same(mine, theirs):
            return f"{mine}\n  but was {theirs}"
    return None if len(printed) - start >= len(shown) else f"{shown[-1]}\n  but was nothing"


def same(shown: str, printed: str) -> bool:
    """Whether two table rows have equal words and figures as near as their spread allows."""
    cells = [[cell.strip() for cell in row.split("|")] for row in (shown, printed)]
    if len(cells[0]) != len(cells[1]) or cells[0][1:2] != cells[1][1:2]:
        return False
    return all(same_cell(a, b) for a, b in zip(*cells, strict=True))


def same_cell(shown: str, printed: str) -> bool:
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    spreads = [_value(match[1]) for cell in (shown, printed) for match in SPREAD.finditer(cell)]
    means = [NUMBER.findall(SPREAD.sub("", cell)) for cell in (shown, printed)]
    if not means[0]:
        return True
    mine, theirs = ([*map(_value, numbers)] for numbers in means)
    room = 2 * max(spreads) if spreads else max(abs(n) for n in mine) / 50
    last = 10.0 ** -max(len(n.partition(".")[2]) for n in means[0])
    return all(abs(a - b) <= room + 1.01 * last for a, b in zip(mine, theirs, strict=True))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def main(tables_only: bool, pages: Sequence[str]) -> int:
    """Run the blocks one after another; the number of those that failed."""
    failed = 0
    text = "".join((ROOT / page).read_text() for page in pages)
    with tempfile.TemporaryDirectory() as folder:
        path = os.environ["PATH"]
        if not tables_only:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            path = f"{folder}/bin:{path}"
        for commands, shown in blocks(text):
            joined = commands.replace("\\\n", " ").splitlines()
            wanted = [c for c in joined if not tables_only or c.startswith(PRINTS)]
            if not wanted:
                continue
            run = subprocess.run(
                ["bash", "-ec", "\n".join(wanted)], cwd=ROOT, text=True,
                stdout=subprocess.PIPE, env=os.environ | {"PATH": path},
            )  # fmt: skip
            wrong = f"exit code {run.returncode}" if run.returncode else None
            if not wrong and shown:
                wrong = difference(shown, run.stdout.splitlines())
            print(
                f"{'FAILED' if wrong else 'ok    '} {wanted[-1]}",
                *filter(None, [wrong]),
                flush=True,
            )
            failed += bool(wrong)
    return failed


if __name__ == "__main__":
    named = [page for page in sys.argv[1:] if page != "--tables"]
    sys.exit(main("--tables" in sys.argv, named or PAGES))
