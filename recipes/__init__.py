"""Settings of runs, and the environments, rewards and makers of questions that they need."""
