"""The writer: fills the file of an image, and hashes what it stores."""
