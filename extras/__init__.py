"""Features behind doors: a plain run needs none of them but the report."""
