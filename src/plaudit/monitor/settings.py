"""Settings of what a run records beside its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit.support.fields import setting


@dataclass
class LogSettings:
    """Records of a run. Metrics are written at every step in any case."""

    samples_megabytes: float = setting(200.0, least=0)
    """Largest size of samples.jsonl in MB (online methods). Above it, only some answers of every step are kept."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run's folder."""
    wandb: str | None = None
    """Also log to this Weights & Biases project."""
    mlflow: str | None = None
    """Also log to this MLflow experiment."""
    trackio: str | None = None
    """Also log to this Trackio project."""
    page: bool = True
    """Keep page.html in the run's folder up to date: curves, and what each worker does. Open it in a browser."""
    quiet: bool = False
    """Print nothing on the terminal; log.txt is still written."""
