"""The demo's task, to try every method on; nothing of the engine imports it."""
