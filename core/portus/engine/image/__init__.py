"""Images: the exact bytes of a checkpoint file, laid out before anything is copied."""
