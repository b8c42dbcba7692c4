"""Settings files of other systems as tables of rows: their key, ours, the conversion. A file here reads one of them."""
