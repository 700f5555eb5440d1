"""What nobody needs to train: the plan for a TPU that is not here, times, pictures."""
