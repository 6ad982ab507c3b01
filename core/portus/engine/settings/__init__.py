"""Values that a user gives: their limits and their meaning."""
