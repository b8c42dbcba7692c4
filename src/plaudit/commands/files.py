"""`plaudit convert` and `export`: data and models in the form of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from plaudit.commands.errors import plain_errors
from plaudit.commands.options import HomePath, TakesOptions, plugin_option, traceback_option
from plaudit.support.visible import visible


@click.command(cls=TakesOptions)
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--to", help="Dialect of the target, such as prompt/chosen/rejected.")
@click.option("--from", "dialect", default="auto", show_default=True, help="Dialect of the source.")
@click.option("--column", "columns", multiple=True, metavar="OURS=THEIRS", help="The file's column name; repeatable.")
@click.option("--split", default="train", show_default=True, help="Split of a source that has splits.")
@click.option("--bad-rows", default=0, show_default=True, help="Number of unreadable rows that may be skipped.")
@click.option("--overwrite", is_flag=True)
@plugin_option
@traceback_option
def convert(source: str, target: str, columns: tuple[str, ...], plugins: tuple[str, ...], **options: Any) -> None:
    """Rewrite a data file in another column layout (dialect). TARGET ends in .jsonl, .json or .parquet.

    If SOURCE ends in .gguf, TARGET is a new folder for the model."""
    with plain_errors(target, plugins):
        if source.endswith(".gguf"):
            from plaudit.interchange.export import folder_from_gguf

            done = folder_from_gguf(source, target, overwrite=options["overwrite"])
        else:
            from plaudit.commands.convert import convert as convert_data

            pairs = [column.partition("=") for column in columns]
            if lone := [ours for ours, _, theirs in pairs if not theirs]:
                raise click.UsageError(f"--column {lone[0]}: write OURS=THEIRS, such as prompt=question_text")
            names = {ours: theirs for ours, _, theirs in pairs}
            done = convert_data(source, target, columns=names, **options).summary()
        click.echo(visible(done))


@click.command(cls=TakesOptions)
@click.argument("model", type=click.Path())
@click.option("--output", type=HomePath(path_type=Path), help="Folder or .gguf file; default: in the run's folder.")
@click.option("--gguf", type=click.Choice(["f32", "f16", "bf16", "q8_0"]), help="Write a GGUF file of this type.")
@click.option("--adapter", is_flag=True, help="Write the LoRA adapters alone.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--license", help="The licence's id, such as apache-2.0; default: what the base model's files name.")
@click.option("--overwrite", is_flag=True)
@traceback_option
def export(model: str, output: Path | None, **options: Any) -> None:
    """Write a trained model to share: one folder, adapters merged, in 16 bits, with a model card.

    \b
    plaudit export runs/grpo
    plaudit export runs/grpo --gguf q8_0
    plaudit export runs/grpo --adapter --output adapters
    """
    with plain_errors(output):
        from plaudit.interchange.export import export as export_model

        click.echo(visible(export_model(model, output, **options).summary()))
