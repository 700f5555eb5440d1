"""The network, its weights, its folders, and its place on devices."""
