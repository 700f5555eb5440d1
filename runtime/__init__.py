"""What keeps a run alive: sizes, processes, checkpoints, logs; it knows no loss and no reward."""
