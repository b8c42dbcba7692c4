"""Rollout: engines that sample completions, and the rollouter that turns prompts into scored groups."""
