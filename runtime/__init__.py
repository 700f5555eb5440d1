"""What keeps a run alive: settings, sizes, rows, processes, checkpoints, logs and pages."""
