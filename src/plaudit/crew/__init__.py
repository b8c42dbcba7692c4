"""Crews: who does the work of a run, and where. The loop, the algorithms and the learner are the same under each."""
