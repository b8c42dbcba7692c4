"""Moves new weights to samplers that hold their own copy."""
