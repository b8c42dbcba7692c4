"""A run's records: where they are written, read, drawn and judged."""
