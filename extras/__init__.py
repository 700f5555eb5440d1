"""Features behind doors: a plain run only uses the report."""
