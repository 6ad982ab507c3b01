"""The order of changes at paths, and the waits for them."""
