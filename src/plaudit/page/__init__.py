"""A run in a browser: `page.html`, which a run writes, and the page of all runs (`plaudit monitor --serve`)."""
