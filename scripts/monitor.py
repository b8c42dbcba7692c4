"""Draw loss, reward and KL curves of every run below a folder, as PNG files: `plaudit monitor` by flags."""

from __future__ import annotations

from pathlib import Path

import click

from plaudit.commands.cli import HomePath, plain_errors


@click.command(help=__doc__)
@click.option("--log_dir", type=HomePath(path_type=Path), required=True, help="A run's folder, or one that holds runs.")
@click.option("--plot_type", default="all", show_default=True, help="loss, accuracy, reward, kl, entropy or all.")
@click.option("--output", type=HomePath(path_type=Path), help="Folder of the pictures; default: plots in LOG_DIR.")
@click.option("--traceback", is_flag=True, help="Show the whole traceback of an error.")
def main(log_dir: Path, plot_type: str, output: Path | None, traceback: bool) -> None:
    with plain_errors(output or log_dir / "plots"):
        from plaudit.monitor.plots import draw

        for path in draw(log_dir, plot_type, output):
            click.echo(path)


if __name__ == "__main__":
    main()
