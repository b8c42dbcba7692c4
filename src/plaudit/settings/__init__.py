"""The tree of settings, the recipes that fill it and what is checked before a run."""
