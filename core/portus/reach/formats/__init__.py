"""Formats of checkpoint files besides those of ``torch.save``."""
