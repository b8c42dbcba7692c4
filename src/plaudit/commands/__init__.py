"""The command line, a file for each command that is more than a call."""
