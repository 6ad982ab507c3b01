"""Values that a user gives: which are allowed, and what they mean."""
