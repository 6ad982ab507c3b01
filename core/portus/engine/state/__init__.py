"""A state, nested Python values with tensors, as a tree, tensor specs and storages, and back."""
