"""The native engine's decoder: its cache, pages and steps."""
