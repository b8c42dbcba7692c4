"""Start, resume and check runs, and pipelines of runs."""
