"""What every room may use: paths, plugins, text that a terminal can show."""
