"""The whole pipeline on made-up data: SFT, reward model, PPO, in about a minute on a CPU.

    python scripts/example.py --create_dummy_data
    python scripts/example.py --config configs/my_model_config.yaml --dist_config configs/my_distributed.yaml

The data are film comments that a grammar writes, in OUTPUT_DIR/data; they are made when asked for or not there yet.
Runs lie in OUTPUT_DIR/logs/example and are replaced each time. It is `scripts/train.py` on that data.
"""

from __future__ import annotations

from pathlib import Path

import click
from train import pipeline_options, train_pipeline

from plaudit.commands.cli import plain_errors

CONFIG = Path(__file__).parents[1] / "configs" / "example.yaml"


def create_dummy_data(folder: Path) -> dict[str, str]:
    """A few hundred rows of each kind; the source of every stage."""
    from plaudit.tasks.demo import DemoSize, make_demo

    size = DemoSize(
        sft=1200, sft_validation=60, pairs=400, pairs_validation=60, prompts=300, prompts_test=40, vocabulary=600
    )
    make_demo(folder, size=size)
    return sources(folder)


def sources(folder: Path) -> dict[str, str]:
    names = {"sft": "sft", "reward": "preferences", "rlhf": "prompts"}
    return {stage: str(folder / f"{name}.jsonl") for stage, name in names.items()}


@click.command(help=(__doc__ or "").replace("\n\n    ", "\n\n\b\n    "))
@pipeline_options(CONFIG)
@click.option("--create_dummy_data", "create", is_flag=True, help="Write the data anew.")
def main(
    create: bool, config: Path, dist_config: Path | None, output_dir: Path, traceback: bool, overrides: tuple[str, ...]
) -> None:
    with plain_errors(output_dir):
        folder = output_dir / "data"
        data = sources(folder)
        if create or not all(Path(source).exists() for source in data.values()):
            click.echo(f"dummy data: in {folder}")
            create_dummy_data(folder)
        done = train_pipeline(
            config,
            data,
            dist_config=dist_config,
            output=output_dir / "logs",
            name="example",
            overrides=overrides if any("resume=" in text for text in overrides) else ("overwrite=true", *overrides),
        )
        test = folder / "preferences_validation.jsonl"
        click.echo(f"\nplots:      python scripts/monitor.py --log_dir {done.folder} --plot_type all")
        click.echo(
            f"evaluation: python scripts/evaluate.py --config {config} --model_dir {done.folder} --test_data {test}"
        )


if __name__ == "__main__":
    main()
