"""Settings of runs, and the environments of two of them, which import nothing of ours."""
