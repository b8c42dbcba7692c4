"""The command line: `cli.py` lists the commands, and larger ones have a file each."""
