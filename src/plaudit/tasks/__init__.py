"""Generated tasks for `plaudit demo`, to try every method on. No other package but the command line imports them."""
