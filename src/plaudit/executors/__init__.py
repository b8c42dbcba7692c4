"""Executors: the workers of a run and where they run. Loop, algorithms and learner are the same under each."""
