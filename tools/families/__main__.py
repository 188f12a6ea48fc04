"""`python -m tools.families [--write] [FAMILY ...]`: run families, print or write their rows."""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tools.families.parity import FamilyRow, examine
from tools.families.table import read, render, write
from tools.families.tiny_configs import causal_families


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="transformers' model types; default all")
    parser.add_argument("--write", action="store_true", help="write their rows to docs/models.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    rows = [_row(family) for family in arguments.families or causal_families()]
    if arguments.write:
        renewed = {row.family: row for row in rows}
        if arguments.families:
            renewed = read() | renewed
        write(renewed[family] for family in sorted(renewed))
    else:
        sys.stdout.write(render(rows) + "\n")


def _row(family: str) -> FamilyRow:
    with tempfile.TemporaryDirectory() as folder:
        return examine(family, Path(folder))


if __name__ == "__main__":
    main()
