"""Evaluation of policies and judges: perplexity, answers and their rewards, preferences, comparison, KL.

evaluation.py      one model, by settings: JSON, a table, the answers
before_after.py    two stages of one training, in one table
"""
