"""What every benchmark prints: a table for a person, one JSON object for a program."""

import argparse
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A bound that an issue or a document sets, and what was measured."""

    name: str
    value: float
    floor: float
    unit: str
    holds: bool


def at_least(name: str, value: float, floor: float, *, unit: str = "x") -> Floor:
    """A floor for a figure where more is better."""
    return Floor(name=name, value=round(value, 3), floor=floor, unit=unit, holds=value >= floor)


def at_most(name: str, value: float, floor: float, *, unit: str = "x") -> Floor:
    """A bound for a figure where less is better."""
    return Floor(name=name, value=round(value, 3), floor=floor, unit=unit, holds=value <= floor)


def median(values: Sequence[float]) -> float:
    """Median of at least one value."""
    return statistics.median(values)


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks share."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", action="store_true", help="print one JSON object last")
    result.add_argument("--rounds", type=int, default=5, help="rounds to take medians over")
    return result


def report(
    title: str, rows: list[dict[str, Any]], floors: Sequence[Floor], *, as_json: bool
) -> None:
    """Print rows and floors."""
    console = Console(stderr=as_json, width=160)
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="right" if column != "what" else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)
    for floor in floors:
        word = "holds" if floor.holds else "MISSED"
        console.print(f"{word}: {floor.name} = {floor.value}{floor.unit} (floor {floor.floor})")
    if as_json:
        machine = {
            "cores": psutil.cpu_count(),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        print(
            json.dumps({"machine": machine, "results": rows, "floors": [asdict(f) for f in floors]})
        )


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
