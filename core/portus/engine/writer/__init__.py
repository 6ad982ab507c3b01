"""Images, written to files: copied and hashed in one pass, through memory or past it."""
