"""`python -m plaudit`, the same as the command `plaudit`."""

from plaudit.commands.cli import main

main(prog_name="plaudit")
