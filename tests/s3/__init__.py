"""A real S3 server for tests, and the tests that need one."""
