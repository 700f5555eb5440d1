"""What any training program needs: settings, processes, checkpoints, logs, and facts of devices."""
