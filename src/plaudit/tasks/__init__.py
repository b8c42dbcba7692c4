"""Small tasks to try every method on; nothing of the engine imports them."""
