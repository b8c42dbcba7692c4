"""One run from its settings to its folder, and pipelines of runs."""
