"""The model and the questions of the demo, and what has made them."""
