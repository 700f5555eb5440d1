"""Optional modules, imported lazily: a plain run only uses the report."""
