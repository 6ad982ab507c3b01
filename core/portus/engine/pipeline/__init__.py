"""One save in flight, from its plan to its commit, wherever it goes."""
