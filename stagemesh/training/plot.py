"""A picture of a training: its losses by step, and the learning rate. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stagemesh.training.history import HistoryEntry


def plot_history(entries: Sequence[HistoryEntry], path: Path, *, title: str) -> None:
    """Write a PNG.

    Args:
        entries: of all steps, in order.
        path: of the picture; replaced at once.
        title: above it.
    """
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    steps = [entry.step for entry in entries]
    losses.plot(steps, [entry.loss for entry in entries], color="tab:blue", alpha=0.35, lw=1)
    losses.plot(
        steps,
        _smooth([entry.loss for entry in entries]),
        color="tab:blue",
        label="training, smoothed",
    )
    held_out = [(e.step, e.held_out_loss) for e in entries if e.held_out_loss is not None]
    if held_out:
        losses.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", ms=4, label="held out")
    losses.set_ylabel("loss [nats per token]")
    losses.set_title(title)
    losses.grid(alpha=0.3)
    losses.legend()
    rates.plot(steps, [entry.learning_rate for entry in entries], color="tab:green")
    rates.set_ylabel("learning rate")
    rates.set_xlabel("optimizer step")
    rates.set_ylim(bottom=0)
    rates.grid(alpha=0.3)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png")
    part.replace(path)


def _smooth(values: Sequence[float], *, weight: float = 0.9) -> list[float]:
    """An average that forgets, free of the bias of its start."""
    smooth = []
    total = norm = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smooth.append(total / norm)
    return smooth
