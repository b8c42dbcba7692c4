"""Modules that every package may use: paths, plugins, fields of settings, text that a terminal can show."""
