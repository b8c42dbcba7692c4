"""Tinker's training API: forward-backward, optimizer step, sample and save, for loops that others wrote."""
