"""A directory as a place for checkpoints: drafts, publishing, spares, holds."""
