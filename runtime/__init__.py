"""What keeps a run alive and knows nothing of GRPO."""
