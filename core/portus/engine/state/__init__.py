"""A state, nested Python values with tensors, as a pickle and storages, and back."""
