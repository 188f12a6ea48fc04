"""The table of families in docs/models.md: written and read."""

import re
from collections.abc import Iterable
from pathlib import Path

import transformers

from tools.families.parity import YES, FamilyRow

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
_ROW = re.compile(r"^\| ([\w-]+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)


def render(rows: Iterable[FamilyRow]) -> str:
    """The table with a line that says what it was made with."""
    rows = list(rows)
    with_stages = [row for row in rows if row.stages == YES]
    with_ranks = [row for row in rows if row.tensor_parallel == YES]
    lines = [
        f"Made by `python -m tools.families --write` with transformers {transformers.__version__}: "
        f"of {len(rows)} families {len(with_stages)} run in stages and {len(with_ranks)} with two "
        "tensor-parallel ranks.",
        "",
        "| family | stages | tensor parallel | notes |",
        "|---|---|---|---|",
    ]
    lines.extend(
        f"| {row.family} | {row.stages} | {row.tensor_parallel or 'no'} | {row.notes or '-'} |"
        for row in rows
    )
    return "\n".join(lines)


def write(rows: Iterable[FamilyRow]) -> None:
    """Put the table into the document."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{render(rows)}\n{END}{after}")


def read() -> dict[str, FamilyRow]:
    """The rows of the document, by family."""
    table = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    rows: dict[str, FamilyRow] = {}
    for family, stages, ranks, notes in _ROW.findall(table):
        if family != "family":
            rows[family] = FamilyRow(
                family=family,
                stages=stages,
                tensor_parallel="" if ranks == "no" else ranks,
                notes="" if notes == "-" else notes,
            )
    return rows
