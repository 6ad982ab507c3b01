"""What is released: made by one command, and tried as a user gets it."""
